"""Loads what a spec refers to in the database: datasets, models, a teacher job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from services.shared.datasets.card import DatasetCard, Head, HeadType, Split
from services.shared.datasets.text import TextKind
from services.shared.jobs.db.tables import DatasetRow, JobRow, ModelRow
from services.shared.jobs.documents import ModelHeadDict
from services.shared.jobs.errors import InvalidRequest
from services.shared.jobs.resolved_spec import (
    References,
    ResolvedSpec,
    TeacherReference,
    check_same_heads,
)
from services.shared.jobs.spec import DistillSpec, TeacherSpec, job_spec
from services.shared.jobs.state import JobState

# NULL in cards that were stored before there were other kinds.
_TEXT_KIND = func.jsonb_extract_path_text(DatasetRow.card, "text_kind").label("text_kind")


def load_references(
    session: Session, spec: TeacherSpec | DistillSpec, *, chained: ResolvedSpec | None = None
) -> References:
    """Return what the database knows of a spec's references.

    `chained` is the teacher of a chain, whose job is not stored yet. Raises InvalidRequest naming the
    field of a reference that does not exist, and `heads` where those of the teacher differ.
    """
    card = _card(session, spec.dataset_id, field="dataset_id")
    heads = _chosen_heads(spec, card)
    if isinstance(spec, TeacherSpec):
        _check_model(session, spec.model.model_id, field="model.model_id")
        return References(heads, training_texts=card.rows.get(Split.TRAIN, 0))
    unlabelled = _unlabelled_cards(session, spec.distillation.unlabelled_dataset_ids)
    _check_unlabelled(unlabelled, spec.distillation.unlabelled_dataset_ids, kind=card.text_kind)
    teacher = TeacherReference(heads=chained.heads) if chained else _teacher(session, spec)
    _check_teacher_kind(session, spec, chained, kind=card.text_kind)
    _check_model(session, spec.student.model_id, field="student.model_id")
    if teacher.heads is not None:
        check_same_heads(heads, teacher.heads)
    texts = card.rows.get(Split.TRAIN, 0) + sum(
        sum(other.rows.values()) for other in unlabelled.values()
    )
    return References(heads, teacher, texts)


@dataclass(frozen=True)
class Dependency:
    """What a job that is being stored depends on."""

    state: JobState  # waiting for its parent, or queued
    parent_job_id: str | None = None
    teacher_model_id: str | None = None


def lock_dependency(session: Session, spec: TeacherSpec | DistillSpec) -> Dependency:
    """Return what a new job waits for.

    A teacher job that still runs is locked until the transaction ends, so that it cannot finish
    between this query and the insertion of its child. Raises InvalidRequest for one that has failed.
    Datasets and models are locked as well, so that none is deleted meanwhile.
    """
    _lock_references(session, spec)
    if isinstance(spec, TeacherSpec) or spec.teacher.job_id is None:
        model_id = None if isinstance(spec, TeacherSpec) else spec.teacher.model_id
        return Dependency(JobState.QUEUED, teacher_model_id=model_id)
    job_id = spec.teacher.job_id
    parent = session.scalar(select(JobRow).where(JobRow.id == job_id).with_for_update(read=True))
    if parent is None:
        raise _no_such_job(job_id)
    if parent.state in (JobState.FAILED, JobState.CANCELLED):
        raise InvalidRequest(
            f"teacher.job_id: job {job_id} is {parent.state} and made no model; retry it: "
            "distillations that failed with it are retried too, and any other can name the new job",
            field="teacher.job_id",
        )
    if parent.state != JobState.SUCCEEDED:
        return Dependency(JobState.WAITING, parent_job_id=job_id)
    model_id = session.scalars(select(ModelRow.id).where(ModelRow.job_id == job_id)).one_or_none()
    _lock_models(session, {"teacher.job_id": model_id or f"of job {job_id}"})
    return Dependency(JobState.QUEUED, parent_job_id=job_id, teacher_model_id=model_id)


def _lock_references(session: Session, spec: TeacherSpec | DistillSpec) -> None:
    """Lock the datasets and models that a spec names. Raises InvalidRequest for a deleted one."""
    datasets = {"dataset_id": spec.dataset_id}
    if isinstance(spec, TeacherSpec):
        models = {"model.model_id": spec.model.model_id}
    else:
        models = {
            "student.model_id": spec.student.model_id,
            "teacher.model_id": spec.teacher.model_id,
        }
        for number, dataset_id in enumerate(spec.distillation.unlabelled_dataset_ids):
            datasets[f"distillation.unlabelled_dataset_ids.{number}"] = dataset_id
    known = _locked(session, DatasetRow, set(datasets.values()))
    for field, dataset_id in datasets.items():
        if dataset_id not in known:
            raise InvalidRequest(f"{field}: there is no dataset {dataset_id!r}", field=field)
    _lock_models(session, {field: id for field, id in models.items() if id is not None})


def _lock_models(session: Session, models: dict[str, str]) -> None:
    known = _locked(session, ModelRow, set(models.values()))
    for field, model_id in models.items():
        if model_id not in known:
            raise InvalidRequest(f"{field}: there is no model {model_id!r}", field=field)


def _locked(session: Session, kind: type[DatasetRow] | type[ModelRow], ids: set[str]) -> set[str]:
    """Lock rows against deletion, in order of their ids; return those that are not deleted."""
    query = select(kind.id).where(kind.id.in_(ids), kind.deleted_at.is_(None)).order_by(kind.id)
    return set(session.scalars(query.with_for_update(read=True))) if ids else set()


def _teacher(session: Session, spec: DistillSpec) -> TeacherReference:
    if spec.teacher.model_id is not None:
        return _registered(_check_model(session, spec.teacher.model_id, field="teacher.model_id"))
    job_id = spec.teacher.job_id
    if job_id is None:
        return TeacherReference()
    job = session.get(JobRow, job_id)
    if job is None:
        raise _no_such_job(job_id)
    model = session.scalar(select(ModelRow).where(ModelRow.job_id == job_id))
    if model is not None:
        return _registered(_check_model(session, model.id, field="teacher.job_id"))
    card = _card(session, job.dataset_id, field="teacher.job_id")
    parent = job_spec.validate_python(job.spec)
    return TeacherReference(job_spec=parent, heads=_chosen(parent.heads, card))


def _registered(model: ModelRow | None) -> TeacherReference:
    assert model is not None
    return TeacherReference(model_id=model.id, heads=tuple(map(_head, model.heads)))


def _chosen_heads(spec: TeacherSpec | DistillSpec, card: DatasetCard) -> tuple[Head, ...]:
    known = {head.name: head for head in card.heads}
    if not known:
        raise InvalidRequest(
            f"dataset_id: dataset {card.id} has no labels; it can only be an unlabelled dataset "
            "of a distillation",
            field="dataset_id",
        )
    unknown = [name for name in spec.heads or [] if name not in known]
    if unknown:
        raise InvalidRequest(
            f"heads: dataset {card.id} has no head {unknown[0]!r}; it has {', '.join(known)}",
            field="heads",
        )
    return _chosen(spec.heads, card)


def _chosen(names: list[str] | None, card: DatasetCard) -> tuple[Head, ...]:
    """Return the named heads in the order of the dataset; all of them for None."""
    return tuple(head for head in card.heads if names is None or head.name in names)


def _head(stored: ModelHeadDict) -> Head:
    return Head(name=stored["name"], type=HeadType(stored["type"]), labels=stored["labels"])


def _card(session: Session, dataset_id: str, *, field: str) -> DatasetCard:
    card = session.scalar(
        select(DatasetRow.card).where(DatasetRow.id == dataset_id, DatasetRow.deleted_at.is_(None))
    )
    if card is None:
        raise InvalidRequest(f"{field}: there is no dataset {dataset_id!r}", field=field)
    return DatasetCard.model_validate(card)


def _unlabelled_cards(session: Session, dataset_ids: Sequence[str]) -> dict[str, DatasetCard]:
    """Return the cards of the datasets that exist, by id, in one query."""
    query = select(DatasetRow.card).where(
        DatasetRow.id.in_(dataset_ids), DatasetRow.deleted_at.is_(None)
    )
    cards = map(DatasetCard.model_validate, session.scalars(query))
    return {card.id: card for card in cards}


def _check_unlabelled(
    cards: Mapping[str, DatasetCard], dataset_ids: Sequence[str], *, kind: TextKind
) -> None:
    """Raise InvalidRequest for the first dataset that does not exist or has texts of another kind."""
    for number, dataset_id in enumerate(dataset_ids):
        field = f"distillation.unlabelled_dataset_ids.{number}"
        if dataset_id not in cards:
            raise InvalidRequest(f"{field}: there is no dataset {dataset_id!r}", field=field)
        found = cards[dataset_id].text_kind
        if found is not kind:
            raise InvalidRequest(
                f"{field}: the texts of {dataset_id} are of the kind {found}, those of the labelled dataset {kind}",
                field=field,
            )


def _check_teacher_kind(
    session: Session, spec: DistillSpec, chained: ResolvedSpec | None, *, kind: TextKind
) -> None:
    """Raise InvalidRequest where the teacher's dataset has texts of another kind."""
    if chained is not None:
        dataset_id: str | None = chained.spec.dataset_id
    elif spec.teacher.job_id is not None:
        dataset_id = _dataset_of_job(session, spec.teacher.job_id)
    elif spec.teacher.model_id is not None:
        query = select(ModelRow.job_id).where(ModelRow.id == spec.teacher.model_id)
        job_id = session.scalar(query)
        dataset_id = None if job_id is None else _dataset_of_job(session, job_id)
    else:
        return  # a directory; the ranks compare
    row = session.execute(select(_TEXT_KIND).where(DatasetRow.id == dataset_id)).one_or_none()
    found = kind if row is None else TextKind(row.text_kind or TextKind.SINGLE)  # None: removed
    if found is not kind:
        raise InvalidRequest(
            f"dataset_id: the teacher is trained on texts of the kind {found}, and those of this dataset are {kind}",
            field="dataset_id",
        )


def _dataset_of_job(session: Session, job_id: str) -> str | None:
    return session.scalar(select(JobRow.dataset_id).where(JobRow.id == job_id))


def _check_model(session: Session, model_id: str | None, *, field: str) -> ModelRow | None:
    if model_id is None:
        return None
    model = session.get(ModelRow, model_id)
    if model is None or model.deleted_at is not None:
        raise InvalidRequest(f"{field}: there is no model {model_id!r}", field=field)
    return model


def _no_such_job(job_id: str) -> InvalidRequest:
    return InvalidRequest(f"teacher.job_id: there is no job {job_id!r}", field="teacher.job_id")
