"""docs/serving.md lists every setting and metric."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from services.api.serving.metrics import ServingMetrics
from services.api.serving.settings import ServingSettings

PAGE = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")


def test_the_page_lists_exactly_the_settings() -> None:
    named = set(re.findall(r"STILLHOUSE_SERVING_([A-Z0-9_]+)", PAGE))
    assert named == {name.upper() for name in ServingSettings.model_fields}


def test_the_page_lists_every_metric() -> None:
    registry = CollectorRegistry()
    ServingMetrics(registry)
    for metric in registry.collect():
        name = metric.name.removeprefix("stillhouse_serving")
        suffix = "_total" if metric.type == "counter" else ""
        assert f"{name}{suffix}" in PAGE, metric.name
