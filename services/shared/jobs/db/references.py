"""What a spec refers to: datasets, models, a teacher job; checked in the transaction that stores it."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from services.shared.datasets.card import DatasetCard, Head, heads_difference
from services.shared.jobs.db.tables import DatasetRow, JobRow, ModelRow
from services.shared.jobs.errors import InvalidInput
from services.shared.jobs.spec import DistillSpec, TeacherSpec
from services.shared.jobs.state import JobState


@dataclass(frozen=True)
class References:
    """What a new job depends on."""

    state: JobState  # waiting for its parent, or queued
    parent_job_id: str | None = None
    teacher_model_id: str | None = None


def check_references(session: Session, spec: TeacherSpec | DistillSpec) -> References:
    """Return what the spec depends on.

    A teacher job that still runs is locked until the transaction ends, so that it cannot finish
    between our look at it and the insertion of its child. Raises InvalidInput naming the field.
    """
    heads = _chosen_heads(spec, _card(session, spec.dataset_id, field="dataset_id"))
    if isinstance(spec, TeacherSpec):
        _model(session, spec.model.model_id, field="model.model_id")
        return References(JobState.QUEUED)
    for number, dataset_id in enumerate(spec.distillation.unlabelled_dataset_ids):
        field = f"distillation.unlabelled_dataset_ids.{number}"
        _card(session, dataset_id, field=field)
    _model(session, spec.student.model_id, field="student.model_id")
    if spec.teacher.job_id is not None:
        return _teacher_job(session, spec.teacher.job_id, heads)
    teacher = _model(session, spec.teacher.model_id, field="teacher.model_id")
    if teacher is None:
        return References(JobState.QUEUED)
    check_same_heads(heads, _heads_of(teacher))
    return References(JobState.QUEUED, teacher_model_id=teacher.id)


def _teacher_job(session: Session, job_id: str, heads: list[Head]) -> References:
    field = "teacher.job_id"
    parent = session.scalar(select(JobRow).where(JobRow.id == job_id).with_for_update(read=True))
    if parent is None:
        raise InvalidInput(f"{field}: there is no job {job_id!r}", field=field)
    if parent.state in (JobState.FAILED, JobState.CANCELLED):
        raise InvalidInput(
            f"{field}: job {job_id} is {parent.state} and made no model; retry it: "
            "what failed with it is repeated too, and anything else can name the new job",
            field=field,
        )
    if parent.state == JobState.SUCCEEDED:
        model = session.scalars(select(ModelRow).where(ModelRow.job_id == job_id)).one()
        check_same_heads(heads, _heads_of(model))
        return References(JobState.QUEUED, parent_job_id=job_id, teacher_model_id=model.id)
    card = _card(session, parent.dataset_id, field=field)
    chosen = parent.spec.get("heads")
    check_same_heads(heads, [h for h in card.heads if chosen is None or h.name in chosen])
    return References(JobState.WAITING, parent_job_id=job_id)


def _chosen_heads(spec: TeacherSpec | DistillSpec, card: DatasetCard) -> list[Head]:
    known = {head.name: head for head in card.heads}
    if not known:
        raise InvalidInput(
            f"dataset_id: dataset {card.id} has no labels; it can only be an unlabelled dataset "
            "of a distillation",
            field="dataset_id",
        )
    unknown = [name for name in spec.heads or [] if name not in known]
    if unknown:
        raise InvalidInput(
            f"heads: dataset {card.id} has no head {unknown[0]!r}; it has {', '.join(known)}",
            field="heads",
        )
    return [known[name] for name in spec.heads or known]


def check_same_heads(student: list[Head], teacher: list[Head]) -> None:
    """Raise InvalidInput with both lists unless the teacher answers every question of the student."""
    difference = heads_difference(student, teacher)
    if difference is not None:
        raise InvalidInput(f"heads: {difference}", field="heads")


def _heads_of(model: ModelRow) -> list[Head]:
    return [
        Head.model_validate({key: head[key] for key in ("name", "type", "labels")})
        for head in model.heads
    ]


def _card(session: Session, dataset_id: str, *, field: str) -> DatasetCard:
    card = session.scalar(select(DatasetRow.card).where(DatasetRow.id == dataset_id))
    if card is None:
        raise InvalidInput(f"{field}: there is no dataset {dataset_id!r}", field=field)
    return DatasetCard.model_validate(card)


def _model(session: Session, model_id: str | None, *, field: str) -> ModelRow | None:
    if model_id is None:
        return None
    model = session.get(ModelRow, model_id)
    if model is None:
        raise InvalidInput(f"{field}: there is no model {model_id!r}", field=field)
    return model
