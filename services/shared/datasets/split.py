"""Assigns texts to the training, validation and test splits by a hash of the text alone."""

from __future__ import annotations

import hashlib
import unicodedata

from services.shared.datasets.card import Split
from services.shared.datasets.text import Text, strings_of
from services.shared.datasets.upload import SplitFractions

# Never change this salt: datasets that are uploaded again would have texts in other splits.
_SALT = b"stillhouse split 1\n"
_SEPARATOR = "\x1f"  # between the parts of a text; no text contains it


def text_key(text: Text) -> bytes:
    """Return a 16-byte hash of a text, ignoring its Unicode normalization form and outer white space."""
    parts = (unicodedata.normalize("NFC", part).strip() for part in strings_of(text))
    return hashlib.sha256(_SALT + _SEPARATOR.join(parts).encode()).digest()[:16]


def assign_split(key: bytes, fractions: SplitFractions) -> Split:
    """Return the split of the text with this key, which is the same in every dataset with these fractions.

    A larger validation fraction keeps every text that was in the validation split before.
    """
    position = int.from_bytes(key[:8], "big") / 2**64
    if position < fractions.validation:
        return Split.VALIDATION
    if position < fractions.validation + fractions.test:
        return Split.TEST
    return Split.TRAIN
