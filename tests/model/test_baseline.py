"""The n-gram baseline learns what word counts can tell, and nothing else."""

import numpy as np

from services.shared.datasets.card import Head, HeadType
from services.shared.model import baseline
from services.shared.model.baseline import MAX_CLASSES, fit_baselines
from services.shared.model.metrics import Array
from services.shared.model.tokens import Rows

HEAD = Head(name="mood", type=HeadType.SINGLE_LABEL, labels=["bad", "good"])


def rows(start: int, count: int) -> Rows:
    texts = [f"第{i}次 房间很{'干净' if i % 2 else '脏'}" for i in range(start, start + count)]
    labels = np.array([i % 2 for i in range(start, start + count)], np.int32)
    labels[0] = -100
    return Rows(texts, np.arange(count), {"mood": labels})


def share_correct(predicted: Array, held_out: Rows) -> float:
    return float((predicted == held_out.labels["mood"])[1:].mean())


def test_words_that_decide_are_learned_from_labelled_texts() -> None:
    held_out = rows(500, 60)
    found = fit_baselines([HEAD], train=rows(0, 200), held_out=held_out, seed=0)["mood"]
    assert share_correct(found.predicted, held_out) == 1.0
    assert found.training_texts == 199
    again = fit_baselines([HEAD], train=rows(0, 200), held_out=held_out, seed=0)["mood"]
    assert (found.predicted == again.predicted).all()


def test_every_label_of_a_multi_label_head_is_learned() -> None:
    head = Head(name="topics", type=HeadType.MULTI_LABEL, labels=["a", "b"])
    texts = ["apple", "berry", "apple berry", "none"] * 30
    labels = np.array([[1, 0], [0, 1], [1, 1], [0, 0]] * 30, np.float32)
    data = Rows(texts, np.arange(len(texts)), {"topics": labels})
    found = fit_baselines([head], train=data, held_out=data, seed=0)["topics"]
    assert (found.predicted == (labels > 0.5)).all()


def test_heads_with_too_many_classes_or_without_labels_have_no_baseline() -> None:
    large = HEAD.model_copy(update={"labels": [str(i) for i in range(MAX_CLASSES + 1)]})
    assert fit_baselines([large], train=rows(0, 20), held_out=rows(50, 20), seed=0) == {}
    unlabelled = rows(0, 20)
    unlabelled.labels["mood"][:] = -100
    assert fit_baselines([HEAD], train=unlabelled, held_out=rows(50, 20), seed=0) == {}


def test_texts_without_a_known_ngram_and_a_single_training_text_are_no_errors() -> None:
    held_out = Rows(["", "zzz"], np.arange(2), {"mood": np.array([0, 1], np.int32)})
    one = Rows(["很好"], np.arange(1), {"mood": np.array([1], np.int32)})
    found = fit_baselines([HEAD], train=one, held_out=held_out, seed=0)["mood"]
    assert found.predicted.tolist() == [1, 1]


def test_the_number_of_characters_is_bounded(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(baseline, "MAX_TRAINING_CHARACTERS", 500)
    held_out = rows(500, 60)
    found = fit_baselines([HEAD], train=rows(0, 200), held_out=held_out, seed=0)["mood"]
    assert 40 <= found.training_texts <= 62  # of 8 or 9 characters
    assert share_correct(found.predicted, held_out) > 0.9
