"""How labels are compared that were meant to be the same."""

from __future__ import annotations

import unicodedata

_INVISIBLE = dict.fromkeys(
    map(ord, "\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\u00ad"), None
)  # zero-width characters and the soft hyphen


def normalize_label(label: str) -> str:
    """Return the label without differences of case, width, white space and invisible characters."""
    folded = unicodedata.normalize("NFKC", label.translate(_INVISIBLE)).casefold()
    return " ".join(folded.split())
