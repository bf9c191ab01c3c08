"""Loads a tokenizer and encodes short texts with it: run in a sandbox, whose limits end what explodes.

A pattern may backtrack for hours, a chain of replacements may double a text at each step, and padding may
ask for a billion tokens. None of that is visible without running it, and /predict runs it on any text.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.shared.jobs.supply.directory import Refused

_LENGTH = (
    2000  # characters of a probe: an exponential pattern takes years, an ordinary one microseconds
)
_TOKENS_PER_CHARACTER = 20  # a character has up to four bytes, and a token may be split further
_MOST_LETTERS = 64


def check_tokenizer(directory: Path) -> None:
    """Load tokenizer.json and encode probes. Raises Refused; without the file there is nothing to run."""
    path = directory / "tokenizer.json"
    if not path.exists():
        return
    text = path.read_text("utf-8", errors="replace")
    try:
        tokenizer: Any = Tokenizer.from_str(text)
    except BaseException as error:  # a panic of Rust is no Exception
        if isinstance(error, MemoryError | KeyboardInterrupt):
            raise
        raise Refused(f"tokenizer.json cannot be loaded ({str(error)[:100]})") from error
    for probe in _probes(json.loads(text)):
        try:
            count = len(tokenizer.encode(probe).ids)
        except BaseException as error:
            if isinstance(error, MemoryError | KeyboardInterrupt):
                raise
            raise Refused(f"tokenizer.json cannot encode a text ({str(error)[:100]})") from error
        if count > _TOKENS_PER_CHARACTER * (len(probe) + 100):
            raise Refused(
                f"tokenizer.json makes {count:,} tokens of {len(probe):,} characters; remove padding to a "
                "fixed length and replacements that lengthen a text"
            )


def _probes(document: Any) -> Iterator[str]:
    """Yield short texts, and repetitions of every character that a pattern names, with a surprise at the end."""
    yield from ("", "a", "The quick brown fox, 1234 times: \u4f60\u597d\n\n  done")
    patterns = "".join(_patterns(document))
    letters = dict.fromkeys(
        [*"aA1 \n.\u4f60", *(c for c in patterns if c in string.ascii_letters + string.digits)]
    )
    for letter in list(letters)[:_MOST_LETTERS]:
        yield letter * _LENGTH + "!\x01"
    yield "ab1 .\n" * (_LENGTH // 6)


def _patterns(value: Any) -> Iterator[str]:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack += [inner for key, inner in item.items() if key not in ("vocab", "merges")]
            if isinstance(item.get("Regex"), str):
                yield item["Regex"][:1000]
        elif isinstance(item, list):
            stack += item[:1000]
