"""Finds likely wrong labels, duplicates across splits and contradictions in a dataset.

A label is suspect where a model that has not seen the text gives another class at least the confidence
that it has, on average, for texts labelled so: the confident joint of Northcutt, Jiang and Chuang 2021,
"Confident Learning: Estimating Uncertainty in Dataset Labels". Training texts are judged by the n-gram
baseline, trained on the other folds: to train a large model once a fold is not affordable. Validation
and test texts are judged by the trained model.

Legend: N texts, C classes of a head.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.shared.datasets.card import Head, HeadType, Split
from services.shared.datasets.text import Text, plain_text
from services.shared.jobs.label_quality import (
    Contradiction,
    Duplicate,
    HeadQuality,
    LabelQuality,
    RowReference,
    SuspectLabel,
)
from services.shared.model.baseline import fold_logits
from services.shared.model.calibration import Calibration
from services.shared.model.metrics import Array, labelled_mask
from services.shared.model.tokens import Rows

MAX_LISTED = 500  # suspects of a head
MAX_GROUPS = 200  # duplicates, and contradictions
_MAX_ROWS = 10  # of a group
_SHOWN_CHARACTERS = 200


def examine_labels(
    heads: Sequence[Head],
    rows: Mapping[Split, Rows],
    *,
    logits: Mapping[Split, Mapping[str, Array]],
    calibration: Mapping[str, Calibration],
    seed: int,
) -> LabelQuality:
    """Return what can be said of the labels; `logits` are the trained model's for held-out splits."""
    suspects: list[SuspectLabel] = []
    found: dict[str, HeadQuality] = {}
    for head in heads:
        judged = list(_judged(head, rows, logits, calibration, seed=seed))
        flagged = [suspect for each in judged for suspect in each.suspects(head)]
        flagged.sort(key=lambda suspect: suspect.score)
        suspects += flagged[:MAX_LISTED]
        counts = {True: 0, False: 0}
        for each in judged:
            counts[each.by_model] += len(each.numbers)
        found[head.name] = HeadQuality(
            out_of_fold_texts=counts[False], model_texts=counts[True], suspects=len(flagged)
        )
    groups = list(_groups(rows))
    duplicates = [group for group in groups if len({split for split, _ in group}) > 1]
    contradictions = list(_contradictions(heads, rows, groups))
    return LabelQuality(
        heads=found,
        suspects=suspects,
        num_duplicates=len(duplicates),
        duplicates=[
            Duplicate(text=_shown(rows, group[0]), rows=_references(rows, group))
            for group in duplicates[:MAX_GROUPS]
        ],
        num_contradictions=len(contradictions),
        contradictions=contradictions[:MAX_GROUPS],
    )


@dataclass(frozen=True)
class _Judged:
    """Probabilities for texts that the model which gives them was not trained on."""

    split: Split
    rows: Rows
    numbers: Array  # [N], of the rows
    probabilities: Array  # [N, C]
    by_model: bool

    def suspects(self, head: Head) -> Iterator[SuspectLabel]:
        """Yield the labels that are likely wrong."""
        labels = self.rows.labels[head.name][self.numbers]
        single = head.type is HeadType.SINGLE_LABEL
        find = _single_label_suspects if single else _multi_label_suspects
        for row, given, suggested, score, other in find(self.probabilities, labels):
            yield SuspectLabel(
                split=str(self.split),
                line=int(self.rows.lines[self.numbers[row]]),
                head=head.name,
                text=plain_text(self.rows.texts[int(self.numbers[row])])[:_SHOWN_CHARACTERS],
                given=[head.labels[c] for c in given],
                suggested=[head.labels[c] for c in suggested],
                score=round(score, 4),
                suggested_score=round(other, 4),
                basis="trained_model" if self.by_model else "out_of_fold_baseline",
            )


def _judged(
    head: Head,
    rows: Mapping[Split, Rows],
    logits: Mapping[Split, Mapping[str, Array]],
    calibration: Mapping[str, Calibration],
    *,
    seed: int,
) -> Iterator[_Judged]:
    folds = fold_logits(head, rows[Split.TRAIN], seed=seed)
    if folds is not None:
        numbers, values = folds
        yield _Judged(
            Split.TRAIN, rows[Split.TRAIN], numbers, _probabilities(head, values), by_model=False
        )
    fitted = calibration.get(head.name, Calibration())
    for split, by_head in logits.items():
        numbers = np.flatnonzero(labelled_mask(head, rows[split].labels[head.name]))
        if len(numbers):
            values = by_head[head.name][numbers] / fitted.temperature
            yield _Judged(split, rows[split], numbers, _probabilities(head, values), by_model=True)


