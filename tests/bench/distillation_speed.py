"""What caching the teacher's outputs saves: `make bench-distil-speed`, minutes on two cores.

One epoch of the same student with a teacher of about 8 times its parameters, interleaved in one run:

    online    the teacher runs on every batch
    cached    its outputs are read from the file that an earlier epoch has written

The first cached epoch computes all outputs before its first step; its steps do not differ from later ones.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from statistics import median
from typing import Any

from services.shared.jobs.run_directory import Report
from tests.bench.distillation import (
    STUDENT,
    TEACHER,
    launch,
    machine_words,
    training_of,
    write_between,
    write_datasets,
)

BEGIN, END = "<!-- measured speed: begin -->", "<!-- measured speed: end -->"
# Large enough that arithmetic dominates the time, not bookkeeping.
SPEED_TEACHER = TEACHER | {"hidden_size": 384, "intermediate_size": 1152, "num_attention_heads": 12}
SPEED_STUDENT = STUDENT | {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4}
ARMS = ("online", "cached")


def main() -> None:
    """Measure both arms, interleaved, and print the ratio; `--write FILE` writes it between the markers."""
    options = _options()
    place = options.out / "speed"
    shutil.rmtree(place, ignore_errors=True)  # figures of different runs are not comparable
    datasets = write_datasets(place / "datasets", labelled=options.labelled)
    dataset_dir = datasets["labelled"]["path"]
    train_teacher(place, dataset_dir, options)
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    report = None
    for number in range(options.rounds):
        for arm in ARMS:
            report = run_epoch(place, arm, number, dataset_dir, options)
            seconds[arm] += report.details["epoch_seconds"]
    assert report is not None
    found = {
        "seconds": seconds,
        "ratio": median(seconds["online"]) / median(seconds["cached"]),
        "parameter_ratio": report.evaluation["teacher"]["parameters"] / (report.parameters or 1),
        "texts": datasets["labelled"]["rows"]["train"],
    }
    (place / "results.json").write_text(json.dumps(found, indent=2))
    text = sentence(found, options)
    print(text)
    if options.write is not None:
        write_between(options.write, BEGIN, END, text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what cached teacher outputs save.")
    parser.add_argument("--out", type=Path, default=Path(".stillhouse/bench-distil"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--labelled", type=int, default=1000, help="texts of an epoch")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--write", type=Path, help="document with marks to write the figures to")
    return parser.parse_args()


def train_teacher(place: Path, dataset_dir: Path, options: argparse.Namespace) -> None:
    """Train a teacher for two steps; its speed does not depend on its quality."""
    spec = {
        "kind": "teacher",
        "dataset_id": "ds_labelled",
        "model": {"config": SPEED_TEACHER, "tokenizer": {"train": True, "vocab_size": 6000}},
        "training": training_of(0) | {"epochs": 1, "max_steps": 2},
    }
    launch(place / "teacher", "services.trainer.main", spec, options, dataset_dir=dataset_dir)


def run_epoch(
    place: Path, arm: str, number: int, dataset_dir: Path, options: argparse.Namespace
) -> Report:
    """Distil for one epoch; the report has the duration of its steps."""
    spec: dict[str, Any] = {
        "kind": "distill",
        "dataset_id": "ds_labelled",
        "teacher": {"path": "teacher"},
        "student": {"config": SPEED_STUDENT, "tokenizer": "teacher"},
        "training": training_of(0) | {"epochs": 1, "learning_rate": 2e-3},
        "distillation": {"signals": arm},
    }
    return launch(
        place / f"{number}-{arm}",
        "services.distiller.main",
        spec,
        options,
        dataset_dir=dataset_dir,
        teacher_dir=place / "teacher" / "export",
        cache_dir=place / "signals",
    )


def sentence(found: dict[str, Any], options: argparse.Namespace) -> str:
    """Return the measured part of the document."""
    online, cached = (found["seconds"][arm] for arm in ARMS)
    return (
        f"With a teacher of {found['parameter_ratio']:.1f} times the student's parameters, an epoch of "
        f"{found['texts']} texts took {median(online):.1f} s when the teacher ran on every "
        f"batch ({_listed(online)}) and {median(cached):.1f} s with cached outputs ({_listed(cached)}): "
        f"**{found['ratio']:.1f} times faster**, medians of {options.rounds} epochs each, by turns in "
        f"one run on {options.ranks} {'rank' if options.ranks == 1 else 'ranks'}. {machine_words()}"
    )


def _listed(seconds: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in seconds)


if __name__ == "__main__":
    main()
