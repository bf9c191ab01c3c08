"""What distillation is worth: `make bench-distil` measures it on real reviews, with several seeds.

The reviews are split by the platform's hash into test, validation and training texts, of which only a
part is labelled for the student. The teacher is trained on all training labels: it represents a large
language model, which knows more of the language than the student's labels contain. For each seed one
teacher is trained, and then, with the same student, steps, learning rate and batch size:

    labels       cross-entropy on the labelled part alone
    distilled    plus the teacher's outputs for the same texts
    unlabelled   plus its outputs for the rest, whose labels the student never sees

The best evaluation on validation is exported, as in every job; the test split is evaluated once, at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from services.cli.demo_data import HEADS, write_reviews
from services.shared.datasets.card import Split
from services.shared.datasets.ingest import ingest
from services.shared.datasets.split import assign_split, text_key
from services.shared.datasets.upload import Format, HeadColumn, Layout, SplitFractions
from services.shared.jobs.run_directory import (
    Report,
    RunDirectory,
    RunInput,
    read_record,
    write_json,
)

REPOSITORY = Path(__file__).parents[2]
FRACTIONS = SplitFractions(train=0.7, validation=0.1, test=0.2)
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
TEACHER = {
    "model_type": "qwen3",
    "hidden_size": 192,
    "intermediate_size": 576,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
}
STUDENT = TEACHER | {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
RECIPE = {"compute": "float32", "reduce": "float32", "activation_checkpointing": False}
ARMS = {
    "labels": {"soft_weight": 0.0, "hard_weight": 1.0, "signals": "cached"},
    "distilled": {"soft_weight": 0.7, "hard_weight": 0.3, "signals": "cached"},
    "unlabelled": {"soft_weight": 0.7, "hard_weight": 0.3, "signals": "cached"},
}


def main() -> None:
    """Run all arms and print the table; `--write FILE` also writes it between the file's markers."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    datasets = write_datasets(options.out / "datasets", labelled=options.labelled)
    results = [run_seed(seed, datasets, options) for seed in range(options.seeds)]
    (options.out / "results.json").write_text(json.dumps({"seeds": results}, indent=2))
    text = table(results, datasets, options)
    print(text)
    if options.write is not None:
        write_between(options.write, BEGIN, END, text)


