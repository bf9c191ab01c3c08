"""Rate limits of this process: a token bucket per caller and class of requests."""

from __future__ import annotations

import ipaddress
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import Request

from services.api.problems import ProblemError
from services.api.settings import ApiSettings

MAX_CALLERS = 10_000  # buckets per limiter: keys are few, addresses may be many
IPV6_NETWORK_BITS = 64  # one subscriber's allocation: its addresses count as one caller


class RateLimiter:
    """A token bucket per caller, all of the same rate and size; call it from the event loop only.

    The state of a caller is one number, the time at which its bucket is full again (the generic cell
    rate algorithm, ITU-T I.371). With `per_second` 0 there is no limit.
    """

    def __init__(
        self,
        *,
        per_second: float = 0.0,
        burst: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        max_callers: int = MAX_CALLERS,
    ) -> None:
        self._interval = 1 / per_second if per_second else 0.0  # seconds per token
        self._slack = (max(burst, 1.0) - 1) * self._interval
        self._clock = clock
        self._most_callers = max_callers
        self._full_at: dict[str, float] = {}

    @property
    def num_callers(self) -> int:
        """The number of callers with a bucket that was not full when last used."""
        return len(self._full_at)

    def try_acquire(self, caller: str) -> float:
        """Take a token of `caller` and return 0, or return the seconds until the next one."""
        if not self._interval:
            return 0.0
        now = self._clock()
        full_at = max(self._full_at.get(caller, now), now)
        wait = full_at - now - self._slack
        if wait > 0:
            return wait
        self._full_at[caller] = full_at + self._interval
        if len(self._full_at) > self._most_callers:
            self._evict(now)
        return 0.0

    def acquire(self, caller: str) -> None:
        """Take a token of `caller`. Raises ProblemError with a Retry-After header if there is none."""
        wait = self.try_acquire(caller)
        if wait:
            raise ProblemError(
                "rate-limited",
                f"Too many requests; retry in {wait:.3g} s.",
                headers={"Retry-After": str(math.ceil(wait))},
            )

    def _evict(self, now: float) -> None:
        # A full bucket needs no entry. If none is full, evict the callers known longest.
        kept = {caller: full_at for caller, full_at in self._full_at.items() if full_at > now}
        self._full_at = dict(list(kept.items())[-self._most_callers // 2 :])


@dataclass(frozen=True, kw_only=True)
class RateLimiters:
    """The rate limiters of one application; those left out have no limit."""

    predict: RateLimiter = field(default_factory=RateLimiter)  # by key
    other: RateLimiter = field(
        default_factory=RateLimiter
    )  # by key; of routes that need none, by address
    wrong_keys: RateLimiter = field(default_factory=RateLimiter)  # by address


def create_rate_limiters(settings: ApiSettings) -> RateLimiters:
    """Return rate limiters with the limits of the settings, all buckets full."""

    def limiter(per_second: float) -> RateLimiter:
        return RateLimiter(per_second=per_second, burst=per_second * settings.rate_burst_seconds)

    per_minute = settings.wrong_keys_per_minute
    return RateLimiters(
        predict=limiter(settings.predict_per_second),
        other=limiter(settings.requests_per_second),
        wrong_keys=RateLimiter(per_second=per_minute / 60, burst=per_minute),
    )


def client_address(request: Request) -> str:
    """Return the IPv4 address of a request's client, or the network of its IPv6 address."""
    host = request.client.host if request.client else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:  # an IPv4 client of a socket that listens on `::`
        return str(address.ipv4_mapped)
    network = int(address) >> (128 - IPV6_NETWORK_BITS)
    return f"{network:x}/{IPV6_NETWORK_BITS}"
