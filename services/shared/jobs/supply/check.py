"""Checks a model directory in a sandbox; a directory that has not changed is checked once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from services.shared.jobs.supply.config import check_configs
from services.shared.jobs.supply.directory import Refused, check_files
from services.shared.jobs.supply.tokenizer import check_tokenizer
from services.shared.jobs.supply.weights import check_weights
from services.shared.sandbox.errors import LimitExceeded
from services.shared.sandbox.sandbox import Sandbox

_MAX_REMEMBERED = 256

State = tuple[tuple[str, int, int, int], ...]  # name, size, inode and time of change of each file


def refusal_of(directory: Path) -> str | None:
    """Return why a model directory is not loaded, in one sentence, or None. Call it in a sandbox."""
    try:
        check_files(directory)
        check_configs(directory)
        check_weights(directory)
        check_tokenizer(directory)
    except Refused as refused:
        return str(refused)
    except OSError as error:
        return f"a file cannot be read ({error.strerror})"
    return None


class ModelSupply:
    """Answers whether directories may be loaded; thread-safe."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._known: OrderedDict[tuple[Path, State], str | None] = OrderedDict()
        self._lock = threading.Lock()

    def refusal(self, directory: Path) -> str | None:
        """Return why a directory is not loaded, in one sentence, or None.

        Raises SandboxBusy and SandboxFailed, and OSError where it cannot be listed.
        """
        key = (directory, _state(directory))
        with self._lock:
            if key in self._known:
                return self._known[key]
        try:
            found = self._sandbox.run(refusal_of, directory)
        except LimitExceeded as error:
            found = f"reading its configs or running its tokenizer {error}"
        with self._lock:
            self._known[key] = found
            while len(self._known) > _MAX_REMEMBERED:
                self._known.popitem(last=False)
        return found


def _state(directory: Path) -> State:
    return tuple(
        (path.name, status.st_size, status.st_ino, status.st_mtime_ns)
        for path in sorted(directory.iterdir())
        if (status := path.stat())
    )
