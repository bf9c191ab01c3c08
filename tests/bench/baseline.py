"""Our n-gram baseline against scikit-learn's on the demo's reviews: `make bench-baseline`.

Both are trained on the same labelled reviews (all of the training split, and a part of it) and scored on
the same test split. CPU seconds include the vectorizer, for each head.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from services.cli.demo_data import HEADS, write_reviews
from services.shared.datasets.card import Head, Split
from services.shared.datasets.ingest import ingest
from services.shared.datasets.upload import Format, HeadColumn, Layout
from services.shared.model.baseline import fit_baselines
from services.shared.model.bootstrap import percentile_interval, resample
from services.shared.model.metrics import head_metrics
from services.shared.model.tokens import Rows, read_rows
from tests.bench.distillation import machine_words, write_between

BEGIN, END = "<!-- measured baseline: begin -->", "<!-- measured baseline: end -->"
PEER = Path(__file__).with_name("peer_sklearn.py")
SIZES = (1950, None)  # labelled texts; None: all


class Result(TypedDict):
    """One implementation on one head."""

    name: str
    head: str
    accuracy: float
    macro_f1: float
    cpu_seconds: float


def main() -> None:
    """Print the table; `--write FILE` also writes it between the file's markers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", required=True, help="a Python that has scikit-learn")
    parser.add_argument("--write", type=Path, help="document with markers for the table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        heads, train, test = read_splits(Path(scratch))
    lines = []
    for size in SIZES:
        part = train if size is None else first_rows(train, size)
        lines += measure(heads, part, test, options.peer_python)
    text = "\n".join([*lines, "", machine_words()])
    print(text)
    if options.write is not None:
        write_between(options.write, BEGIN, END, text)


def read_splits(directory: Path) -> tuple[list[Head], Rows, Rows]:
    """Store the reviews as a dataset and return its heads, training and test texts."""
    reviews = directory / "reviews.jsonl"
    write_reviews(reviews)
    layout = Layout(heads=[HeadColumn(name=head["name"]) for head in HEADS])
    card = ingest(
        reviews,
        format=Format.JSONL,
        layout=layout,
        id="ds_reviews",
        name="reviews",
        datasets_dir=directory,
    )
    stored = directory / "ds_reviews"
    heads = list(card.heads)
    return (
        heads,
        read_rows(stored, Split.TRAIN, heads),
        read_rows(stored, Split.TEST, heads),
    )


def first_rows(rows: Rows, size: int) -> Rows:
    """Return a random part of fixed seed."""
    chosen = np.sort(np.random.default_rng(0).permutation(len(rows))[:size])
    labels = {name: values[chosen] for name, values in rows.labels.items()}
    return Rows([rows.texts[i] for i in chosen], rows.lines[chosen], labels)


def measure(heads: list[Head], train: Rows, test: Rows, peer_python: str) -> list[str]:
    """Return the table of one training set."""
    results = [*ours(heads, train, test), *peer(heads, train, test, peer_python)]
    found = {(result["name"], result["head"]): result for result in results}
    names = list(dict.fromkeys(result["name"] for result in results))
    lines = [
        "",
        f"{len(train):,} labelled texts, {len(test):,} test texts",
        "",
        "| " + " | ".join(["", *(h.name for h in heads), "CPU seconds, both heads"]) + " |",
        "|---|" + "---|" * (len(heads) + 1),
    ]
    for name in names:
        row = [found[name, head.name] for head in heads]
        scores = [f"{r['accuracy']:.4f} / {r['macro_f1']:.4f}" for r in row]
        seconds = f"{sum(r['cpu_seconds'] for r in row):.1f}"
        lines.append("| " + " | ".join([name, *scores, seconds]) + " |")
    return lines


def ours(heads: list[Head], train: Rows, test: Rows) -> list[Result]:
    """Train our baseline head by head."""
    found: list[Result] = []
    for head in heads:
        began = time.process_time()
        baseline = fit_baselines([head], train=train, held_out=test, seed=0)[head.name]
        seconds = time.process_time() - began
        truth = test.labels[head.name]
        metrics = head_metrics(head, predicted=baseline.predicted, labels=truth)
        resampled = resample(
            head, predictions={"baseline": baseline.predicted}, labels=truth, seed=0
        )["baseline"]
        interval = percentile_interval(resampled.accuracy, confidence=0.95)
        print(f"{head.name}: 95% interval {interval['low']:.4f} to {interval['high']:.4f}")
        found.append(
            {
                "name": "Stillhouse",
                "head": head.name,
                "accuracy": metrics.accuracy,
                "macro_f1": metrics.macro_f1,
                "cpu_seconds": seconds,
            }
        )
    return found


def peer(heads: list[Head], train: Rows, test: Rows, python: str) -> list[Result]:
    """Run scikit-learn in its own environment."""
    data: dict[str, Any] = {"heads": [head.name for head in heads]}
    for name, rows in (("train", train), ("test", test)):
        data[name] = {"texts": rows.texts}
        data[name] |= {head.name: rows.labels[head.name].tolist() for head in heads}
    command = [python, str(PEER)]
    done = subprocess.run(
        command, input=json.dumps(data), stdout=subprocess.PIPE, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


if __name__ == "__main__":
    main()
