"""Metrics, response headers, and the handling of unexpected exceptions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Protocol

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
from services.shared.jobs.lifecycle.report import StorageReport
from services.shared.jobs.views import PlanError

log = structlog.get_logger(__name__)

CLIENT_CLOSED_REQUEST = 499  # nginx's status for it; appears in metrics only

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Metrics:
    """The metrics of one application, in a registry of its own; every name starts with `stillhouse_`."""

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
            "Time from a request's arrival to the last byte of its response.",
            ["method", "route"],
            registry=self.registry,
        )

    @lru_cache(maxsize=1024)  # noqa: B019 - lives as long as the application
    def for_route(self, method: str, route: str, status: int) -> tuple[Counter, Histogram]:
        """Return counter and histogram for these labels; cached, because looking labels up is slow."""
        return (
            self.requests.labels(method, route, str(status)),
            self.durations.labels(method, route),
        )

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class _Model(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...


class _Predictor(Protocol):
    def active(self, alias: str) -> _Model | None: ...
    def aliases(self) -> Sequence[str]: ...


class ModelInfoCollector(Collector):
    """Reports at each scrape which model serves which alias."""

    def __init__(self, predictor: _Predictor) -> None:
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
    """Reports at each scrape the relative error of the memory plans of finished jobs."""

    def __init__(self, plan_errors: Callable[[], Sequence[PlanError]]) -> None:
        self._plan_errors = plan_errors

    def describe(self) -> Iterable[Metric]:
        """Name the families without a database query: the database may not be up yet."""
        yield from _plan_error_families()

    def collect(self) -> Iterable[Metric]:
        ratio, jobs = _plan_error_families()
        grouped: dict[tuple[str, str], list[float]] = {}
        try:
            for error in self._plan_errors():
                grouped.setdefault((error.device, error.phase), []).append(error.ratio)
        except Unavailable:
            return  # /readyz reports the outage; the other metrics stay available
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


class StorageCollector(Collector):
    """Reports at each scrape what is stored, how full the disk is, and when it will be full."""

    def __init__(self, report: Callable[[], StorageReport]) -> None:
        self._report = report

    def describe(self) -> Iterable[Metric]:
        """Name the families without a database query."""
        yield from _storage_families().values()

    def collect(self) -> Iterable[Metric]:
        families = _storage_families()
        try:
            report = self._report()
        except (Unavailable, OSError):
            return
        for kind, size in sorted(report.stored_bytes.items()):
            families["stored"].add_metric([kind], size)
        for table, rows in sorted(report.table_rows.items()):
            families["rows"].add_metric([table], rows)
        families["used"].add_metric([], report.disk.share)
        families["epoch"].add_metric([], float(report.epoch_problem is not None))
        if report.forecast is not None:
            families["growth"].add_metric([], report.forecast.bytes_per_day)
            days = report.forecast.days_until_full
            families["days"].add_metric([], float("inf") if days is None else days)
        yield from families.values()


def _storage_families() -> dict[str, GaugeMetricFamily]:
    return {
        "stored": GaugeMetricFamily(
            "stillhouse_stored_bytes",
            "Bytes of each kind of file, and of the database, at the last sample.",
            labels=["kind"],
        ),
        "rows": GaugeMetricFamily(
            "stillhouse_table_rows", "Rows of each table, by its statistics.", labels=["table"]
        ),
        "used": GaugeMetricFamily(
            "stillhouse_disk_used_ratio", "Used share of the disk of the data directory."
        ),
        "growth": GaugeMetricFamily(
            "stillhouse_disk_growth_bytes_per_day", "Growth of its use over the last seven days."
        ),
        "days": GaugeMetricFamily(
            "stillhouse_disk_days_until_full",
            "Days until jobs wait for room, at that growth; infinite where it does not grow.",
        ),
        "epoch": GaugeMetricFamily(
            "stillhouse_epoch_mismatch", "1 where database and files do not belong together."
        ),
    }


class TelemetryMiddleware:
    """ASGI middleware that counts and times requests, adds headers, and answers uncaught exceptions."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope["request_id"] = secrets.token_hex(8)
        started = time.perf_counter()
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id_header = (b"x-request-id", request_id.encode())
                message["headers"] = [*message["headers"], *_HEADERS, request_id_header]
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except ClientDisconnect:
            status = CLIENT_CLOSED_REQUEST
        except Exception as error:  # the process boundary: log it and answer the client
            log.exception("request_failed", request_id=request_id, path=scope["path"])
            if status:  # the response has started; the server closes the connection
                raise
            problem = ProblemError(
                "internal",
                f"An unexpected {type(error).__name__}; see request {request_id} in the server's log.",
                request_id=request_id,
            )
            await problem_response(problem, path=scope["path"])(scope, receive, send_with_headers)
        finally:
            self._count(scope, status, time.perf_counter() - started)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = getattr(scope.get("route"), "path", "unmatched")
        counter, histogram = self._metrics.for_route(method, route, status)
        counter.inc()
        histogram.observe(seconds)
