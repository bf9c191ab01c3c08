"""Schemathesis hooks that make a third of the valid requests succeed, beyond what a schema can express.

No random body names an existing dataset and a model that can be planned, so without this no job would be
stored, and the routes of stored jobs would never be reached. Intentionally invalid bodies stay unchanged. (So
do uploads: schemathesis reports a file that it has not generated as a schema violation.) The dataset id comes
from FUZZ_DATASET_ID; the choice depends on the body's hash, so that a seed reproduces a run.
"""

from __future__ import annotations

import os
import zlib
from typing import Any

import schemathesis

from tests.fuzz.small_model import SMALL_MODEL

DATASET_ID = os.environ["FUZZ_DATASET_ID"]
SHARE = 3


@schemathesis.hook  # type: ignore[untyped-decorator]
def before_call(ctx: Any, case: Any, **kwargs: Any) -> None:
    if case.method.upper() != "POST" or not isinstance(case.body, dict) or not _is_valid(case):
        return
    if zlib.crc32(repr(case.body).encode()) % SHARE:
        return
    if case.operation.path in ("/jobs", "/jobs/plan"):
        case.body = _job(case.body)


def _is_valid(case: Any) -> bool:
    if case.meta is None:
        return True
    parts = [case.meta.generation, *case.meta.components.values()]
    return all(part.mode.value == "positive" for part in parts)


def _job(body: dict[str, Any]) -> dict[str, Any]:
    if body.get("kind") == "chain":
        return body | {
            "teacher": _settled(body["teacher"], model=SMALL_MODEL),
            "distill": _without(body["distill"], "dataset_id") | {"student": SMALL_MODEL},
        }
    if body.get("kind") == "teacher":
        return _settled(body, model=SMALL_MODEL)
    return body


def _settled(job: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the job with the existing dataset, without what could make it invalid or too large."""
    kept = _without(job, "heads", "resources", "recipe", "training")
    return kept | {"dataset_id": DATASET_ID, **fields}


def _without(job: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in job.items() if name not in names}
