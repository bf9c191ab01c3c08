"""The end of a distillation: the best student is evaluated against its teacher and sealed as an artifact."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from transformers import PreTrainedTokenizerBase

from services.distiller.evaluate import compare, single_text_seconds
from services.distiller.inputs import DistillationData
from services.distiller.signals import Signals
from services.distiller.student import StudentInit
from services.distiller.teacher import Teacher, TeacherFiles
from services.shared.files.hashing import file_sha256
from services.shared.jobs.artifact_layout import MANIFEST
from services.shared.jobs.documents import Evaluation
from services.shared.jobs.run_directory import Report, RunDirectory, RunInput
from services.shared.jobs.spec import DistillSpec
from services.shared.model.artifact import (
    check_golden,
    load_backbone,
    read_heads,
    seal_artifact,
    set_heads,
)
from services.shared.model.baseline import fit_baselines
from services.shared.model.calibration import Calibration, calibrate
from services.shared.model.classifier import Classifier, wrap_backbone
from services.shared.model.comparison import DEFAULT_CONFIDENCE, HeldOut, add_comparisons
from services.shared.model.description import BASE_MODEL, TEACHER
from services.shared.model.metrics import Array
from services.shared.model.predictions_file import write_predictions
from services.shared.training.checkpoint.loop_state import LoopState, LoopSummary
from services.shared.training.evaluation import predict_labels, predict_split
from services.shared.training.process import World
from services.shared.training.sharding.export import export_artifact, publish_export
from services.shared.training.sharding.shard import Sharded


@dataclass(frozen=True)
class TeacherRecord:
    """What the report needs of a teacher whose memory has been freed."""

    files: TeacherFiles
    placement: str
    logits: dict[str, Array]  # on the evaluation split
    calibration: dict[str, Calibration]  # by head; empty where no head is multi-label
    single_text_seconds: float | None


class ExportedMetrics(TypedDict):
    """What is measured on the student as exported."""

    single_text_seconds: float | None
    parameters: int


class StudentLineage(TypedDict):
    """What a student was made from, in the order of the manifest."""

    kind: Literal["distill"]
    job_id: str
    attempt: int
    dataset_id: str
    dataset_sha256: str
    unlabelled_dataset_ids: list[str]
    teacher: dict[str, str]  # TeacherSource, as the spec gave it
    teacher_manifest_sha256: str | None  # None for a plain Hugging Face classifier
    student: dict[str, Any]  # ModelSource, as the spec gave it
    teacher_layers: list[int] | None  # those that the student started from; None: not from layers
    seed: int
    steps: int


class TruncatedTexts(TypedDict):
    """The number of training texts truncated for each model."""

    student: int
    teacher: int


class DistillationDetails(LoopSummary):
    """The `details` of a student's report."""

    training_texts: int
    unlabelled_texts: int
    unlabelled_texts_left_out: int
    truncated_texts: TruncatedTexts
    signals: str


@dataclass(frozen=True)
class Evaluated:
    """The student's evaluation, and the predictions of both models that it is made of."""

    evaluation: Evaluation
    calibration: dict[str, Calibration]
    student: dict[str, Array]
    teacher: dict[str, Array]


def record_teacher(
    teacher: Teacher,
    evaluation: Signals,
    validation: Signals | None,
    data: DistillationData,
    world: World,
) -> TeacherRecord:
    """Return what the report contains of the teacher; its latency includes sharding where it is sharded.

    `validation` is given, complete, where thresholds are to be fitted on it.
    """
    seconds = single_text_seconds(
        teacher,
        teacher.tokenizer,
        data.evaluation.corpus.rows.texts,
        max_length=teacher.files.max_length,
        prefix=teacher.files.prefix,
        device=world.device,
    )
    calibration = {}
    if validation is not None:
        labels = data.validation.corpus.rows.labels
        calibration = calibrate(data.heads, _arrays(validation), labels)
    return TeacherRecord(
        teacher.files, teacher.placement, _arrays(evaluation), calibration, seconds
    )


