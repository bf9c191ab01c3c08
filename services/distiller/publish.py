"""The end of a distillation: the best student, judged beside its teacher, as a sealed artifact."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.distiller.corpus import Lesson
from services.distiller.evaluate import compare, single_text_seconds
from services.distiller.signals import Signals
from services.distiller.teacher import Teacher, TeacherFiles
from services.shared.files.hashing import file_sha256
from services.shared.jobs.artifact_layout import MANIFEST
from services.shared.jobs.run_directory import Report, RunDirectory, RunInput
from services.shared.jobs.spec import DistillSpec
from services.shared.model.artifact import (
    check_golden,
    load_backbone,
    read_heads,
    seal_artifact,
    set_heads,
)
from services.shared.model.calibration import Calibration, calibrate
from services.shared.model.classifier import Classifier, wrap_backbone
from services.shared.model.metrics import Array
from services.shared.training.checkpoint.loop_state import LoopState
from services.shared.training.evaluation import predict_split
from services.shared.training.process import World
from services.shared.training.sharding.export import export_unsealed, put_in_place
from services.shared.training.sharding.shard import Sharded


@dataclass(frozen=True)
class TeacherRecord:
    """What is left to say of a teacher that may have gone."""

    files: TeacherFiles
    placement: str
    logits: dict[str, Array]  # on the judged texts
    calibration: dict[str, Calibration]  # by head; empty where no head is multi-label
    single_text_seconds: float | None


def meet_teacher(
    teacher: Teacher, judged: Signals, validation: Signals | None, lesson: Lesson, world: World
) -> TeacherRecord:
    """Return what the report says of the teacher; its speed includes sharding where it is sharded.

    `validation` holds its answers there, complete, where thresholds are to be fitted on them.
    """
    seconds = single_text_seconds(
        teacher,
        teacher.tokenizer,
        lesson.judged.corpus.rows.texts,
        max_length=teacher.files.max_length,
        device=world.device,
    )
    calibration = {}
    if validation is not None:
        labels = lesson.validation.corpus.rows.labels
        calibration = calibrate(lesson.heads, _arrays(validation), labels)
    return TeacherRecord(teacher.files, teacher.placement, _arrays(judged), calibration, seconds)


def judge(
    student: Sharded,
    lesson: Lesson,
    teacher: TeacherRecord,
    world: World,
    *,
    budget_tokens: int,
    pad_id: int,
) -> tuple[dict[str, Any], dict[str, Calibration]]:
    """Return the evaluation on the judged split and the calibration; all ranks must call this."""
    if not len(lesson.judged.corpus):
        return {}, {}
    logits = [
        predict_split(
            student, side.student, lesson.heads, world, budget_tokens=budget_tokens, pad_id=pad_id
        )
        for side in (lesson.validation, lesson.judged)
    ]
    calibration = calibrate(lesson.heads, logits[0], lesson.validation.corpus.rows.labels)
    evaluation = compare(
        lesson.heads,
        student=logits[1],
        teacher=teacher.logits,
        labels=lesson.judged.corpus.rows.labels,
        calibration=calibration,
        teacher_calibration=teacher.calibration,
    )
    evaluation["teacher"] |= {
        "parameters": teacher.files.parameters,
        "size_bytes": teacher.files.size_bytes,
        "single_text_seconds": teacher.single_text_seconds,
        "placement": teacher.placement,
    }
    return {"split": str(lesson.judged_split)} | evaluation, calibration


def publish(
    run: RunDirectory,
    task: RunInput,
    student: Sharded,
    lesson: Lesson,
    teacher: TeacherRecord,
    world: World,
    state: LoopState,
    *,
    tokenizer: Any,
    steps_per_epoch: int,
    signals: str,
) -> Report:
    """Judge the student, write its artifact, try it once as it was written, and report."""
    assert isinstance(task.spec, DistillSpec)
    training = task.spec.training
    evaluation, calibration = judge(
        student,
        lesson,
        teacher,
        world,
        budget_tokens=student.recipe.token_budget(training),
        pad_id=tokenizer.pad_token_id,
    )
    if evaluation and state.best is not None:
        evaluation["validation"] = state.best.evaluation
    texts = lesson.train.corpus.rows.texts
    aside = export_unsealed(run, student, tokenizer, texts, world, max_length=training.max_length)
    report = Report(
        outcome="succeeded",
        steps=state.step,
        epochs=state.step / steps_per_epoch,
        seconds=state.seconds,
        artifact=run.export.name,
        heads=[head.model_dump(mode="json") for head in lesson.heads],
        evaluation=evaluation,
        details=_details(lesson, state, steps_per_epoch) | {"signals": signals},
    )
    if world.is_first:
        written = _read_back(aside, lesson, world.device)
        check_golden(aside, written, tokenizer)
        if evaluation:
            evaluation["single_text_seconds"] = single_text_seconds(
                written,
                tokenizer,
                lesson.judged.corpus.rows.texts,
                max_length=training.max_length,
                device=world.device,
            )
            evaluation["parameters"] = sum(p.numel() for p in written.parameters())
        sealed = seal_artifact(
            aside,
            heads=lesson.heads,
            pooling=student.classifier.pooling,
            lineage=_lineage(task, lesson, teacher.files, state),
            metrics=evaluation,
            max_length=training.max_length,
            calibration=calibration,
        )
        if evaluation:
            evaluation["size_bytes"] = sealed.size_bytes
        put_in_place(run, aside)
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


def _details(lesson: Lesson, state: LoopState, steps_per_epoch: int) -> dict[str, Any]:
    """Return what the report says beside the evaluation."""
    return state.details(steps_per_epoch) | {
        "training_texts": len(lesson.train.corpus),
        "unlabelled_texts": lesson.unlabelled,
        "unlabelled_texts_left_out": lesson.left_out,
        "truncated_texts": {
            "student": lesson.train.student.truncated,
            "teacher": lesson.train.teacher.truncated,
        },
    }


def _arrays(answers: Signals) -> dict[str, Array]:
    return {name: values.numpy() for name, values in answers.all_answers().items()}


def _read_back(aside: Path, lesson: Lesson, device: torch.device) -> Classifier:
    """Return the student as its files hold it."""
    classifier = wrap_backbone(load_backbone(aside), lesson.heads)
    set_heads(classifier, read_heads(aside, lesson.heads))
    return classifier.to(device).eval()


def _lineage(
    task: RunInput, lesson: Lesson, teacher: TeacherFiles, state: LoopState
) -> dict[str, Any]:
    assert isinstance(task.spec, DistillSpec)
    manifest = teacher.directory / MANIFEST
    return {
        "kind": "distill",
        "job_id": task.job_id,
        "attempt": task.attempt,
        "dataset_id": lesson.card.id,
        "dataset_sha256": lesson.card.sha256,
        "unlabelled_dataset_ids": task.spec.distillation.unlabelled_dataset_ids,
        "teacher": task.spec.teacher.model_dump(mode="json", exclude_none=True),
        "teacher_manifest_sha256": file_sha256(manifest) if manifest.exists() else None,
        "student": task.spec.student.model_dump(mode="json", exclude_none=True),
        "seed": task.spec.training.seed,
        "steps": state.step,
    }
