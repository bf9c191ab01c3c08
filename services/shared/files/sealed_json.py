"""JSON documents that carry a checksum of their own content, so that damage on disk is noticed.

A sealed document has `"format": 2` and `"checksum"`, the SHA-256 of its other fields in canonical form.
Documents of format 1, written before there were checksums, are accepted as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

FORMAT = 2
_CHECKSUM = "checksum"


def seal(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON document with its format and checksum."""
    content = {**document, "format": FORMAT}
    return {**content, _CHECKSUM: _sha256(content)}


def unseal(data: bytes) -> dict[str, Any]:
    """Return a document without its checksum. Raises ValueError where its content is not as written."""
    document = json.loads(data)
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    found = document.pop(_CHECKSUM, None)
    if found is None and document.get("format", 1) == 1:
        return document
    if found != _sha256(document):
        raise ValueError("its content does not match its checksum")
    return document


def _sha256(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
