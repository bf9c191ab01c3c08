"""A promotion as serving sees it, and who is notified about its rollout. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.shared.jobs.gates import Int8Gate


@dataclass(frozen=True)
class Promotion:
    """The decision that `alias`, qualified by its project, should serve the artifact in `directory` from now on."""

    promotion_id: str
    alias: str
    model_id: str
    name: str
    version: str
    directory: Path
    dataset_dir: Path | None = None  # its held-out texts decide whether int8 may serve


class RolloutListener(Protocol):
    """Receives the outcome of promotions, from several threads; must not block."""

    def on_served(self, promotion: Promotion, *, engine: str) -> None:
        """Handle a promotion whose model now serves."""
        ...

    def on_refused(self, promotion: Promotion, reason: str, *, transient: bool) -> None:
        """Handle a promotion whose model may not serve, or not yet if `transient`."""
        ...

    def on_int8_gate(self, promotion: Promotion, gate: Int8Gate) -> None:
        """Handle the decision whether a model may serve in 8 bits."""
        ...


class NullListener:
    """Ignores every notification."""

    def on_served(self, promotion: Promotion, *, engine: str) -> None:
        """Do nothing."""

    def on_refused(self, promotion: Promotion, reason: str, *, transient: bool) -> None:
        """Do nothing."""

    def on_int8_gate(self, promotion: Promotion, gate: Int8Gate) -> None:
        """Do nothing."""


class StudentRefused(Exception):
    """A promoted student may not serve; the previous one keeps serving."""

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient  # worth a retry later, for example when memory is short
