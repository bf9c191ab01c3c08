"""Every example is a valid request, its references resolve, and its memory plan says what the page promises."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from services.shared.datasets.card import DatasetCard
from services.shared.jobs.db.store import Store, open_store
from services.shared.jobs.planning.spec_to_plan import plan_resolved
from services.shared.jobs.resolved_spec import PlannedSpec
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.spec import ChainSpec, JobRequest
from services.shared.memory.architecture.hf_config import config_of
from services.shared.memory.architecture.shape import from_preset
from tests.factories import SENTIMENT, dataset_card

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.json"))
_request: TypeAdapter[Any] = TypeAdapter(JobRequest)


@pytest.fixture
def store(database_url: str, data_dir: Path, tmp_path: Path) -> Iterator[Store]:
    """A store whose model root holds the directories that the examples name, without their weights."""
    roots = tmp_path / "models"
    _write_model(roots / "Qwen3-32B", from_preset("qwen3-32b"))
    _write_model(roots / "Qwen3-32B-classifier", from_preset("qwen3-32b"))
    _write_model(roots / "Qwen3-0.6B", from_preset("qwen3-0.6b"))
    foreign = {"id2label": {"0": "negative", "1": "positive"}}
    _write_model(roots / "sentiment-classifier", from_preset("qwen3-8b"), **foreign)
    settings = JobSettings(
        database_url=database_url,
        broker_url="redis://127.0.0.1:1/0",
        data_dir=data_dir,
        model_roots=[roots],
        host_memory="1024GiB",
    )
    store = open_store(settings)
    yield store
    store.engine.dispose()


def _write_model(directory: Path, shape: Any, **more: Any) -> None:
    directory.mkdir(parents=True)
    config = config_of(shape.dims) | more
    (directory / "config.json").write_text(json.dumps(config))
    header = b"{}"  # of weights, only the names would be read
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def _plan(store: Store, name: str) -> list[PlannedSpec]:
    labelled = store.add_dataset(dataset_card()).id
    unlabelled = store.add_dataset(_unlabelled()).id
    text = (EXAMPLES / name).read_text("utf-8")
    text = text.replace("UNLABELLED_DATASET_ID", unlabelled).replace("DATASET_ID", labelled)
    request = _request.validate_json(text)
    if not isinstance(request, ChainSpec):
        return [plan_resolved(store.resolve(request), store.settings)]
    teacher = plan_resolved(store.resolve(request.teacher_spec()), store.settings)
    distill = store.resolve(request.distill_spec(), chained=teacher.resolved)
    return [teacher, plan_resolved(distill, store.settings)]


def _unlabelled() -> DatasetCard:
    return dataset_card(heads=())


@pytest.mark.parametrize("name", NAMES)
def test_an_example_fits_as_it_is_written(store: Store, name: str) -> None:
    for planned in _plan(store, name):
        assert planned.plan is not None, planned.unplanned
        assert planned.plan["verdict"] == "fits"


def test_qwen3_32b_fits_on_eight_k100_ai_with_a_float32_master(store: Store) -> None:
    (planned,) = _plan(store, "qwen3-32b-on-k100_ai.json")
    assert planned.plan is not None
    assert planned.plan["peak_bytes"] == pytest.approx(50 * 2**30, rel=0.02)


def test_the_foreign_classifier_lends_its_labels_to_the_student(store: Store) -> None:
    (planned,) = _plan(store, "distil-a-foreign-classifier.json")
    assert planned.resolved.heads == (SENTIMENT,)


def test_every_example_is_on_its_page_and_the_page_names_no_other() -> None:
    page = (EXAMPLES / "README.md").read_text("utf-8")
    assert {name for name in NAMES if f"`{name}`" in page} == set(NAMES)
    assert page.count(".json` |") == len(NAMES)
