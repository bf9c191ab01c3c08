"""Reads torchrun's report of the ranks that failed: its summary in the log, its error files."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from services.shared.files.tail import read_tail

_TAIL_BYTES = 256 * 1024
_BLOCK = re.compile(
    r"^\s*rank\s*:\s*(?P<rank>\d+) .*\n\s*exitcode\s*:\s*(?P<exit_code>-?\d+)\b", re.MULTILINE
)
_ROOT_CAUSE = "Root Cause (first observed failure):"


@dataclass(frozen=True)
class RankExit:
    """How a rank's process ended, as torchrun saw it."""

    rank: int
    exit_code: int
    is_root_cause: bool  # the first that torchrun observed

    @property
    def signal_name(self) -> str | None:
        """The signal that ended the process, if one did."""
        if self.exit_code >= 0:
            return None
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:
            return f"signal {-self.exit_code}"


def read_summary(log: Path) -> list[RankExit]:
    """Return the failed ranks that torchrun lists at the end of its log, the root cause first."""
    text = read_tail(log, max_bytes=_TAIL_BYTES)
    start = text.rfind("FAILED\n---")
    if start < 0:
        return []
    summary = text[start:]
    root_at = summary.find(_ROOT_CAUSE)
    exits = [
        RankExit(
            rank=int(block["rank"]),
            exit_code=int(block["exit_code"]),
            is_root_cause=0 <= root_at < block.start(),
        )
        for block in _BLOCK.finditer(summary)
    ]
    return sorted(exits, key=lambda found: (not found.is_root_cause, found.rank))


def read_error_file(log_dir: Path, rank: int) -> str | None:
    """Return the traceback that torch elastic's `record` wrote for a rank, if there is one."""
    for path in log_dir.glob(f"*/attempt_0/{rank}/error.json"):
        try:
            message = json.loads(path.read_text())["message"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(message, str):
            return message
        details = message.get("extraInfo") or {}
        return str(details.get("py_callstack") or message.get("message") or "")
    return None
