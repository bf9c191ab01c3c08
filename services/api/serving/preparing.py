"""Prepares promoted students for 8-bit serving, one at a time, in a process that yields to others.

Torch-free: the work is done by `services.api.serving.prepare`.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

import structlog

from services.api.serving.gate import read_prepared
from services.api.serving.promoted import Promoted
from services.api.serving.settings import EngineChoice, ServingSettings

log = structlog.get_logger(__name__)

_LOWEST_PRIORITY = "19"


class Preparer:
    """Prepares what is worth it and says what was prepared; the gate's word lies beside the artifact."""

    def __init__(
        self,
        settings: ServingSettings,
        *,
        on_prepared: Callable[[Promoted], None],
        python: str = sys.executable,
    ) -> None:
        self._settings = settings
        self._python = python
        self._on_prepared = on_prepared
        self._queue: SimpleQueue[Promoted | None] = SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._lock = threading.Lock()  # between stopping and starting a process
        self._thread = threading.Thread(target=self._work, name="prepare", daemon=True)

    def start(self) -> None:
        """Begin to prepare what is asked for."""
        self._thread.start()

    def stop(self, *, timeout_seconds: float = 10.0) -> None:
        """Prepare no more; what is half done is thrown away."""
        with self._lock:
            self._stopping = True
            if self._process is not None:
                self._process.terminate()
        self._queue.put(None)
        self._thread.join(timeout_seconds)

    def consider(self, promoted: Promoted) -> None:
        """Prepare a student that serves, where that is wanted, possible and not done."""
        if is_worth_preparing(promoted, self._settings):
            self._queue.put(promoted)

    def _work(self) -> None:
        while (promoted := self._queue.get()) is not None and not self._stopping:
            try:
                code = self._run(promoted)
            except OSError as error:
                log.error("prepare_failed", model_id=promoted.model_id, why=str(error))
                continue
            log.info("prepared", model_id=promoted.model_id, passed=code == 0, exit_code=code)
            if read_prepared(promoted.directory) is not None:
                self._on_prepared(promoted)

    def _run(self, promoted: Promoted) -> int:
        command = [self._python, "-m", "services.api.serving.prepare"]
        command += [str(promoted.directory), str(promoted.dataset_dir), "--nice", _LOWEST_PRIORITY]
        with self._lock:
            if self._stopping:
                return -1
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        return self._process.wait()


def is_worth_preparing(promoted: Promoted, settings: ServingSettings) -> bool:
    """Say whether a student would serve faster in 8 bits, and has not been tried yet."""
    if settings.engine is not EngineChoice.AUTO or settings.device not in ("auto", "cpu"):
        return False
    if promoted.dataset_dir is None or not promoted.dataset_dir.is_dir():
        return False
    size = sum(file.stat().st_size for file in promoted.directory.glob("*.safetensors"))
    if size < settings.prepare_int8_from_bytes:
        return False
    return read_prepared(promoted.directory) is None
