"""A promotion as the serving room sees it, and why a student may be refused. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.shared.jobs.gates import Int8Gate


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


class Reports(Protocol):
    """Who is told what became of promotions. Called by several threads; nothing is waited for."""

    def served(self, promoted: Promoted, *, engine: str) -> None:
        """Hear that the promoted student serves."""
        ...

    def refused(self, promoted: Promoted, why: str, *, transient: bool) -> None:
        """Hear that it may not serve, or not now."""
        ...

    def prepared(self, promoted: Promoted, gate: Int8Gate) -> None:
        """Hear whether it may serve in 8 bits."""
        ...


class NoReports:
    """Tells nobody."""

    def served(self, promoted: Promoted, *, engine: str) -> None:
        """Keep it to oneself."""

    def refused(self, promoted: Promoted, why: str, *, transient: bool) -> None:
        """Keep it to oneself."""

    def prepared(self, promoted: Promoted, gate: Int8Gate) -> None:
        """Keep it to oneself."""


class StudentRefused(Exception):
    """A promoted student may not serve; the former one goes on serving."""

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient  # worth another try later, for example when memory is short
