"""Predictions for the held-out texts, one row each, so that models can be compared in pairs later.

predictions.parquet in an artifact:
    line             int64, as in the dataset's file of the evaluated split
    <head>.label     the label, null where the text has none
    <head>.model, <head>.teacher, <head>.baseline     predictions
Labels are int32 class indices, or list<int32> of a multi-label head. A head without a baseline and a model
without a teacher have no such column.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from services.shared.datasets.card import Head, HeadType
from services.shared.jobs.artifact_layout import PREDICTIONS
from services.shared.model.comparison import HeldOut
from services.shared.model.metrics import Array, labelled_mask


def write_predictions(directory: Path, held_out: HeldOut, lines: Array) -> None:
    """Write the file to an artifact that is not sealed yet. `lines` [N]. Raises OSError."""
    columns = {"line": pa.array(lines)}
    for head in held_out.heads:
        labels = held_out.labels[head.name]
        columns[f"{head.name}.label"] = _column(head, labels, labelled_mask(head, labels))
        found = {"model": held_out.model[head.name]}
        if head.name in held_out.teacher:
            found["teacher"] = held_out.teacher[head.name]
        if head.name in held_out.baselines:
            found["baseline"] = held_out.baselines[head.name].predicted
        for name, predicted in found.items():
            columns[f"{head.name}.{name}"] = _column(head, predicted, np.ones(len(lines), bool))
    pq.write_table(pa.table(columns), directory / PREDICTIONS, compression="zstd")


def _column(head: Head, values: Array, known: Array) -> pa.Array:
    if head.type is HeadType.SINGLE_LABEL:
        return pa.array(values.astype(np.int32), mask=~known)
    rows = [
        np.flatnonzero(row) if has else None for row, has in zip(values > 0.5, known, strict=True)
    ]
    return pa.array(rows, pa.list_(pa.int32()))
