"""What one text of a dataset is: a string, a pair of strings or chat messages; and the characters it may have.

`/predict` takes the same three kinds under the same rule of characters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

# Control characters come from broken exports and from terminals. Tabs, line and page breaks are legitimate.
_CONTROL_BYTES = bytes(set(range(32)) - set(b"\t\n\v\f\r") | {127})
_CONTROL_CHARACTERS = dict.fromkeys(_CONTROL_BYTES, None)


class TextKind(str, Enum):
    """What each text of a dataset, and each input of a model that was trained on it, is."""

    SINGLE = "single"  # one string
    PAIR = "pair"  # two strings, joined by the tokenizer's own encoding of pairs
    CHAT = "chat"  # messages, rendered by the tokenizer's chat template where it has one

    __str__ = str.__str__


class Pair(NamedTuple):
    """Two texts that are classified together."""

    text: str
    text_pair: str


class Message(NamedTuple):
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class Chat:
    """The messages of a chat, in order."""

    messages: tuple[Message, ...]

    def __len__(self) -> int:
        """Return the number of characters of all messages."""
        return sum(len(message.role) + len(message.content) for message in self.messages)


Text: TypeAlias = str | Pair | Chat


def kind_of(text: Text) -> TextKind:
    """Return the kind of a text."""
    if isinstance(text, str):
        return TextKind.SINGLE
    return TextKind.PAIR if isinstance(text, Pair) else TextKind.CHAT


def strings_of(text: Text) -> tuple[str, ...]:
    """Return the strings that a text consists of."""
    if isinstance(text, str):
        return (text,)
    if isinstance(text, Pair):
        return (text.text, text.text_pair)
    return tuple(part for message in text.messages for part in message)


def num_characters(text: Text) -> int:
    """Return the number of characters of a text."""
    return sum(map(len, strings_of(text)))


def plain_text(text: Text) -> str:
    """Return a text as one string: both texts of a pair on a line each, messages as lines `role: content`."""
    if isinstance(text, str):
        return text
    if isinstance(text, Pair):
        return "\n".join(text)
    return "\n".join(f"{message.role}: {message.content}" for message in text.messages)


def with_prefix(text: Text, prefix: str) -> Text:
    """Return a text, of a pair the first one, after the prefix that a model was trained with; chats have none."""
    if isinstance(text, str):
        return prefix + text
    if isinstance(text, Pair):
        return Pair(prefix + text.text, text.text_pair)
    return text


def character_fault(text: str) -> str | None:
    """Return why a string is no text, as the end of a sentence, or None.

    A NUL and other control characters are refused, except tabs, line and page breaks; so is half of a
    surrogate pair.
    """
    try:
        raw = text.encode()  # bytes.translate scans 5 MB in 9 ms
    except UnicodeEncodeError:
        return "contains a lone surrogate, which is not valid Unicode"
    if len(raw.translate(None, _CONTROL_BYTES)) == len(raw):
        return None
    found = next(character for character in raw if character in _CONTROL_BYTES)
    return f"contains the control character U+{found:04X}" if found else "contains a NUL character"


def remove_control_characters(text: str) -> str:
    """Return the string without the control characters that `character_fault` refuses."""
    return text.translate(_CONTROL_CHARACTERS)


def to_columns(text: Text) -> tuple[str, str | None]:
    """Return what the columns `text` and `text_pair` of a stored dataset hold."""
    if isinstance(text, str):
        return text, None
    if isinstance(text, Pair):
        return text.text, text.text_pair
    messages = [message._asdict() for message in text.messages]
    return json.dumps(messages, ensure_ascii=False), None


def from_columns(kind: TextKind, text: str, text_pair: str | None) -> Text:
    """Return the text that `to_columns` has stored. Raises ValueError for columns of another kind."""
    if kind is TextKind.SINGLE:
        return text
    if kind is TextKind.PAIR:
        if text_pair is None:
            raise ValueError("a pair has no second text")
        return Pair(text, text_pair)
    return Chat(tuple(Message(**message) for message in json.loads(text)))
