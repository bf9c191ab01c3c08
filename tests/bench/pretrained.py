"""What a pretrained model is worth on few labels: `make bench-pretrained` runs the demo's jobs with several seeds.

For each seed multilingual-e5-small is fine-tuned on the labelled part of the reviews, and a student of three of
its layers is distilled with texts without labels. The n-gram baseline learns from the same labelled texts. The best
evaluation on validation is exported, and the test split is evaluated once, at the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from services.cli.demo_data import FRACTIONS, HEADS, write_parts
from services.cli.demo_jobs import BASE_MODEL, PRETRAINED
from services.shared.datasets.ingest import ingest
from services.shared.datasets.upload import Format, HeadColumn, Layout
from tests.bench.distillation import launch, machine_words, write_between
from tests.pretrained_models import pretrained_model

BEGIN, END = "<!-- measured pretrained: begin -->", "<!-- measured pretrained: end -->"
NAMES = [head["name"] for head in HEADS]


def main() -> None:
    """Run all seeds and print the table; `--write FILE` also writes it between the file's markers."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    datasets = store_datasets(options.out, options)
    evaluations = [run_seed(seed, datasets, options) for seed in range(options.seeds)]
    text = table(evaluations, options)
    print(text)
    if options.write is not None:
        write_between(options.write, BEGIN, END, text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(".stillhouse/bench-pretrained"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--labelled", type=int, default=PRETRAINED.labelled)
    parser.add_argument("--unlabelled", type=int, default=PRETRAINED.unlabelled)
    parser.add_argument("--teacher-epochs", type=float, default=3)
    parser.add_argument("--student-epochs", type=float, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--write", type=Path, help="document with markers for the table")
    return parser.parse_args()


def store_datasets(directory: Path, options: argparse.Namespace) -> tuple[Path, Path]:
    """Store the labelled and the unlabelled reviews; return their directories."""
    parts = write_parts(directory, labelled=options.labelled, unlabelled=options.unlabelled)
    heads = [HeadColumn(name=name) for name in NAMES]
    layouts = Layout(heads=heads, fractions=FRACTIONS), Layout(fractions=FRACTIONS)
    stored = directory / "ds_labelled", directory / "ds_unlabelled"
    for upload, layout, path in zip(parts, layouts, stored, strict=True):
        if not path.exists():
            ingest(
                upload,
                format=Format.JSONL,
                layout=layout,
                id=path.name,
                name=path.name,
                datasets_dir=directory,
            )
    return stored


def run_seed(
    seed: int, datasets: tuple[Path, Path], options: argparse.Namespace
) -> Mapping[str, Any]:
    """Fine-tune one teacher, distil its student, and return the student's evaluation, which has both."""
    place = options.out / f"seed-{seed}"
    labelled, unlabelled = datasets
    teacher: Any = PRETRAINED.teacher_spec(labelled.name)
    teacher["training"] |= {"seed": seed, "epochs": options.teacher_epochs, "eval_every_epochs": 1}
    launch(
        place / "teacher",
        "services.trainer.main",
        teacher,
        options,
        dataset_dir=labelled,
        model_dir=pretrained_model(BASE_MODEL),
    )
    student: Any = PRETRAINED.student_spec(
        labelled.name, teacher_job_id="job_teacher", unlabelled_ids=[unlabelled.name]
    )
    student["training"] |= {"seed": seed, "epochs": options.student_epochs, "eval_every_epochs": 1}
    report = launch(
        place / "student",
        "services.distiller.main",
        student,
        options,
        dataset_dir=labelled,
        teacher_dir=place / "teacher" / "export",
        unlabelled_dirs=[unlabelled],
        cache_dir=place / "signals",
    )
    return report.evaluation


def table(evaluations: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> str:
    """Return the measured part of the document."""
    first = evaluations[0]
    models: dict[str, Any] = {
        f"n-grams ({options.labelled:,} labelled texts)": [
            {name: e["heads"][name]["baseline"] for name in NAMES} for e in evaluations
        ],
        f"teacher ({options.teacher_epochs:g} epochs)": [
            e["teacher"]["heads"] for e in evaluations
        ],
        f"student ({options.student_epochs:g} epochs, {options.unlabelled:,} unlabelled texts more)": [
            e["heads"] for e in evaluations
        ],
    }
    columns = [f"{name}, {metric}" for name in NAMES for metric in ("accuracy", "macro-F1")]
    lines = [
        f"Seeds: {len(evaluations)}; {first['heads'][NAMES[0]]['texts']:,} test texts. {machine_words()}",
        "",
        "| mean ± standard deviation over seeds | " + " | ".join(columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for model, heads in models.items():
        figures = [
            _spread([found[name][metric] for found in heads])
            for name in NAMES
            for metric in ("accuracy", "macro_f1")
        ]
        lines.append(f"| {model} | " + " | ".join(figures) + " |")
    lines += [
        "",
        "Gain in macro-F1 over n-grams, and its 95 % interval over test texts, seed by seed:",
        "",
    ]
    compared = {"teacher": [e["teacher"] for e in evaluations], "student": evaluations}
    for model, found in compared.items():
        for name in NAMES:
            gains = [_gain(one["heads"][name]["against_baseline"]) for one in found]
            lines.append(f"- {model}, {name}: " + ", ".join(gains))
    return "\n".join(lines)


def _gain(paired: Mapping[str, Any]) -> str:
    interval = paired["macro_f1_difference_interval"]
    return (
        f"{paired['macro_f1_difference']:+.4f} ({interval['low']:+.4f} to {interval['high']:+.4f})"
    )


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{mean(values):.4f} ± {stdev(values):.4f}"


if __name__ == "__main__":
    main()
