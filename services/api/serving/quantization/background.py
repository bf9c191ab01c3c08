"""Quantizes promoted students to 8 bits, one at a time, in a low-priority process.

If several API processes serve an artifact, one of them quantizes it and the others wait for the result.
Torch-free: the work is done by `services.api.serving.quantization.quantize`.
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

from services.api.serving.memory_headroom import available_bytes, bytes_to_quantize
from services.api.serving.promotion import Promotion
from services.api.serving.quantization.record import int8_weights_path, read_quantization_record
from services.api.serving.settings import EngineChoice, ServingSettings

log = structlog.get_logger(__name__)

# What the process exits with; anything else is a failure.
PASSED, NOT_PASSED = 0, 3
_LOWEST_PRIORITY = "19"
_RETRY_SECONDS = 10.0


class BackgroundQuantizer:
    """Quantizes the submitted students and notifies when the record of one has been written."""

    def __init__(
        self,
        settings: ServingSettings,
        *,
        on_quantized: Callable[[Promotion], None],
        python: str = sys.executable,
        retry_seconds: float = _RETRY_SECONDS,
    ) -> None:
        self._settings = settings
        self._python = python
        self._retry_seconds = retry_seconds
        self._on_quantized = on_quantized
        self._queue: SimpleQueue[Promotion | None] = SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # between stopping and starting a process
        self._thread = threading.Thread(target=self._work, name="quantize", daemon=True)

    @property
    def is_running(self) -> bool:
        """Return whether the thread is alive."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread that quantizes what is submitted."""
        self._thread.start()

    def stop(self, *, timeout_seconds: float = 10.0) -> None:
        """Stop now; a quantization in progress is terminated and its result discarded."""
        with self._lock:
            self._stopping.set()
            if self._process is not None:
                self._process.terminate()
        self.finish(timeout_seconds=timeout_seconds)

    def finish(self, *, timeout_seconds: float) -> None:
        """Wait until everything submitted so far is done, then stop."""
        self._queue.put(None)
        self._thread.join(timeout_seconds)

    def submit(self, promotion: Promotion) -> None:
        """Quantize a promoted student if `should_quantize`."""
        if should_quantize(promotion, self._settings):
            self._queue.put(promotion)

    def _work(self) -> None:
        while (promotion := self._queue.get()) is not None and not self._stopping.is_set():
            try:
                self._quantize(promotion)
            except (OSError, ValueError) as error:
                log.error("quantization_failed", model_id=promotion.model_id, reason=str(error))
                continue
            if read_quantization_record(promotion.directory) is not None:
                self._on_quantized(promotion)

    def _quantize(self, promotion: Promotion) -> None:
        """Quantize a student, waiting for memory or for another process that quantizes it."""
        reason: str | None
        logged = None
        while not self._stopping.is_set():
            with _artifact_lock(promotion.directory) as lock:
                if read_quantization_record(promotion.directory) is not None:
                    return
                if lock is None:
                    reason = "another process quantizes it"
                elif (reason := self._memory_reason(promotion)) is None:
                    code = self._run(promotion, lock)
                    if self._stopping.is_set():
                        return
                    if code not in (PASSED, NOT_PASSED):
                        raise ValueError(f"the process exited with {code}")  # it has said why
                    log.info(
                        "student_quantized", model_id=promotion.model_id, passed=code == PASSED
                    )
                    return
            if reason != logged:
                log.info("quantization_waits", model_id=promotion.model_id, reason=reason)
                logged = reason
            self._stopping.wait(self._retry_seconds)

    def _memory_reason(self, promotion: Promotion) -> str | None:
        needed = bytes_to_quantize(promotion.directory, self._settings)
        if needed <= available_bytes():
            return None
        return f"it needs about {needed >> 20} MiB of memory"

    def _run(self, promotion: Promotion, lock: int) -> int:
        command = [self._python, "-m", "services.api.serving.quantization.quantize"]
        command += [str(promotion.directory), str(promotion.dataset_dir)]
        command += ["--nice", _LOWEST_PRIORITY]
        with self._lock:
            if self._stopping.is_set():
                return -1
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, pass_fds=(lock,))
        return self._process.wait()


def should_quantize(promotion: Promotion, settings: ServingSettings) -> bool:
    """Return whether a student would serve faster in 8 bits and has not been quantized yet."""
    if settings.engine is not EngineChoice.AUTO or settings.device not in ("auto", "cpu"):
        return False
    if promotion.dataset_dir is None or not promotion.dataset_dir.is_dir():
        return False
    size = sum(file.stat().st_size for file in promotion.directory.glob("*.safetensors"))
    if size < settings.prepare_int8_from_bytes:
        return False
    return read_quantization_record(promotion.directory) is None


@contextmanager
def _artifact_lock(artifact_dir: Path) -> Iterator[int | None]:
    """Yield the descriptor of the lock on an artifact's quantization, None if another process holds it.

    A process that inherits the descriptor holds the lock too, so that a quantization that outlives its
    API process is not started again by another.
    """
    path = int8_weights_path(artifact_dir).with_suffix(".lock")
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield file.fileno()
