"""The n-gram baseline learns what word counts can tell, and nothing else."""

import numpy as np

from services.shared.datasets.card import Head, HeadType
from services.shared.model.baseline import MAX_CLASSES, add_baseline, baseline, mean_interval
from services.shared.model.tokens import Rows

HEAD = Head(name="mood", type=HeadType.SINGLE_LABEL, labels=["bad", "good"])


def rows(start: int, count: int) -> Rows:
    texts = [f"第{i}次 房间很{'干净' if i % 2 else '脏'}" for i in range(start, start + count)]
    labels = np.array([i % 2 for i in range(start, start + count)], np.int32)
    labels[0] = -100
    return Rows(texts, np.arange(count), {"mood": labels})


def test_words_that_decide_are_learned() -> None:
    found = baseline(HEAD, train=rows(0, 200), held_out=rows(500, 60), seed=0)
    assert found is not None
    assert found["accuracy"] == found["macro_f1"] == 1.0
    assert found["accuracy_interval"] == {"low": 1.0, "high": 1.0}
    assert found["training_texts"] == 199
    assert found == baseline(HEAD, train=rows(0, 200), held_out=rows(500, 60), seed=0)


def test_every_label_of_a_multi_label_head_is_learned() -> None:
    head = Head(name="topics", type=HeadType.MULTI_LABEL, labels=["a", "b"])
    texts = ["apple", "berry", "apple berry", "none"] * 30
    labels = np.array([[1, 0], [0, 1], [1, 1], [0, 0]] * 30, np.float32)
    data = Rows(texts, np.arange(len(texts)), {"topics": labels})
    found = baseline(head, train=data, held_out=data, seed=0)
    assert found is not None
    assert found["accuracy"] == 1.0


def test_heads_with_too_many_classes_have_no_baseline() -> None:
    head = HEAD.model_copy(update={"labels": [str(i) for i in range(MAX_CLASSES + 1)]})
    evaluation = {"heads": {"mood": {"accuracy": 0.5}}}
    add_baseline(evaluation, [head], train=rows(0, 20), held_out=rows(50, 20), seed=0)
    assert evaluation == {"heads": {"mood": {"accuracy": 0.5}}}


def test_the_interval_contains_the_mean_and_narrows_with_more_texts() -> None:
    generator = np.random.default_rng(0)
    few, many = (generator.random(size) < 0.8 for size in (100, 10_000))
    wide, narrow = mean_interval(few, seed=1), mean_interval(many, seed=1)
    assert wide["low"] < few.mean() < wide["high"]
    assert narrow["high"] - narrow["low"] < 0.02 < wide["high"] - wide["low"]
