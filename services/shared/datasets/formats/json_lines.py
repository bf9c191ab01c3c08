"""JSON lines, and JSON documents: an array of objects, on one line or many, or objects in sequence."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.shared.datasets.formats.records import MAX_LINE_BYTES, Record
from services.shared.datasets.formats.text_lines import read_lines
from services.shared.datasets.upload import FatalFault, Fault

_WHITE_SPACE = re.compile(r"[\s,]*")
_CHUNK_BYTES = 2**18


def read_json_lines(path: Path, *, encoding: str) -> Iterator[Record | Fault]:
    """Yield an object per line; empty lines are skipped."""
    for number, line in read_lines(path, encoding=encoding):
        if isinstance(line, Fault):
            yield line
            continue
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except RecursionError:
            yield Fault(line=number, field=None, message="is nested too deeply")
            continue
        except ValueError as error:
            yield Fault(line=number, field=None, message=f"is not valid JSON: {error}")
            continue
        yield _record(value, number)


def read_json_document(path: Path, *, encoding: str) -> Iterator[Record | Fault]:
    """Yield the objects of an array, or of a sequence of objects, holding one at a time in memory.

    `Record.line` is the number of the object from 1. An object longer than MAX_LINE_BYTES is a fault.
    """
    decoder = json.JSONDecoder()
    chunks = _chunks(path, encoding)
    buffer, position, number, opened, attempt_at = "", 0, 0, False, 0
    ended = False
    while True:
        position = _skip(buffer, position)
        if not opened and position < len(buffer) and buffer[position] == "[":
            opened = True
            position += 1
            continue
        remaining = len(buffer) - position
        if remaining and buffer[position] == "]" and opened:
            return
        # Doubling the text before each new attempt keeps the time linear in the length of an object.
        if remaining > attempt_at or (ended and remaining):
            try:
                value, position = decoder.raw_decode(buffer, position)
            except RecursionError:
                yield FatalFault(line=number + 1, field=None, message="is nested too deeply")
                return
            except ValueError as error:
                if ended or remaining > MAX_LINE_BYTES:
                    reason = f"is not valid JSON: {str(error)[:200]}"
                    if not ended:
                        reason = f"is longer than {MAX_LINE_BYTES:,} characters or not valid JSON"
                    yield FatalFault(line=number + 1, field=None, message=reason)
                    return
                attempt_at = 2 * remaining
            else:
                attempt_at = 0
                number += 1
                yield _record(value, number)
                continue
        elif ended:
            if opened:
                yield FatalFault(
                    line=number + 1, field=None, message="the array is cut off: ] is missing"
                )
            return
        chunk = next(chunks, None)
        if isinstance(chunk, Fault):
            yield chunk
            return
        if chunk is None:
            ended = True
            continue
        buffer, position = buffer[position:] + chunk, 0


def _skip(buffer: str, position: int) -> int:
    match = _WHITE_SPACE.match(buffer, position)
    return match.end() if match else position


def _chunks(path: Path, encoding: str) -> Iterator[str | Fault]:
    """Yield decoded text; the array may be one line, so that lines do not bound it."""
    decoder = codecs.getincrementaldecoder(encoding)()
    with path.open("rb") as file:
        first = True
        while True:
            raw = file.read(_CHUNK_BYTES)
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                yield FatalFault(
                    line=None, field=None, message=f"is not {encoding.upper()}: {error.reason}"
                )
                return
            yield text.removeprefix("\ufeff") if first else text
            first = False
            if not raw:
                return


def _record(value: Any, number: int) -> Record | Fault:
    if isinstance(value, dict):
        return Record(number, value)
    return Fault(line=number, field=None, message="is not a JSON object")
