"""The texts of a prediction request, which may be strings, pairs of strings or chats."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from services.shared.datasets.text import Chat, Message, Pair, Text

MAX_MESSAGES = 1000  # of one chat


class _Input(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class PairInput(_Input):
    """Two texts, for a model that was trained on pairs."""

    text: str
    text_pair: str


class MessageInput(_Input):
    """One message of a chat."""

    role: Annotated[str, Field(max_length=200)]
    content: str


class ChatInput(_Input):
    """Messages, for a model that was trained on chats."""

    messages: Annotated[list[MessageInput], Field(min_length=1, max_length=MAX_MESSAGES)]


TextInput = str | PairInput | ChatInput


def to_text(value: TextInput) -> Text:
    """Return what the request holds as a text."""
    if isinstance(value, str):
        return value
    if isinstance(value, PairInput):
        return Pair(value.text, value.text_pair)
    return Chat(tuple(Message(each.role, each.content) for each in value.messages))
