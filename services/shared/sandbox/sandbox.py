"""Calls one of our functions in a limited process: a bounded number at once, the others wait briefly."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

from services.shared.sandbox.codec import argument_type, name_of, result_type
from services.shared.sandbox.errors import SandboxBusy
from services.shared.sandbox.fork_server import ForkServer
from services.shared.sandbox.limits import Limits
from services.shared.sandbox.protocol import Call

ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")


class Sandbox:
    """Calls functions through a fork server, at most `max_running` at once, with at most `max_waiting` in a queue.

    It blocks the calling thread, never the event loop: call it from a route's thread. The bounds leave
    most of those threads to other routes. A caller that is named holds at most half of the places.
    """

    def __init__(
        self,
        server: ForkServer,
        *,
        limits: Limits,
        max_running: int = 0,
        max_waiting: int = 8,
    ) -> None:
        self._server = server
        self._limits = limits
        self._max_running = max_running or os.cpu_count() or 1
        self._max_places = self._max_running + max_waiting
        self._free = threading.Semaphore(self._max_running)
        self._lock = threading.Lock()
        self._places: Counter[str] = Counter()

    @property
    def server(self) -> ForkServer:
        """The fork server, which starts with the first call."""
        return self._server

    @property
    def num_places(self) -> int:
        """The number of calls that run or wait."""
        with self._lock:
            return self._places.total()

    def run(
        self, function: Callable[[ArgumentT], ResultT], argument: ArgumentT, *, caller: str = ""
    ) -> ResultT:
        """Return `function(argument)`, called in a process of its own.

        Raises TooSlow and TooLarge where it exceeds the limits, SandboxBusy, and SandboxFailed.
        """
        call = Call(name_of(function), self._limits, argument_type(function).dump_json(argument))
        with self._place(caller):
            if not self._free.acquire(timeout=self._limits.wall_seconds):
                raise SandboxBusy("no process was free in time")
            try:
                content = self._server.call(call)
            finally:
                self._free.release()
        return cast("ResultT", result_type(function).validate_json(content))

    @contextmanager
    def _place(self, caller: str) -> Iterator[None]:
        with self._lock:
            of_caller = self._places[caller] if caller else 0
            if self._places.total() >= self._max_places or of_caller >= self._max_places // 2:
                raise SandboxBusy(f"{self._places.total()} calls run or wait already")
            self._places[caller] += 1
        try:
            yield
        finally:
            with self._lock:
                self._places[caller] -= 1
                if not self._places[caller]:
                    del self._places[caller]