def write_between(document: Path, begin: str, end: str, text: str) -> None:
    """Write a measurement between its markers."""
    before, rest = document.read_text("utf-8").split(begin)
    after = rest.split(end)[1]
    document.write_text(f"{before}{begin}\n{text}\n{end}{after}", "utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure what distillation is worth on the reviews."
    )
    parser.add_argument("--out", type=Path, default=Path(".stillhouse/bench-distil"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--labelled", type=int, default=3000, help="labelled training texts")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps of each student")
    parser.add_argument("--teacher-epochs", type=float, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--write", type=Path, help="document with marks to write the table to")
    return parser.parse_args()


def write_datasets(directory: Path, *, labelled: int) -> dict[str, Any]:
    """Store the three datasets and return their directories and sizes."""
    directory.mkdir(parents=True, exist_ok=True)
    reviews = directory / "reviews.jsonl"
    write_reviews(reviews)
    rows = [json.loads(line) for line in reviews.read_text("utf-8").splitlines()]
    # Sorted by the hash of the text, so that the choice depends on nothing else.
    rows.sort(key=lambda row: text_key(row["text"])[8:])
    is_train = [assign_split(text_key(row["text"]), FRACTIONS) is Split.TRAIN for row in rows]
    train = [row for row, chosen in zip(rows, is_train, strict=True) if chosen]
    held_out = [row for row, chosen in zip(rows, is_train, strict=True) if not chosen]
    layout = Layout(heads=[HeadColumn(name=head["name"]) for head in HEADS], fractions=FRACTIONS)
    parts = {
        "all": (train + held_out, layout),
        "labelled": (train[:labelled] + held_out, layout),
        "rest": ([{"text": row["text"]} for row in train[labelled:]], Layout()),
    }
    found: dict[str, Any] = {}
    for name, (chosen, shape) in parts.items():
        upload = directory / f"{name}.jsonl"
        upload.write_text("".join(json.dumps(row) + "\n" for row in chosen), "utf-8")
        path = directory / f"ds_{name}"
        if not path.exists():
            ingest(
                upload,
                format=Format.JSONL,
                layout=shape,
                id=path.name,
                name=name,
                datasets_dir=directory,
            )
        card = json.loads((path / "dataset.json").read_text())
        found[name] = {"path": path, "rows": card["rows"]}
    return found


def run_seed(seed: int, datasets: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Train one teacher and one student of each arm; return their evaluations."""
    place = options.out / f"seed-{seed}"
    training = training_of(seed)
    teacher = launch(
        place / "teacher",
        "services.trainer.main",
        {
            "kind": "teacher",
            "dataset_id": "ds_all",
            "model": {"config": TEACHER, "tokenizer": {"train": True, "vocab_size": 6000}},
            "training": training | {"epochs": options.teacher_epochs, "learning_rate": 1e-3},
        },
        options,
        dataset_dir=datasets["all"]["path"],
    )
    found: dict[str, Any] = {"teacher_parameters": teacher.parameters, "arms": {}}
    for arm, wanted in ARMS.items():
        unlabelled = [datasets["rest"]["path"]] if arm == "unlabelled" else []
        texts = datasets["labelled"]["rows"]["train"]
        texts += sum(datasets["rest"]["rows"].values()) if unlabelled else 0
        steps_per_epoch = -(-texts // training["batch_size"])
        report = launch(
            place / arm,
            "services.distiller.main",
            {
                "kind": "distill",
                "dataset_id": "ds_labelled",
                "teacher": {"path": "teacher"},
                "student": {"config": STUDENT, "tokenizer": "teacher"},
                # The same number of steps for all, and evaluations after the same steps.
                "training": training
                | {
                    "epochs": options.steps / steps_per_epoch,
                    "eval_every_epochs": options.steps / 12 / steps_per_epoch,
                    "learning_rate": 2e-3,
                },
                "distillation": wanted,
            },
            options,
            dataset_dir=datasets["labelled"]["path"],
            teacher_dir=place / "teacher" / "export",
            unlabelled_dirs=unlabelled,
            cache_dir=place / "signals",
        )
        found["arms"][arm] = report.evaluation
    return found


def training_of(seed: int) -> dict[str, Any]:
    """Return the training settings that all jobs share."""
    return {"batch_size": 32, "micro_batch_tokens": 2048, "max_length": 64, "seed": seed}


def launch(
    run_dir: Path,
    module: str,
    spec: dict[str, Any],
    options: argparse.Namespace,
    **places: Any,
) -> Report:
    """Run one job under torchrun, unless its report exists already; return the report."""
    run = RunDirectory(run_dir.absolute())
    report = read_record(run.report, Report)
    if report is None:
        spec |= {"recipe": RECIPE, "resources": {"ranks": options.ranks, "device": "cpu"}}
        task = RunInput.model_validate(
            {
                "job_id": f"job_{run_dir.name}",
                "attempt": 1,
                "spec": spec,
                "recipe": RECIPE,
                **{name: _absolute(place) for name, place in places.items()},
            }
        )
        write_json(run.spec, task)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(options.ranks), "-m", module, str(run.path)]
        began = time.monotonic()
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        subprocess.run(command, cwd=REPOSITORY, env=environment, check=True)
        print(f"{run_dir}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        report = read_record(run.report, Report)
    assert report is not None, f"{run.path} has no report"
    return report


def _absolute(place: Any) -> Any:
    return [p.absolute() for p in place] if isinstance(place, list) else place.absolute()


def table(
    results: Sequence[dict[str, Any]],
    datasets: dict[str, Any],
    options: argparse.Namespace,
) -> str:
    """Return the measured part of the document."""
    heads = [head["name"] for head in HEADS]
    rows = datasets["labelled"]["rows"]
    more = sum(datasets["rest"]["rows"].values())
    lines = [
        f"Seeds: {len(results)}. {rows['train']} labelled and {more} unlabelled training texts, "
        f"{rows['validation']} validation, {rows['test']} test texts; {options.steps} steps of 32 "
        f"texts for each student. {machine_words()}",
        "",
        "| macro-F1 on test, mean ± standard deviation over seeds | " + " | ".join(heads) + " |",
        "|---|" + "---|" * len(heads),
    ]
    first = results[0]["arms"]["distilled"]
    lines.append(
        f"| teacher, {first['teacher']['parameters'] / 1e6:.2f} M parameters | "
        + " | ".join(
            _spread([r["arms"]["distilled"]["teacher"]["heads"][h]["macro_f1"] for r in results])
            for h in heads
        )
        + " |"
    )
    for arm in ARMS:
        figures = [
            _spread([r["arms"][arm]["heads"][head]["macro_f1"] for r in results]) for head in heads
        ]
        lines.append(f"| student, {arm} | " + " | ".join(figures) + " |")
    for arm in ARMS:
        shares = [
            _spread([r["arms"][arm]["student_over_teacher"][head] for r in results])
            for head in heads
        ]
        lines.append(f"| share of the teacher's, {arm} | " + " | ".join(shares) + " |")
    seconds = first["single_text_seconds"], first["teacher"]["single_text_seconds"]
    lines += [
        "",
        f"The student has {first['parameters'] / 1e6:.2f} M parameters and classifies a single text in "
        f"{seconds[0] * 1e3:.1f} ms (teacher: {seconds[1] * 1e3:.1f} ms).",
    ]
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{mean(values):.4f} ± {stdev(values):.4f}"


def machine_words() -> str:
    """Return a description of the machine."""
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}."


if __name__ == "__main__":
    main()