def _probabilities(head: Head, logits: Array) -> Array:
    scaled = logits.astype(np.float64)
    if head.type is HeadType.MULTI_LABEL:
        return np.asarray(0.5 * (1 + np.tanh(0.5 * scaled)))
    exponents = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    return np.asarray(exponents / exponents.sum(axis=1, keepdims=True))


_Finding = tuple[int, list[int], list[int], float, float]


def _single_label_suspects(probabilities: Array, labels: Array) -> Iterator[_Finding]:
    """Yield (row, given classes, suggested classes, probability of the given, of the suggested)."""
    size, classes = probabilities.shape
    own = probabilities[np.arange(size), labels]
    counts = np.bincount(labels, minlength=classes)
    sums = np.bincount(labels, weights=own, minlength=classes)
    # A class that no text has cannot be suggested.
    thresholds = np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)
    confident = np.where(probabilities >= thresholds, probabilities, 0)
    best = confident.argmax(axis=1)
    suggested = confident[np.arange(size), best]
    for row in np.flatnonzero((best != labels) & (suggested > own)):
        yield (
            int(row),
            [int(labels[row])],
            [int(best[row])],
            float(own[row]),
            float(suggested[row]),
        )


def _multi_label_suspects(probabilities: Array, labels: Array) -> Iterator[_Finding]:
    """Yield the labels of texts one by one: given although unlikely, or likely although not given."""
    given = labels > 0.5
    own = np.where(given, probabilities, 1 - probabilities)
    for column in range(labels.shape[1]):
        has = given[:, column]
        if has.all() or not has.any():
            continue
        # What the opposite value must reach: the mean confidence of the texts that have it.
        for value in (True, False):
            threshold = own[has != value, column].mean()
            other = 1 - own[:, column]
            for row in np.flatnonzero((has == value) & (other >= max(threshold, 0.5))):
                present = set(np.flatnonzero(given[row]).tolist())
                yield (
                    int(row),
                    sorted(present),
                    sorted(present ^ {column}),
                    float(own[row, column]),
                    float(other[row]),
                )


_Place = tuple[Split, int]


def _groups(rows: Mapping[Split, Rows]) -> Iterator[list[_Place]]:
    """Yield the rows that have equal texts, but for case, width, punctuation and white space."""
    sizes = [len(part) for part in rows.values()]
    hashes = np.fromiter(
        (_text_hash(text) for part in rows.values() for text in part.texts),
        dtype=np.uint64,
        count=sum(sizes),
    )
    order = np.argsort(hashes, kind="stable")
    starts = np.flatnonzero(np.diff(hashes[order], prepend=hashes[order][:1] + 1))
    ends = np.cumsum(sizes)
    splits = list(rows)
    for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
        if stop - start < 2:
            continue
        places = []
        for number in order[start:stop].tolist():
            part = int(np.searchsorted(ends, number, side="right"))
            places.append((splits[part], number - int(ends[part] - sizes[part])))
        yield places


def _text_hash(text: Text) -> int:
    folded = unicodedata.normalize("NFKC", plain_text(text)).casefold()
    kept = "".join(filter(str.isalnum, folded)) or folded
    return int.from_bytes(hashlib.blake2b(kept.encode(), digest_size=8).digest(), "little")


def _contradictions(
    heads: Sequence[Head], rows: Mapping[Split, Rows], groups: Sequence[list[_Place]]
) -> Iterator[Contradiction]:
    for head in heads:
        masks = {split: labelled_mask(head, part.labels[head.name]) for split, part in rows.items()}
        for group in groups:
            labelled = [(split, row) for split, row in group if masks[split][row]]
            labels = [
                _labels_of(head, rows[split].labels[head.name][row]) for split, row in labelled
            ]
            if len(set(map(tuple, labels))) > 1:
                yield Contradiction(
                    head=head.name,
                    text=_shown(rows, labelled[0]),
                    rows=_references(rows, labelled),
                    labels=labels[:_MAX_ROWS],
                )


def _labels_of(head: Head, value: Array) -> list[str]:
    if head.type is HeadType.SINGLE_LABEL:
        return [head.labels[int(value)]]
    return [head.labels[c] for c in np.flatnonzero(value > 0.5)]


def _references(rows: Mapping[Split, Rows], places: Sequence[_Place]) -> list[RowReference]:
    return [
        RowReference(split=str(split), line=int(rows[split].lines[row]))
        for split, row in places[:_MAX_ROWS]
    ]


def _shown(rows: Mapping[Split, Rows], place: _Place) -> str:
    split, row = place
    return plain_text(rows[split].texts[row])[:_SHOWN_CHARACTERS]
