"""Detection of the encoding of a text file."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import Path

from charset_normalizer import from_bytes

_SAMPLE_BYTES = 2**16
_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
_MIN_EVIDENCE = 16  # non-ASCII bytes; fewer do not tell encodings apart
_MAX_INVALID_SHARE = 0.1  # of the lines with non-ASCII bytes: the rest is UTF-8 with damaged lines
# Without utf-8 and utf-16, which are recognised exactly. In order of preference where two fit equally.
_CANDIDATES = ("gb18030", "big5", "shift_jis", "euc_kr", "cp1251", "cp1252", "cp1250")
_BOMS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True)
class DetectedEncoding:
    """An encoding, and the others that fit as well; more than one fits: the file must not be read."""

    name: str
    alternatives: tuple[str, ...] = ()


def detect_encoding(path: Path) -> DetectedEncoding:
    """Return the encoding of a text file; UTF-8 where the file is valid, or nearly so."""
    with path.open("rb") as file:
        start = file.read(_SAMPLE_BYTES)
    for bom, name in _BOMS:
        if start.startswith(bom):
            return DetectedEncoding(name)
    if utf16 := _utf16_without_bom(start):
        return DetectedEncoding(utf16)
    sample, num_non_ascii, num_invalid = _non_ascii_lines(path)
    if num_invalid == 0 or num_invalid <= num_non_ascii * _MAX_INVALID_SHARE:
        return DetectedEncoding("utf-8")
    if sum(byte > 127 for byte in sample) < _MIN_EVIDENCE:
        return DetectedEncoding("utf-8")
    return _best_match(sample)


def _best_match(sample: bytes) -> DetectedEncoding:
    matches = list(from_bytes(sample, cp_isolation=list(_CANDIDATES)))
    if not matches:
        return DetectedEncoding("utf-8")
    best = min((match.chaos, -match.coherence) for match in matches)
    fitting = [m.encoding for m in matches if (m.chaos, -m.coherence) == best]
    fitting.sort(key=_CANDIDATES.index)
    if set(fitting) <= {"cp1252", "cp1250"}:  # Western text in both; cp1252 is far more common
        return DetectedEncoding("cp1252" if "cp1252" in fitting else fitting[0])
    return DetectedEncoding(fitting[0], tuple(fitting[1:]))


def _utf16_without_bom(start: bytes) -> str | None:
    """Return the byte order of UTF-16 where every second byte is mostly zero, as in text with markup."""
    if len(start) < 4:
        return None
    even, odd = start[0::2].count(0), start[1::2].count(0)
    half = len(start) // 2
    if odd > half * 0.3 and even < half * 0.02:
        return "utf-16-le"
    if even > half * 0.3 and odd < half * 0.02:
        return "utf-16-be"
    return None


def _non_ascii_lines(path: Path) -> tuple[bytes, int, int]:
    """Return (a sample of the lines with non-ASCII bytes, their number, how many are not UTF-8)."""
    sample, size, total, invalid, continued = [], 0, 0, 0, False
    with path.open("rb") as file:
        while line := file.readline(_SAMPLE_BYTES):
            is_continuation, continued = continued, not line.endswith(b"\n")
            if line.isascii():
                continue
            total += 1
            if _is_utf8(line, is_continuation=is_continuation, is_continued=continued):
                continue
            invalid += 1
            if size < _SAMPLE_BYTES:
                sample.append(line)
                size += len(line)
    return b"".join(sample), total, invalid


def _is_utf8(part: bytes, *, is_continuation: bool, is_continued: bool) -> bool:
    """Return whether a part of a line is UTF-8; it may begin or end within a character."""
    if is_continuation:
        part = part.lstrip(_CONTINUATION_BYTES)
    try:
        part.decode("utf-8")
    except UnicodeDecodeError as error:
        return is_continued and error.end == len(part) and error.start > len(part) - 4
    return True
