"""Column types that replace what Postgres cannot store.

Postgres refuses NUL characters, lone surrogates and, in JSON, numbers that are not finite. All of
them occur in input: names, logs, diverged losses. They are replaced here and nowhere else.
"""

from __future__ import annotations

import math
import re
from typing import Any

from sqlalchemy import Text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


class CleanText(TypeDecorator[str]):
    """Text whose unstorable characters become U+FFFD."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002
        return None if value is None else clean_text(value)


class CleanJson(TypeDecorator[Any]):
    """JSONB whose unstorable characters become U+FFFD and whose NaN and infinities become null."""

    impl = JSONB(none_as_null=True)
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:  # noqa: ARG002
        return clean_json(value)


def clean_text(text: str) -> str:
    """Return the text with every character that Postgres refuses replaced."""
    return _UNSTORABLE.sub("\ufffd", text)


def clean_json(value: Any) -> Any:
    """Return the value with every text cleaned and every number finite or null."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {clean_text(str(key)): clean_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean_json(item) for item in value]
    return value