def evaluate_student(
    student: Sharded,
    data: DistillationData,
    teacher: TeacherRecord,
    world: World,
    *,
    budget_tokens: int,
    pad_id: int,
) -> Evaluated | None:
    """Return the evaluation and the calibration of the student; None without held-out texts. Collective."""
    if not len(data.evaluation.corpus):
        return None
    logits = [
        predict_split(
            student, pair.student, data.heads, world, budget_tokens=budget_tokens, pad_id=pad_id
        )
        for pair in (data.validation, data.evaluation)
    ]
    calibration = calibrate(data.heads, logits[0], data.validation.corpus.rows.labels)
    comparison = compare(
        data.heads,
        student=logits[1],
        teacher=teacher.logits,
        labels=data.evaluation.corpus.rows.labels,
        calibration=calibration,
        teacher_calibration=teacher.calibration,
    )
    teacher_evaluation = {
        **comparison["teacher"],
        "parameters": teacher.files.parameters,
        "size_bytes": teacher.files.size_bytes,
        "single_text_seconds": teacher.single_text_seconds,
        "placement": teacher.placement,
    }
    evaluation: Evaluation = {
        "split": str(data.evaluation_split),
        **comparison,
        "teacher": teacher_evaluation,
    }
    return Evaluated(
        evaluation,
        calibration,
        student=predict_labels(logits[1], data.heads, calibration),
        teacher=predict_labels(teacher.logits, data.heads, teacher.calibration),
    )


def publish(
    run: RunDirectory,
    task: RunInput,
    student: Sharded,
    data: DistillationData,
    teacher: TeacherRecord,
    world: World,
    state: LoopState,
    *,
    init: StudentInit,
    steps_per_epoch: int,
    signals: str,
) -> Report:
    """Evaluate the student, write its artifact, check it once as written, and report. Collective."""
    assert isinstance(task.spec, DistillSpec)
    training, tokenizer = task.spec.training, init.tokenizer
    evaluated = evaluate_student(
        student,
        data,
        teacher,
        world,
        budget_tokens=student.recipe.token_budget(training),
        pad_id=tokenizer.pad_token_id,
    )
    evaluation = {} if evaluated is None else evaluated.evaluation
    if evaluation and state.best is not None:
        evaluation["validation"] = state.best.evaluation
    texts = data.train.corpus.rows.texts
    staging_dir = export_artifact(
        run, student, tokenizer, texts, world, max_length=training.max_length, prefix=init.prefix
    )
    report = Report(
        outcome="succeeded",
        steps=state.step,
        epochs=state.step / steps_per_epoch,
        seconds=state.seconds,
        artifact=run.export.name,
        heads=[head.model_dump(mode="json") for head in data.heads],
        evaluation=evaluation,
        details=_details(data, state, steps_per_epoch, signals=signals),
    )
    if world.is_first:
        exported = _load_exported(staging_dir, data, world.device)
        check_golden(staging_dir, exported, tokenizer)
        if evaluated is not None:
            _compare_with_baseline(evaluated, data, staging_dir, task.spec)
            evaluation |= _exported_metrics(
                exported,
                tokenizer,
                data,
                max_length=training.max_length,
                prefix=init.prefix,
                device=world.device,
            )
            if init.vocabulary is not None:
                evaluation["vocabulary"] = init.vocabulary.report.model_dump()
        sealed = seal_artifact(
            staging_dir,
            heads=data.heads,
            pooling=student.classifier.pooling,
            text_kind=data.card.text_kind,
            prefix=init.prefix,
            lineage=_lineage(task, data, teacher.files, state, teacher_layers=init.layers),
            metrics=evaluation,
            max_length=training.max_length,
            calibration=None if evaluated is None else evaluated.calibration,
            made_from=_made_from(init, teacher.files),
        )
        if evaluation:
            evaluation["size_bytes"] = sealed.size_bytes
        publish_export(run, staging_dir)
        report = report.model_copy(
            update={
                "parameters": sealed.parameters,
                "size_bytes": sealed.size_bytes,
                "manifest_sha256": sealed.sha256,
                "evaluation": evaluation,
            }
        )
    world.barrier()
    return report


