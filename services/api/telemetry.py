"""What the API tells about itself: metrics, headers on every answer, and the last word on a crash."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import structlog
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.api.problems import ProblemError, problem_response
from services.shared.jobs.errors import Unavailable
from services.shared.jobs.views import PlanError

log = structlog.get_logger(__name__)

CLIENT_GONE = 499  # as nginx logs it; only in metrics

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Metrics:
    """The counters of one application, in a registry of its own; every name begins `stillhouse_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(namespace="stillhouse", registry=self.registry)
        self.requests = Counter(
            "stillhouse_http_requests",
            "Answered HTTP requests.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.durations = Histogram(
            "stillhouse_http_request_duration_seconds",
            "Time from a request's arrival to the last byte of its answer.",
            ["method", "route"],
            registry=self.registry,
        )

    @lru_cache(maxsize=1024)  # noqa: B019 - lives as long as the application
    def of(self, method: str, route: str, status: int) -> tuple[Counter, Histogram]:
        """Return the counter and the histogram of such requests; looking labels up costs more."""
        return (
            self.requests.labels(method, route, str(status)),
            self.durations.labels(method, route),
        )

    def exposition(self) -> bytes:
        """Return the text format that Prometheus scrapes."""
        return generate_latest(self.registry)


class _Serving(Protocol):
    def active(self, alias: str) -> Any: ...
    def aliases(self) -> Sequence[str]: ...


class ModelInfoCollector(Collector):
    """Says at each scrape which model serves which alias."""

    def __init__(self, predictor: _Serving) -> None:
        self._predictor = predictor

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "stillhouse_model_info",
            "1 for a model that serves.",
            labels=["alias", "model", "version"],
        )
        for alias in self._predictor.aliases():
            student = self._predictor.active(alias)
            if student is not None:
                family.add_metric([alias, student.name, student.version], 1)
        yield family


class PlanErrorCollector(Collector):
    """Says at each scrape how far the plans of finished jobs were off."""

    def __init__(self, plan_errors: Callable[[], Sequence[PlanError]]) -> None:
        self._plan_errors = plan_errors

    def describe(self) -> Iterable[Metric]:
        """Name the families without asking the database, which may not be there yet."""
        yield from _plan_error_families()

    def collect(self) -> Iterable[Metric]:
        ratio, jobs = _plan_error_families()
        grouped: dict[tuple[str, str], list[float]] = {}
        try:
            for error in self._plan_errors():
                grouped.setdefault((error.device, error.phase), []).append(error.ratio)
        except Unavailable:
            return  # /readyz tells that; the other metrics are worth having
        for (device, phase), ratios in sorted(grouped.items()):
            ratio.add_metric([device, phase, "mean"], sum(ratios) / len(ratios))
            ratio.add_metric([device, phase, "worst"], max(ratios, key=abs))
            jobs.add_metric([device, phase], len(ratios))
        yield ratio
        yield jobs


def _plan_error_families() -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
    return (
        GaugeMetricFamily(
            "stillhouse_plan_error_ratio",
            "Measured peak memory over the planned, less one; the worst rank of each of the last "
            "succeeded jobs, in phases where both count the same.",
            labels=["device", "phase", "statistic"],
        ),
        GaugeMetricFamily(
            "stillhouse_plan_error_jobs",
            "Jobs that stillhouse_plan_error_ratio is of.",
            labels=["device", "phase"],
        ),
    )


class TelemetryMiddleware:
    """ASGI middleware: counts and times each request, adds headers, answers what nobody caught."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = secrets.token_hex(8)
        started = time.perf_counter()
        status = 0

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = (*_HEADERS, (b"x-request-id", request_id.encode()))
                message["headers"] = [*message["headers"], *own]
            await send(message)

        try:
            await self._app(scope, receive, observed)
        except ClientDisconnect:
            status = CLIENT_GONE  # nobody is left to answer; counted
        except Exception as error:  # the process boundary: it reports, and answers the client
            log.exception("request_failed", request_id=request_id, path=scope["path"])
            if status:  # too late for an answer; the server closes the connection
                raise
            problem = ProblemError(
                "internal",
                f"An unexpected {type(error).__name__}; the server's log has request {request_id}.",
                request_id=request_id,
            )
            await problem_response(problem, path=scope["path"])(scope, receive, observed)
        finally:
            self._count(scope, status, time.perf_counter() - started)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = getattr(scope.get("route"), "path", "unmatched")
        counter, histogram = self._metrics.of(method, route, status)
        counter.inc()
        histogram.observe(seconds)
