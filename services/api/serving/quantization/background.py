"""Prepares promoted students for 8-bit serving, one at a time, in a process that yields to others.

Where several API processes serve an artifact, one of them prepares it and the others wait for what it
leaves. Torch-free: the work is done by `services.api.serving.quantization.quantize`.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import structlog

from services.api.serving.memory_headroom import available_bytes, memory_to_prepare
from services.api.serving.promotion import Promoted
from services.api.serving.quantization.record import prepared_weights, read_prepared
from services.api.serving.settings import EngineChoice, ServingSettings

log = structlog.get_logger(__name__)

_LOWEST_PRIORITY = "19"
_RETRY_SECONDS = 10.0


class Preparer:
    """Prepares what is worth it and says what was prepared; the gate's word lies beside the artifact."""

    def __init__(
        self,
        settings: ServingSettings,
        *,
        on_prepared: Callable[[Promoted], None],
        python: str = sys.executable,
        retry_seconds: float = _RETRY_SECONDS,
    ) -> None:
        self._settings = settings
        self._python = python
        self._retry_seconds = retry_seconds
        self._on_prepared = on_prepared
        self._queue: SimpleQueue[Promoted | None] = SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # between stopping and starting a process
        self._thread = threading.Thread(target=self._work, name="prepare", daemon=True)

    def start(self) -> None:
        """Begin to prepare what is asked for."""
        self._thread.start()

    def stop(self, *, timeout_seconds: float = 10.0) -> None:
        """Prepare no more; what is half done is thrown away."""
        with self._lock:
            self._stopping.set()
            if self._process is not None:
                self._process.terminate()
        self._queue.put(None)
        self._thread.join(timeout_seconds)

    def consider(self, promoted: Promoted) -> None:
        """Prepare a student that serves, where that is wanted, possible and not done."""
        if is_worth_preparing(promoted, self._settings):
            self._queue.put(promoted)

    def _work(self) -> None:
        while (promoted := self._queue.get()) is not None and not self._stopping.is_set():
            try:
                self._prepare(promoted)
            except (OSError, ValueError) as error:
                log.error("prepare_failed", model_id=promoted.model_id, why=str(error))
                continue
            if read_prepared(promoted.directory) is not None:
                self._on_prepared(promoted)

    def _prepare(self, promoted: Promoted) -> None:
        """Prepare a student, or wait until another process has done so or memory is there."""
        obstacle: str | None
        told = None
        while not self._stopping.is_set():
            with _turn(promoted.directory) as lock:
                if read_prepared(promoted.directory) is not None:
                    return
                if lock is None:
                    obstacle = "another process prepares it"
                elif (obstacle := self._obstacle(promoted)) is None:
                    code = self._run(promoted, lock)
                    log.info(
                        "prepared", model_id=promoted.model_id, passed=code == 0, exit_code=code
                    )
                    return
            if obstacle != told:
                log.info("preparing_waits", model_id=promoted.model_id, why=obstacle)
                told = obstacle
            self._stopping.wait(self._retry_seconds)

    def _obstacle(self, promoted: Promoted) -> str | None:
        needed = memory_to_prepare(promoted.directory, self._settings)
        if needed <= available_bytes():
            return None
        return f"it needs about {needed >> 20} MiB of memory"

    def _run(self, promoted: Promoted, lock: int) -> int:
        command = [self._python, "-m", "services.api.serving.quantization.quantize"]
        command += [str(promoted.directory), str(promoted.dataset_dir), "--nice", _LOWEST_PRIORITY]
        with self._lock:
            if self._stopping.is_set():
                return -1
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, pass_fds=(lock,))
        return self._process.wait()


@contextmanager
def _turn(artifact_dir: Path) -> Iterator[int | None]:
    """Yield the descriptor of the lock on preparing an artifact; None where another process has it.

    Whoever inherits it holds the lock too: a preparation that outlives its API process goes on alone.
    """
    path = prepared_weights(artifact_dir).with_suffix(".lock")
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield file.fileno()


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
