"""How much of everything one key may have."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]


class Quota(BaseModel):
    """The most that one key may have; no limit where it is left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stored_bytes: Count | None = None  # datasets and models, until their files are gone
    queued_jobs: Count | None = None  # waiting and queued; further ones are refused
    running_jobs: Count | None = None  # at once; further ones stay queued


UNLIMITED = Quota()
