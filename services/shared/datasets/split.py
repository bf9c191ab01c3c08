"""Which texts are for training, validation and test: decided by the text alone."""

from __future__ import annotations

import hashlib
import unicodedata

from services.shared.datasets.card import Split
from services.shared.datasets.upload import SplitFractions

# Changing it moves texts between the splits of datasets uploaded again: never change it.
_SALT = b"stillhouse split 1\n"


def text_key(text: str) -> bytes:
    """Return 16 bytes that are equal for texts that differ only in form or outer white space."""
    normal = unicodedata.normalize("NFC", text).strip()
    return hashlib.sha256(_SALT + normal.encode()).digest()[:16]


def split_of(key: bytes, fractions: SplitFractions) -> Split:
    """Return the split of the text with this key: the same in every dataset with these fractions.

    Growing the validation share keeps every text that was in validation there.
    """
    position = int.from_bytes(key[:8], "big") / 2**64
    if position < fractions.validation:
        return Split.VALIDATION
    if position < fractions.validation + fractions.test:
        return Split.TEST
    return Split.TRAIN
