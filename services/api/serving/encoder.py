"""Tokenisation, identical to that of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer

from services.api.serving.errors import TextTooLong, UnusableText

# The maximum length where heads.json does not record that of training.
DEFAULT_MAX_LENGTH = 512

# The longest tokens in common vocabularies (Qwen, Llama) are 128 spaces; a text with more characters per
# token than that cannot fit, whatever its content.
MAX_CHARACTERS_PER_TOKEN = 128


@dataclass(frozen=True)
class Encoded:
    """The tokens of one text."""

    tokens: list[int]
    truncated: bool


class Encoder(Protocol):
    """Converts texts to tokens."""

    def encode(self, texts: Sequence[str], *, truncate: bool) -> list[Encoded]:
        """Return the tokens of each text. Raises TextTooLong, UnusableText."""
        ...


class TokenizerEncoder:
    """Encodes with the student's tokenizer. Thread-safe."""

    def __init__(self, tokenizer_json: str, *, max_length: int) -> None:
        self._max_length = max_length
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._truncating_tokenizer = Tokenizer.from_str(tokenizer_json)
        self._truncating_tokenizer.no_padding()
        self._truncating_tokenizer.enable_truncation(max_length)

    def encode(self, texts: Sequence[str], *, truncate: bool) -> list[Encoded]:
        """Return the tokens of each text. Raises TextTooLong, UnusableText."""
        # Characters beyond the window cannot change the tokens that are kept, and tokenising five
        # megabytes of them would take a core one second.
        window = (self._max_length + 1) * MAX_CHARACTERS_PER_TOKEN
        visible = [text[:window] if len(text) > window else text for text in texts]
        for index, text in enumerate(visible):
            if not _is_unicode(text):
                raise UnusableText(index, "has a lone surrogate, which is not valid Unicode")
        # encode_batch_fast releases the GIL (encode does not: a long text blocked other threads for
        # 50 ms) and skips the offsets, which are not used.
        encodings = self._tokenizer.encode_batch_fast(visible)
        result = []
        for index, encoding in enumerate(encodings):
            tokens = encoding.ids
            if not tokens:
                raise UnusableText(index, "is empty: it has no tokens")
            truncated = len(tokens) > self._max_length or len(texts[index]) > window
            if truncated and not truncate:
                raise TextTooLong(index, len(tokens), self._max_length)
            if len(tokens) > self._max_length:
                tokens = self._truncating_tokenizer.encode_batch_fast([visible[index]])[0].ids
            result.append(Encoded(tokens, truncated))
        return result


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
