"""The port of launching: submit, status, cancel and logs of one attempt, whatever starts its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from services.shared.jobs.run_directory import RunDirectory
from services.shared.launch.torchrun import Launch


class EngineState(str, Enum):
    """The stage of an attempt, as its engine sees it."""

    ABSENT = "absent"  # the engine knows of no such attempt
    RUNNING = "running"
    ENDED = "ended"

    __str__ = str.__str__


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One attempt to be started; the engine finds it again by its name."""

    name: str
    run: RunDirectory
    launch: Launch


@dataclass(frozen=True, kw_only=True)
class EngineStatus:
    """What an engine says of one attempt."""

    state: EngineState
    id: str = ""  # the engine's own
    exit_code: int | None = None  # once it has ended; negative for a signal


ABSENT = EngineStatus(state=EngineState.ABSENT)


class LaunchEngine(Protocol):
    """Starts, observes and ends attempts."""

    def submit(self, submission: Submission) -> str:
        """Start an attempt that the engine does not know yet; return the engine's id."""

    def status(self, names: Sequence[str]) -> dict[str, EngineStatus]:
        """Return the status of each attempt; ABSENT for those that the engine does not know."""

    def cancel(self, name: str, *, kill: bool = False) -> None:
        """End an attempt: ask its processes, or with `kill` let none live."""

    def logs(self, run: RunDirectory, *, max_bytes: int) -> str:
        """Return the end of what the processes of an attempt have printed."""
