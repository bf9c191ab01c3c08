from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest

from services.shared.datasets.card import Head, HeadType
from services.shared.model.metrics import Array, head_metrics, predict

COLOUR = Head(name="colour", labels=["blue", "green", "red"])
TAGS = Head(name="tags", type=HeadType.MULTI_LABEL, labels=["x", "y"])


def test_a_single_label_head_is_counted_by_hand() -> None:
    labels = np.array([0, 0, 1, 1, -100])
    predicted = np.array([0, 1, 1, 1, 2])
    found = head_metrics(COLOUR, predicted=predicted, labels=labels)
    assert found.texts == 4
    assert found.accuracy == 0.75
    assert found.confusion == ((1, 1, 0), (0, 2, 0), (0, 0, 0))
    blue, green, red = found.classes
    assert (blue.precision, blue.recall, blue.f1) == pytest.approx((1, 0.5, 2 / 3))
    assert blue.support == 2
    assert (green.precision, green.recall) == pytest.approx((2 / 3, 1))
    assert red.support == 0
    # red occurs neither among labels nor predictions, so it does not count.
    assert found.macro_f1 == pytest.approx((2 / 3 + 0.8) / 2)


def test_a_class_that_is_predicted_but_never_true_lowers_the_macro_f1() -> None:
    found = head_metrics(COLOUR, predicted=np.array([0, 2]), labels=np.array([0, 0]))
    assert found.macro_f1 == pytest.approx((2 / 3 + 0) / 2)


def test_a_multi_label_head_is_counted_by_hand() -> None:
    labels = np.array([[1, 0], [1, 1], [0, 0], [np.nan, np.nan]])
    predicted = np.array([[True, False], [True, False], [True, False], [False, True]])
    found = head_metrics(TAGS, predicted=predicted, labels=labels)
    assert found.texts == 3
    assert found.accuracy == pytest.approx(1 / 3)
    assert found.confusion == ((2, 1, 0, 0), (0, 0, 1, 2))
    assert found.macro_f1 == pytest.approx((0.8 + 0) / 2)


def test_predictions_are_the_largest_logit_or_those_above_zero() -> None:
    assert predict(COLOUR, np.array([[0.1, 0.3, 0.2]])).tolist() == [1]
    assert predict(TAGS, np.array([[0.1, -0.1]])).tolist() == [[True, False]]


def test_no_labelled_text_gives_zeros_not_an_error() -> None:
    found = head_metrics(COLOUR, predicted=np.array([1]), labels=np.array([-100]))
    assert (found.texts, found.accuracy, found.macro_f1) == (0, 0.0, 0.0)


def test_the_report_form_names_each_class() -> None:
    report = head_metrics(COLOUR, predicted=np.array([0]), labels=np.array([0])).report()
    assert report["classes"]["blue"] == {"precision": 1, "recall": 1, "f1": 1, "support": 1}
    assert report["confusion"] == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("kind", ["single_label", "multi_label"])
def test_the_report_of_ten_thousand_labels_is_small(kind: str) -> None:
    size, texts = 10_000, 500
    head = Head(name="code", type=HeadType(kind), labels=[f"label-{n:05}" for n in range(size)])
    labels: Array = np.arange(texts) * 7 % size
    predicted: Array = np.where(np.arange(texts) % 3, labels, 3)
    if kind == "multi_label":
        labels, predicted = np.eye(size, dtype=np.float32)[labels], np.eye(size)[predicted] > 0
    tracemalloc.start()
    found = head_metrics(head, predicted=predicted, labels=labels)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 50 * 2**20, "a dense matrix takes 800 MB"
    report = found.report()
    assert len(json.dumps(report)) < 20_000
    assert report["num_classes"] == size
    assert report["confusion"] == []
    assert min(entry["f1"] for entry in report["classes"].values()) == 0
    if kind == "single_label":
        assert found.accuracy == pytest.approx(1 - 167 / texts)
        assert report["top_confusions"][0]["predicted"] == "label-00003"


def test_sparse_counts_equal_those_of_the_dense_matrix() -> None:
    draw = np.random.default_rng(0)
    labels, predicted = draw.integers(0, 60, 2000), draw.integers(0, 60, 2000)
    head = Head(name="code", labels=[f"{n:02}" for n in range(60)])
    found = head_metrics(head, predicted=predicted, labels=labels)
    dense = np.zeros((60, 60), dtype=int)
    np.add.at(dense, (labels, predicted), 1)
    assert [c.support for c in found.classes] == dense.sum(axis=1).tolist()
    assert found.classes[7].precision == pytest.approx(dense[7, 7] / dense[:, 7].sum())
    np.fill_diagonal(dense, 0)
    assert found.top_confusions[0].texts == dense.max()
