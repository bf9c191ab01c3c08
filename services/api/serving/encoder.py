"""From text to tokens, as in training, off the event loop where the text is long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer

from services.api.serving.errors import TextTooLong, UnusableText

# A token of the longest kind in common vocabularies (Qwen, Llama) spans up to 128 spaces; a text
# that is longer than so many characters a token cannot fit, whatever it says.
MAX_CHARACTERS_PER_TOKEN = 128


@dataclass(frozen=True)
class Encoded:
    """The tokens of one text."""

    tokens: list[int]
    truncated: bool


class Encoder(Protocol):
    """Turns texts into tokens."""

    def encode(self, texts: Sequence[str], *, truncate: bool) -> list[Encoded]:
        """Return the tokens of each text. Raises TextTooLong, UnusableText."""
        ...


class TokenizerEncoder:
    """Encodes with the student's own tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer_json: str, *, max_length: int) -> None:
        self._max_length = max_length
        self._whole = Tokenizer.from_str(tokenizer_json)
        self._whole.no_padding()
        self._whole.no_truncation()
        self._cut = Tokenizer.from_str(tokenizer_json)
        self._cut.no_padding()
        self._cut.enable_truncation(max_length)

    def encode(self, texts: Sequence[str], *, truncate: bool) -> list[Encoded]:
        """Return the tokens of each text. Raises TextTooLong, UnusableText."""
        # What lies behind the window cannot change the tokens that are kept, and five megabytes of
        # it would cost a second of a core.
        window = (self._max_length + 1) * MAX_CHARACTERS_PER_TOKEN
        seen = [text[:window] if len(text) > window else text for text in texts]
        for index, text in enumerate(seen):
            if not _is_unicode(text):
                raise UnusableText(index, "holds a lone surrogate, which is not valid Unicode")
        # encode_batch_fast lets other threads run (encode does not: a long text held them up for 50 ms),
        # and leaves out the offsets that nobody reads.
        encodings = self._whole.encode_batch_fast(seen)
        result = []
        for index, encoding in enumerate(encodings):
            tokens = encoding.ids
            if not tokens:
                raise UnusableText(index, "is empty: no token is left of it")
            truncated = len(tokens) > self._max_length or len(texts[index]) > window
            if truncated and not truncate:
                raise TextTooLong(index, len(tokens), self._max_length)
            if len(tokens) > self._max_length:
                tokens = self._cut.encode_batch_fast([seen[index]])[0].ids
            result.append(Encoded(tokens, truncated))
        return result


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
