"""Tokenisation, identical to that of training. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer

from services.api.serving.errors import TextTooLong, UnusableText
from services.shared.datasets.text import Text, TextKind, kind_of
from services.shared.model.segments import mark_types

# The maximum length where heads.json does not record that of training.
DEFAULT_MAX_LENGTH = 512

# The longest tokens in common vocabularies (Qwen, Llama) are 128 spaces; a text with more characters per
# token than that cannot fit, whatever its content.
MAX_CHARACTERS_PER_TOKEN = 128


@dataclass(frozen=True)
class Encoded:
    """The tokens of one text; of a pair, those of type 1 are marked (services.shared.model.segments)."""

    tokens: list[int]
    truncated: bool


class Encoder(Protocol):
    """Converts texts to tokens."""

    def encode(self, texts: Sequence[Text], *, truncate: bool) -> list[Encoded]:
        """Return the tokens of each text. Raises TextTooLong, UnusableText."""
        ...


TokenizerInput = str | tuple[str, str]
# What a text becomes, and whether the tokenizer adds its special tokens; ValueError where it is refused.
ConvertText = Callable[[Text], tuple[TokenizerInput, bool]]
_EXPECTED = {
    TextKind.SINGLE: "single texts: send a string",
    TextKind.PAIR: 'pairs of texts: send {"text": ..., "text_pair": ...}',
    TextKind.CHAT: 'chat messages: send {"messages": [{"role": ..., "content": ...}]}',
}
_GIVEN = {TextKind.SINGLE: "a single text", TextKind.PAIR: "a pair", TextKind.CHAT: "a chat"}


def _convert_single(text: Text) -> tuple[TokenizerInput, bool]:
    assert isinstance(text, str)
    return text, True


class TokenizerEncoder:
    """Encodes with the student's tokenizer. Thread-safe."""

    def __init__(
        self,
        tokenizer_json: str,
        *,
        max_length: int,
        kind: TextKind = TextKind.SINGLE,
        convert: ConvertText = _convert_single,
        marks_types: bool = False,
    ) -> None:
        """`convert` makes of a text of `kind` what the tokenizer takes; `marks_types` keeps token types."""
        self._kind = kind
        self._convert = convert
        self._marks_types = marks_types and kind is TextKind.PAIR
        self._max_length = max_length
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._truncating_tokenizer = Tokenizer.from_str(tokenizer_json)
        self._truncating_tokenizer.no_padding()
        self._truncating_tokenizer.enable_truncation(max_length, strategy="longest_first")

    def encode(self, texts: Sequence[Text], *, truncate: bool) -> list[Encoded]:
        """Return the tokens of each text. Raises TextTooLong, UnusableText."""
        # Characters beyond the window cannot change the tokens that are kept, and tokenising five
        # megabytes of them would take a core one second.
        window = (self._max_length + 1) * MAX_CHARACTERS_PER_TOKEN
        inputs, special = [], True
        for index, text in enumerate(texts):
            given, special = self._input(index, text)
            inputs.append(given)
        visible = [_cut(given, window) for given in inputs]
        for index, given in enumerate(visible):
            if not all(map(_is_unicode, _parts(given))):
                raise UnusableText(index, "has a lone surrogate, which is not valid Unicode")
        # encode_batch_fast releases the GIL (encode does not: a long text blocked other threads for
        # 50 ms) and skips the offsets, which are not used.
        encodings = self._tokenizer.encode_batch_fast(visible, add_special_tokens=special)
        result = []
        for index, encoding in enumerate(encodings):
            tokens = encoding.ids
            if not tokens:
                raise UnusableText(index, "is empty: it has no tokens")
            truncated = len(tokens) > self._max_length or visible[index] != inputs[index]
            if truncated and not truncate:
                raise TextTooLong(index, len(tokens), self._max_length)
            if len(tokens) > self._max_length:
                (encoding,) = self._truncating_tokenizer.encode_batch_fast(
                    [visible[index]], add_special_tokens=special
                )
                tokens = encoding.ids
            if self._marks_types:
                tokens = mark_types(tokens, encoding.type_ids)
            result.append(Encoded(tokens, truncated))
        return result

    def _input(self, index: int, text: Text) -> tuple[TokenizerInput, bool]:
        """Return what the tokenizer takes. Raises UnusableText."""
        kind = kind_of(text)
        if kind is not self._kind:
            raise UnusableText(
                index, f"is {_GIVEN[kind]}, and the model was trained on {_EXPECTED[self._kind]}"
            )
        try:
            return self._convert(text)
        except ValueError as error:
            raise UnusableText(index, f"cannot be rendered: {error}") from error


def _parts(given: TokenizerInput) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else given


def _cut(given: TokenizerInput, window: int) -> TokenizerInput:
    """Return the text, each part cut to `window` characters."""
    if isinstance(given, str):
        return given[:window] if len(given) > window else given
    first, second = given
    return first[:window], second[:window]


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
