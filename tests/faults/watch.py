"""Asks the API ten times a second, and holds every answer against what was down at that moment."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

# From the kill of a part to its first answer, and for requests that were under way.
MARGIN_SECONDS = 1.0


class Watch:
    """Two threads: one reads jobs, one predicts; `excuse` opens a window in which a part is away."""

    def __init__(self, url: str, *, asks: tuple[str, ...] = ("jobs", "predict")) -> None:
        self._url = url
        self._stop = threading.Event()
        self._windows: dict[str, list[list[float]]] = {"api": [], "postgres": []}
        self._answers: list[tuple[float, float, str, int, bool]] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(name,), daemon=True) for name in asks
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def begin(self, part: str) -> list[float]:
        """Open a window in which `part` may be away; its second number ends it."""
        window = [time.monotonic(), float("inf")]
        self._windows[part].append(window)
        return window

    @contextmanager
    def excuse(self, part: str) -> Iterator[None]:
        """Hold a window open."""
        window = self.begin(part)
        try:
            yield
        finally:
            window[1] = time.monotonic()

    def note(
        self, name: str, began: float, ended: float, *, status: int, retry_after: bool
    ) -> None:
        """Keep an answer; status 0 is none."""
        self._answers.append((began, ended, name, status, retry_after))

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the answers by request and status; 0 stands for no answer."""
        found: dict[str, Counter[str]] = {"jobs": Counter(), "predict": Counter()}
        for _, _, name, status, _ in list(self._answers):
            found[name][str(status)] += 1
        return {name: dict(sorted(counter.items())) for name, counter in found.items()}

    def violations(self) -> list[str]:
        """Return the answers that nothing excuses."""
        found = []
        for began, ended, name, status, retry_after in list(self._answers):
            if status == 200:
                continue
            # Dead it says nothing; started again, it has no student until that is loaded.
            if status in (0, 503) and self._excused("api", began, ended):
                continue
            excused = name == "jobs" and self._excused("postgres", began, ended)
            if excused and status == 503 and retry_after:
                continue
            found.append(f"{name} answered {status} (Retry-After: {retry_after}) at {began:.1f} s")
        return found

    def _excused(self, part: str, began: float, ended: float) -> bool:
        return any(
            start <= ended and began <= end + MARGIN_SECONDS for start, end in self._windows[part]
        )

    def _ask(self, name: str) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while not self._stop.wait(0.2):
                began = time.monotonic()
                try:
                    if name == "jobs":
                        answer = client.get("/jobs", params={"limit": 1})
                    else:
                        answer = client.post("/predict", json={"inputs": "it was clean"})
                    status, told = answer.status_code, "Retry-After" in answer.headers
                except httpx.TransportError:
                    status, told = 0, False
                self.note(name, began, time.monotonic(), status=status, retry_after=told)
