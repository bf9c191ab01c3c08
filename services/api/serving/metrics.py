"""Prometheus metrics of serving."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.api.serving.prediction import Prediction

# From 0.25 ms (a small student, no queue) to a minute behind a long queue.
_SECONDS = (0.00025, 0.001, 0.0025, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0, 60.0)
_TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class ServingMetrics:
    """The counters and histograms of one predictor."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        registry = registry or CollectorRegistry()
        self.queue_tokens = Gauge(
            "stillhouse_serving_queue_tokens",
            "Tokens of unanswered requests.",
            registry=registry,
        )
        self.refused = Counter(
            "stillhouse_serving_refused",
            "Requests refused because the queue was full.",
            registry=registry,
        )
        self.expired = Counter(
            "stillhouse_serving_expired", "Requests that passed their deadline.", registry=registry
        )
        self.failed_batches = Counter(
            "stillhouse_serving_failed_batches",
            "Batches that failed in the engine.",
            registry=registry,
        )
        self.texts = Counter(
            "stillhouse_serving_texts",
            "Texts answered.",
            ["model", "version"],
            registry=registry,
        )
        self.stages = Histogram(
            "stillhouse_serving_stage_seconds",
            "Seconds that a request spent in a stage.",
            ["stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.batch_tokens = Histogram(
            "stillhouse_serving_batch_tokens",
            "Tokens per batch.",
            buckets=_TOKENS,
            registry=registry,
        )
        self.batch_texts = Histogram(
            "stillhouse_serving_batch_texts",
            "Texts per batch.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
            registry=registry,
        )
        self.padding_tokens = Counter(
            "stillhouse_serving_padding_tokens",
            "Padding tokens computed.",
            registry=registry,
        )
        self.shadow_answers = Counter(
            "stillhouse_serving_shadow_answers",
            "Answers compared with the shadow model, by whether the decision was the same.",
            ["head", "agrees"],
            registry=registry,
        )
        self.swaps = Counter(
            "stillhouse_serving_swaps",
            "Swaps of the active model, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self._tokenise = self.stages.labels("tokenise")
        self._queue = self.stages.labels("queue")
        self._compute = self.stages.labels("compute")

    def record_batch(self, lengths: Sequence[int], *, padding: int, seconds: float) -> None:
        """Record one batch: the tokens of each text, the padding tokens and the duration."""
        self.batch_tokens.observe(sum(lengths))
        self.batch_texts.observe(len(lengths))
        self.padding_tokens.inc(padding)
        self._compute.observe(seconds)

    def record_answered(self, predictions: Sequence[Prediction]) -> None:
        """Record an answered request."""
        first = predictions[0]
        self._tokenise.observe(first.timing.tokenise)
        self._queue.observe(max(prediction.timing.queue for prediction in predictions))
        self.texts.labels(first.model, first.version).inc(len(predictions))
