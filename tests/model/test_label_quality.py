"""Planted wrong labels, duplicates across splits and contradictions are found."""

from __future__ import annotations

import numpy as np

from services.shared.datasets.card import Head, HeadType, Split
from services.shared.jobs.label_quality import LabelQuality
from services.shared.model import label_quality
from services.shared.model.calibration import Calibration
from services.shared.model.label_quality import examine_labels
from services.shared.model.metrics import Array
from services.shared.model.tokens import Rows

MOOD = Head(name="mood", labels=["bad", "good"])
TOPICS = Head(name="topics", type=HeadType.MULTI_LABEL, labels=["price", "speed"])
WORDS = (("dull", "broken", "late"), ("bright", "solid", "quick"))


def rows_of(head: Head, count: int, labels: Array, *, seed: int = 0) -> Rows:
    """Return texts of three words each that state their true label, with the labels given."""
    draw = np.random.default_rng(seed)
    texts = [
        f"{' '.join(draw.choice(WORDS[n % 2], 3))} item {seed} number {n}" for n in range(count)
    ]
    return Rows(texts, np.arange(count) + 1, {head.name: labels})


def empty(head: Head) -> Rows:
    return rows_of(head, 0, np.zeros((0, 2) if head is TOPICS else 0, np.int32))


def examine(head: Head, train: Rows, test: Rows | None = None, **options: object) -> LabelQuality:
    rows = {Split.TRAIN: train, Split.VALIDATION: empty(head), Split.TEST: test or empty(head)}
    given: dict[str, object] = {"logits": {}, "calibration": {}, "seed": 0, **options}
    return examine_labels([head], rows, **given)  # type: ignore[arg-type]


def test_planted_wrong_labels_of_training_texts_come_first() -> None:
    labels = np.arange(300, dtype=np.int32) % 2
    planted = [7, 50, 111, 160, 201, 244, 290]
    labels[planted] = 1 - labels[planted]
    found = examine(MOOD, rows_of(MOOD, 300, labels))
    suspects = found.suspects[: len(planted)]
    assert {suspect.line - 1 for suspect in suspects} == set(planted)
    assert all(suspect.score < 0.5 < suspect.suggested_score for suspect in suspects)
    first = next(suspect for suspect in suspects if suspect.line == 8)
    assert (first.split, first.given, first.suggested) == ("train", ["bad"], ["good"])
    assert (first.basis, first.head) == ("out_of_fold_baseline", "mood")
    assert found.heads["mood"].out_of_fold_texts == 300


def test_held_out_texts_are_judged_by_the_trained_model() -> None:
    labels = np.array([0, 1, 0, 1, -100], np.int32)
    logits = np.array([[3, 0], [0, 3], [-4, 4], [-1, 3], [9, 0]], np.float32)
    found = examine(
        MOOD,
        empty(MOOD),
        rows_of(MOOD, 5, labels),
        logits={Split.TEST: {"mood": logits}},
        calibration={"mood": Calibration(temperature=2.0)},
    )
    assert found.heads["mood"].model_texts == 4
    assert [(s.split, s.line, s.basis) for s in found.suspects] == [("test", 3, "trained_model")]
    assert found.suspects[0].score == round(1 / (1 + np.exp(4)), 4)


def test_labels_of_a_multi_label_head_are_judged_one_by_one() -> None:
    truth = np.array([[n % 2, 1 - n % 2] for n in range(200)], np.float32)
    labels = truth.copy()
    labels[31, 0] = 0  # absent although it belongs there
    labels[60, 0] = 1  # given although it does not
    found = examine(TOPICS, rows_of(TOPICS, 200, labels))
    assert {(s.line - 1, tuple(s.given), tuple(s.suggested)) for s in found.suspects[:2]} == {
        (31, (), ("price",)),
        (60, ("price", "speed"), ("speed",)),
    }


def test_equal_texts_are_found_across_splits_and_where_their_labels_differ() -> None:
    train = Rows(
        ["The room, clean!", "another", "the ROOM clean"],
        np.array([1, 2, 3]),
        {"mood": np.array([1, 0, 0], np.int32)},
    )
    test = Rows(
        ["the room is clean", "Ａｎｏｔｈｅｒ"],
        np.array([4, 5]),
        {"mood": np.array([1, -100], np.int32)},
    )
    found = examine(MOOD, train, test)
    assert (found.num_duplicates, found.num_contradictions) == (1, 1)
    assert [(row.split, row.line) for row in found.duplicates[0].rows] == [
        ("train", 2),
        ("test", 5),
    ]
    contradiction = found.contradictions[0]
    assert [row.line for row in contradiction.rows] == [1, 3]
    assert contradiction.labels == [["good"], ["bad"]]


def test_the_lists_are_bounded_and_the_counts_are_not() -> None:
    labels = np.zeros(4000, np.int32)
    texts = [f"same {n // 2}" for n in range(4000)]
    labels[::2] = 1
    found = examine(MOOD, Rows(texts, np.arange(4000), {"mood": labels}))
    assert found.num_contradictions == 2000
    assert len(found.contradictions) == label_quality.MAX_GROUPS
    assert len(found.suspects) <= label_quality.MAX_LISTED
