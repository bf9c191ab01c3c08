"""Decoded lines of a text file of bounded length, with a fault in place of a line that cannot be read."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from pathlib import Path

from services.shared.datasets.formats.records import MAX_LINE_BYTES
from services.shared.datasets.upload import Fault

_BOM = b"\xef\xbb\xbf"
_CHUNK_BYTES = 2**16


def read_lines(path: Path, *, encoding: str = "utf-8") -> Iterator[tuple[int, str | Fault]]:
    """Yield (line number from 1, the line with its terminator or a fault). Lines end with LF, CRLF or CR."""
    if "\n".encode(encoding) != b"\n" or ends_with_lone_cr(path):
        yield from _decoded_lines(path, encoding)
        return
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES):
            number += 1
            if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield number, _too_long(number)
                continue
            if number == 1:
                raw = raw.removeprefix(_BOM)
            try:
                yield number, raw.decode(encoding)
            except UnicodeDecodeError as error:
                message = (
                    f"is not {encoding.upper()}: byte {error.start + 1} of the line is "
                    f"0x{raw[error.start]:02x}"
                )
                yield number, Fault(line=number, field=None, message=message)


def ends_with_lone_cr(path: Path) -> bool:
    """Return whether lines end with CR alone, as in files of old spreadsheet programs."""
    with path.open("rb") as file:
        sample = file.read(_CHUNK_BYTES)
    return b"\r" in sample and b"\n" not in sample


def _decoded_lines(path: Path, encoding: str) -> Iterator[tuple[int, str | Fault]]:
    """Yield lines by decoding chunks: for encodings whose line ends are not the byte LF."""
    with path.open("rb") as file:
        decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
        newlines = io.IncrementalNewlineDecoder(None, translate=True)
        pending, number, skipping = "", 0, False
        while True:
            raw = file.read(_CHUNK_BYTES)
            text = newlines.decode(decoder.decode(raw, final=not raw), final=not raw)
            if not pending and not number:
                text = text.removeprefix("\ufeff")
            *lines, pending = (pending + text).split("\n")
            for line in lines:
                number += 1
                yield number, _too_long(number) if skipping else _checked(line + "\n", number)
                skipping = False
            if len(pending) > MAX_LINE_BYTES:
                pending, skipping = "", True
            if not raw:
                break
        if pending or skipping:
            number += 1
            yield number, _too_long(number) if skipping else _checked(pending, number)


def _checked(line: str, number: int) -> str | Fault:
    if "\ufffd" not in line:
        return line
    message = "contains bytes that are not valid in the file's encoding"
    return Fault(line=number, field=None, message=message)


def _too_long(number: int) -> Fault:
    return Fault(line=number, field=None, message=f"is longer than {MAX_LINE_BYTES:,} bytes")