def _compare_with_baseline(
    evaluated: Evaluated, data: DistillationData, artifact_dir: Path, spec: DistillSpec
) -> None:
    """Add baselines and intervals to the evaluation, and write all predictions to the artifact."""
    rows, seed = data.evaluation.corpus.rows, spec.training.seed
    held_out = HeldOut(
        heads=data.heads,
        labels=rows.labels,
        model=evaluated.student,
        teacher=evaluated.teacher,
        baselines=fit_baselines(data.heads, train=data.train.corpus.rows, held_out=rows, seed=seed),
    )
    confidence = spec.gate.confidence or DEFAULT_CONFIDENCE
    add_comparisons(evaluated.evaluation, held_out, seed=seed, confidence=confidence)
    write_predictions(artifact_dir, held_out, rows.lines)


def _details(
    data: DistillationData, state: LoopState, steps_per_epoch: int, *, signals: str
) -> DistillationDetails:
    return {
        **state.summary(steps_per_epoch),
        "training_texts": len(data.train.corpus),
        "unlabelled_texts": data.num_unlabelled,
        "unlabelled_texts_left_out": data.num_duplicates,
        "truncated_texts": {
            "student": data.train.student.truncated,
            "teacher": data.train.teacher.truncated,
        },
        "signals": signals,
    }


def _arrays(signals: Signals) -> dict[str, Array]:
    return {name: values.numpy() for name, values in signals.logits().items()}


def _load_exported(directory: Path, data: DistillationData, device: torch.device) -> Classifier:
    """Return the student as loaded from its exported files."""
    classifier = wrap_backbone(load_backbone(directory), data.heads)
    set_heads(classifier, read_heads(directory, data.heads))
    return classifier.to(device).eval()


def _exported_metrics(
    exported: Classifier,
    tokenizer: PreTrainedTokenizerBase,
    data: DistillationData,
    *,
    max_length: int,
    prefix: str,
    device: torch.device,
) -> ExportedMetrics:
    return {
        "single_text_seconds": single_text_seconds(
            exported,
            tokenizer,
            data.evaluation.corpus.rows.texts,
            max_length=max_length,
            prefix=prefix,
            device=device,
        ),
        "parameters": sum(p.numel() for p in exported.parameters()),
    }


def _made_from(init: StudentInit, teacher: TeacherFiles) -> dict[str, Path]:
    """Return the directories of the student's first weights and of its teacher, once where they are one."""
    base = {} if init.directory is None else {BASE_MODEL: init.directory}
    return base if init.directory == teacher.directory else {**base, TEACHER: teacher.directory}


def _lineage(
    task: RunInput,
    data: DistillationData,
    teacher: TeacherFiles,
    state: LoopState,
    *,
    teacher_layers: list[int] | None,
) -> StudentLineage:
    assert isinstance(task.spec, DistillSpec)
    manifest = teacher.directory / MANIFEST
    return {
        "kind": "distill",
        "job_id": task.job_id,
        "attempt": task.attempt,
        "dataset_id": data.card.id,
        "dataset_sha256": data.card.sha256,
        "unlabelled_dataset_ids": task.spec.distillation.unlabelled_dataset_ids,
        "teacher": task.spec.teacher.model_dump(mode="json", exclude_none=True),
        "teacher_manifest_sha256": file_sha256(manifest) if manifest.exists() else None,
        "student": task.spec.student.model_dump(mode="json", exclude_none=True),
        "teacher_layers": teacher_layers,
        "seed": task.spec.training.seed,
        "steps": state.step,
    }
