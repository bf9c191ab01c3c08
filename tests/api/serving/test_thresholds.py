"""Thresholds of multi-label heads: fitted, stored in the artifact, applied by /predict."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from numpy.typing import NDArray

from services.api.serving.predictor import Predictor
from services.api.serving.promotion import Promotion
from services.api.serving.settings import ServingDtype, ServingSettings
from services.shared.datasets.card import Head
from services.shared.files.hashing import file_sha256
from services.shared.files.sealed_json import seal, unseal
from services.shared.model.artifact import load_classifier, read_artifact
from services.shared.model.calibration import Calibration, calibrate
from services.shared.model.metrics import predict
from services.shared.model.tokens import load_tokenizer
from tests.api.fakes import FakePredictor
from tests.api.harness import Platform
from tests.api.serving.artifacts import NewArtifact

SETTINGS = ServingSettings(lanes=1, threads=1, batch_tokens=64, dtype=ServingDtype.FLOAT32)
TEXTS = [
    f"the {thing} {what}" for thing in ["room", "book", "food", "bed"] for what in "abcdefghij"
]


def topics_of(directory: Path) -> tuple[Head, NDArray[np.float32]]:
    """Return the multi-label head of an artifact and its logits for TEXTS."""
    head = read_artifact(directory).heads[1]
    classifier, tokenizer = load_classifier(directory), load_tokenizer(directory)
    with torch.no_grad():
        rows = [classifier(torch.tensor([tokenizer(text)["input_ids"]])) for text in TEXTS]
    return head, np.concatenate([row["topics"].numpy() for row in rows])


def store(directory: Path, fitted: Calibration) -> None:
    """Write a calibration into a sealed artifact, as its export would have."""
    path, manifest = directory / "heads.json", directory / "manifest.json"
    about = json.loads(path.read_text()) | {"calibration": {"topics": fitted.model_dump()}}
    path.write_text(json.dumps(about))
    sealed = unseal(manifest.read_bytes())
    sealed["files"]["heads.json"] = file_sha256(path)
    manifest.write_text(json.dumps(seal(sealed)))


@pytest.fixture
def fitted(new_artifact: NewArtifact) -> tuple[Path, Calibration]:
    """An artifact with fitted thresholds, none of them 0.5."""
    directory = new_artifact("qwen3")
    head, logits = topics_of(directory)
    # A label is true if its logit is in the highest third, so thresholds can be perfect.
    labels = (logits > np.quantile(logits, 0.67, axis=0)).astype(np.float32)
    found = calibrate([head], {"topics": logits}, {"topics": labels})["topics"]
    assert (predict(head, logits, found.logit_thresholds(head)) == labels).all()
    assert (predict(head, logits) != labels).any(axis=0).all()
    store(directory, found)
    return directory, found


@pytest.fixture
def client(offline: Platform, fitted: tuple[Path, Calibration]) -> Iterator[TestClient]:
    promotion = Promotion("prm_1", "default", "mdl_1", "reviews", "mdl_1", fitted[0])
    predictor = Predictor(SETTINGS, promotions=lambda: [promotion])
    offline.predictor = cast(FakePredictor, predictor)  # a real one in its place
    with offline.client() as client:
        predictor.start()
        deadline = time.monotonic() + 60
        while predictor.active() is None and time.monotonic() < deadline:
            client.get("/livez")
        yield client
        assert client.portal is not None
        client.portal.call(predictor.stop)


def test_predict_applies_the_fitted_thresholds(
    client: TestClient, fitted: tuple[Path, Calibration]
) -> None:
    head, logits = topics_of(fitted[0])
    expected = predict(head, logits, fitted[1].logit_thresholds(head))
    answers = client.post("/predict", json={"inputs": TEXTS}).json()
    for answer, wanted in zip(answers, expected, strict=True):
        predicted = {row["label"] for row in answer["topics"] if row["predicted"]}
        assert predicted == {label for label, yes in zip(head.labels, wanted, strict=True) if yes}
        assert all("predicted" not in row for row in answer["tone"])


def test_a_request_may_set_its_own_threshold(client: TestClient) -> None:
    body = {"inputs": TEXTS[0], "heads": ["topics"]}
    for threshold in (0.0, 0.5, 1.0):
        rows = client.post("/predict", json=body | {"threshold": threshold}).json()
        assert [row["predicted"] for row in rows] == [row["score"] > threshold for row in rows]
    assert client.post("/predict", json=body | {"threshold": 1.5}).status_code == 422


def test_classify_lists_the_predicted_labels(
    client: TestClient, fitted: tuple[Path, Calibration]
) -> None:
    thresholds = fitted[1].thresholds
    answer = client.post("/v1/classify", json={"input": TEXTS}).json()
    for text in answer["data"]:
        head = text["heads"]["topics"]
        chances = dict(zip(head["labels"], head["probs"], strict=True))
        wanted = {label for label, chance in chances.items() if chance > thresholds[label]}
        assert set(head["predicted"]) == wanted
        assert "predicted" not in text["heads"]["tone"]
        assert "predicted" not in text  # the first head is single-label
