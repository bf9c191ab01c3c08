"""A spec with everything that it refers to: made once when a job is admitted or claimed, then carried on.

The path of `POST /jobs`, in order: `spec` (validation), `db.references` (what the database knows),
`resolved_spec` (directories), `planning` (memory), `db.store` (the row). Admission, plan, claim and
post-mortem read the same `ResolvedSpec`; none of them looks a reference up again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.shared.datasets.card import Head, heads_difference
from services.shared.jobs.documents import JobPlanDict
from services.shared.jobs.errors import InvalidRequest
from services.shared.jobs.paths import resolve_model
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.spec import DistillSpec, ModelSource, Recipe, TeacherSpec


@dataclass(frozen=True)
class TeacherReference:
    """The stored teacher of a distillation; all None for a directory."""

    model_id: str | None = None  # registered already
    job_spec: TeacherSpec | DistillSpec | None = None  # of a teacher job that has no model yet
    heads: tuple[Head, ...] | None = None


@dataclass(frozen=True)
class References:
    """The stored resources that a spec refers to."""

    heads: tuple[Head, ...]  # that will be trained
    teacher: TeacherReference = TeacherReference()
    training_texts: int = 0  # at most: duplicates of unlabelled texts are left out


@dataclass(frozen=True)
class ResolvedTeacher:
    """The teacher of a distillation: a directory, or the spec of a job that has not ended yet."""

    directory: Path | None
    job_spec: TeacherSpec | DistillSpec | None = None
    base_dir: Path | None = None  # of the weights that the teacher job starts from


@dataclass(frozen=True)
class ResolvedSpec:
    """A spec, the heads it trains, and the directory of everything it names."""

    spec: TeacherSpec | DistillSpec
    heads: tuple[Head, ...]
    dataset_dir: Path
    unlabelled_dirs: tuple[Path, ...] = ()
    model_dir: Path | None = (
        None  # of the model that is trained, where it does not start from a config
    )
    teacher: ResolvedTeacher | None = None
    vocabulary_rows: int | None = None  # with `trim_vocabulary`, once they have been counted
    training_texts: int = 0

    @property
    def source(self) -> ModelSource:
        """Where the first weights of the model that is trained come from."""
        return self.spec.model if isinstance(self.spec, TeacherSpec) else self.spec.student

    @property
    def num_classes(self) -> tuple[int, ...]:
        """The number of labels of each head."""
        return tuple(len(head.labels) for head in self.heads)


@dataclass(frozen=True)
class Unplanned:
    """Why a job, which may train all the same, has no memory plan."""

    field: str  # of the spec: the model whose shape or activations are not known
    why: str


@dataclass(frozen=True)
class PlannedSpec:
    """What is stored with an admitted job. Without a plan `unplanned` says why."""

    resolved: ResolvedSpec
    plan: JobPlanDict | None = None
    recipe: Recipe | None = None  # the one that the planner chose where the spec says `auto`
    unplanned: Unplanned | None = None


def resolve_directories(
    spec: TeacherSpec | DistillSpec,
    references: References,
    *,
    settings: JobSettings,
    chained: ResolvedSpec | None = None,
) -> ResolvedSpec:
    """Return the spec with its directories.

    `chained` is the teacher of a chain, whose job is not stored yet. Raises InvalidRequest for a path
    that is not below a model root. Whether the directories of datasets and models exist is not
    checked.
    """
    unlabelled: tuple[Path, ...] = ()
    teacher = None
    if isinstance(spec, DistillSpec):
        unlabelled = tuple(map(settings.dataset_dir, spec.distillation.unlabelled_dataset_ids))
        teacher = _teacher(spec, references.teacher, settings=settings, chained=chained)
        model_dir = _model_dir(spec.student, settings, field="student")
    else:
        model_dir = _model_dir(spec.model, settings, field="model")
    return ResolvedSpec(
        spec=spec,
        heads=references.heads,
        dataset_dir=settings.dataset_dir(spec.dataset_id),
        unlabelled_dirs=unlabelled,
        model_dir=model_dir,
        teacher=teacher,
        training_texts=references.training_texts,
    )


def check_same_heads(student: Sequence[Head], teacher: Sequence[Head]) -> None:
    """Raise InvalidRequest with both lists unless the teacher has every head of the student."""
    difference = heads_difference(student, teacher)
    if difference is not None:
        raise InvalidRequest(f"heads: {difference}", field="heads")


def _teacher(
    spec: DistillSpec,
    reference: TeacherReference,
    *,
    settings: JobSettings,
    chained: ResolvedSpec | None,
) -> ResolvedTeacher:
    if chained is not None:
        return ResolvedTeacher(None, job_spec=chained.spec, base_dir=chained.model_dir)
    if spec.teacher.path is not None:
        roots = settings.model_roots
        return ResolvedTeacher(resolve_model(spec.teacher.path, roots=roots, field="teacher.path"))
    if reference.model_id is not None:
        return ResolvedTeacher(settings.model_dir(reference.model_id))
    base_dir = None
    if isinstance(reference.job_spec, TeacherSpec):
        base_dir = _model_dir(reference.job_spec.model, settings, field="teacher.job_id")
    return ResolvedTeacher(None, job_spec=reference.job_spec, base_dir=base_dir)


def _model_dir(source: ModelSource, settings: JobSettings, *, field: str) -> Path | None:
    if source.path is not None:
        return resolve_model(source.path, roots=settings.model_roots, field=f"{field}.path")
    if source.model_id is not None:
        return settings.model_dir(source.model_id)
    return None
