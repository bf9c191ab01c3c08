"""A promotion as the serving room sees it, and why a student may be refused. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Promoted:
    """From this promotion on, `alias` is meant to serve the artifact in `directory`."""

    promotion_id: str
    alias: str
    model_id: str
    name: str
    version: str
    directory: Path
    dataset_dir: Path | None = None  # whose held-out texts an 8-bit engine is compared on


class StudentRefused(Exception):
    """A promoted student may not serve; the former one goes on serving."""

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient  # worth another try later, for example when memory is short
