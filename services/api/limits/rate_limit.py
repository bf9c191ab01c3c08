"""How often a caller may ask: a token bucket for each key and class of requests, in this process."""

from __future__ import annotations

import ipaddress
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import Request

from services.api.problems import ProblemError
from services.api.settings import ApiSettings

MAX_CALLERS = 10_000  # buckets that one meter keeps; keys are few, strangers' addresses are not
IPV6_NETWORK_BITS = 64  # what one subscriber is given: its addresses are one caller


class RateLimiter:
    """A token bucket for each caller, all of one size; called from the event loop alone.

    A caller is kept as one number, the moment at which its bucket is full again (the generic cell rate
    algorithm, ITU-T I.371). `per_second` 0 lets everything pass.
    """

    def __init__(
        self,
        *,
        per_second: float = 0.0,
        burst: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        max_callers: int = MAX_CALLERS,
    ) -> None:
        self._interval = 1 / per_second if per_second else 0.0  # seconds that bring a token
        self._slack = (max(burst, 1.0) - 1) * self._interval
        self._clock = clock
        self._most_callers = max_callers
        self._full_at: dict[str, float] = {}

    def try_acquire(self, caller: str) -> float:
        """Take a token of the caller's; return 0, or the seconds until there will be one."""
        if not self._interval:
            return 0.0
        now = self._clock()
        full_at = max(self._full_at.get(caller, now), now)
        wait = full_at - now - self._slack
        if wait > 0:
            return wait
        self._full_at[caller] = full_at + self._interval
        if len(self._full_at) > self._most_callers:
            self._forget(now)
        return 0.0

    def acquire(self, caller: str) -> None:
        """Take a token. Raises ProblemError saying when to come back where there is none."""
        wait = self.try_acquire(caller)
        if wait:
            raise ProblemError(
                "rate-limited",
                f"Too many requests for their rate; the next one may come in {wait:.3g} s.",
                headers={"Retry-After": str(math.ceil(wait))},
            )

    def _forget(self, now: float) -> None:
        # A full bucket is as good as none. If that frees nothing, the callers longest known go.
        kept = {caller: full_at for caller, full_at in self._full_at.items() if full_at > now}
        self._full_at = dict(list(kept.items())[-self._most_callers // 2 :])


@dataclass(frozen=True, kw_only=True)
class RateLimiters:
    """The meters of one application; those left out let everything pass."""

    predict: RateLimiter = field(default_factory=RateLimiter)  # by key
    other: RateLimiter = field(
        default_factory=RateLimiter
    )  # by key; of routes that need none, by address
    wrong_keys: RateLimiter = field(default_factory=RateLimiter)  # by address


def create_rate_limiters(settings: ApiSettings) -> RateLimiters:
    """Return meters, all full, with the limits of the settings."""

    def meter(per_second: float) -> RateLimiter:
        return RateLimiter(per_second=per_second, burst=per_second * settings.rate_burst_seconds)

    per_minute = settings.wrong_keys_per_minute
    return RateLimiters(
        predict=meter(settings.predict_per_second),
        other=meter(settings.requests_per_second),
        wrong_keys=RateLimiter(per_second=per_minute / 60, burst=per_minute),
    )


def client_address(request: Request) -> str:
    """Return who a request comes from: its IPv4 address, or the network of its IPv6 address."""
    host = request.client.host if request.client else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:  # how a socket that listens on `::` tells of IPv4
        return str(address.ipv4_mapped)
    network = int(address) >> (128 - IPV6_NETWORK_BITS)
    return f"{network:x}/{IPV6_NETWORK_BITS}"
