"""Polls the API, and checks every response against the components that were down at that moment."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

# From the kill of a component to its first response, and for requests in flight.
MARGIN_SECONDS = 1.0
_POLL_SECONDS = 0.2


@dataclass
class Outage:
    """A time window in which a component may be unavailable, in monotonic seconds."""

    start: float
    end: float = float("inf")

    def overlaps(self, start: float, end: float) -> bool:
        return self.start <= end and start <= self.end + MARGIN_SECONDS


@dataclass(frozen=True)
class Response:
    """A response of the API, or status 0 where there was none."""

    name: str
    start: float
    end: float
    status: int
    has_retry_after: bool


class AvailabilityMonitor:
    """Two threads: one lists jobs, one predicts; outages are declared by those who cause them."""

    def __init__(self, url: str, *, requests: tuple[str, ...] = ("jobs", "predict")) -> None:
        self._url = url
        self._stop = threading.Event()
        self._outages: dict[str, list[Outage]] = {"api": [], "postgres": []}
        self._responses: list[Response] = []
        self._threads = [
            threading.Thread(target=self._poll, args=(name,), daemon=True) for name in requests
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def begin_outage(self, component: str) -> Outage:
        """Declare that `component` may be unavailable until the outage's `end` is set."""
        outage = Outage(time.monotonic())
        self._outages[component].append(outage)
        return outage

    @contextmanager
    def outage(self, component: str) -> Iterator[None]:
        """Declare an outage for the duration of the block."""
        outage = self.begin_outage(component)
        try:
            yield
        finally:
            outage.end = time.monotonic()

    def record(self, response: Response) -> None:
        """Keep a response."""
        self._responses.append(response)

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of responses by request and status; 0 counts missing responses."""
        found: dict[str, Counter[str]] = {"jobs": Counter(), "predict": Counter()}
        for response in list(self._responses):
            found[response.name][str(response.status)] += 1
        return {name: dict(sorted(counter.items())) for name, counter in found.items()}

    def violations(self) -> list[str]:
        """Return the errors that no outage explains."""
        return [
            f"{each.name} returned {each.status} (Retry-After: {each.has_retry_after}) "
            f"at {each.start:.1f} s"
            for each in list(self._responses)
            if not self._is_expected(each)
        ]

    def _is_expected(self, response: Response) -> bool:
        if response.status == 200:
            return True
        # A killed API does not respond; a restarted one has no student until that is loaded.
        if response.status in (0, 503) and self._is_down("api", response):
            return True
        if response.name != "jobs" or not self._is_down("postgres", response):
            return False
        return response.status == 503 and response.has_retry_after

    def _is_down(self, component: str, response: Response) -> bool:
        return any(
            outage.overlaps(response.start, response.end) for outage in self._outages[component]
        )

    def _poll(self, name: str) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while not self._stop.wait(_POLL_SECONDS):
                start = time.monotonic()
                try:
                    if name == "jobs":
                        response = client.get("/jobs", params={"limit": 1})
                    else:
                        response = client.post("/predict", json={"inputs": "it was clean"})
                    status, has_retry_after = (
                        response.status_code,
                        "Retry-After" in response.headers,
                    )
                except httpx.TransportError:
                    status, has_retry_after = 0, False
                self.record(Response(name, start, time.monotonic(), status, has_retry_after))
