"""Plans a job with what this server knows: its dataset's heads, its models, its machine."""

from __future__ import annotations

from pathlib import Path

import structlog
from pydantic import BaseModel

from services.shared.datasets.card import DatasetCard, Head
from services.shared.jobs.db.references import check_same_heads
from services.shared.jobs.db.store import Store
from services.shared.jobs.errors import Conflict, InvalidInput, NotFound
from services.shared.jobs.paths import resolve_model
from services.shared.jobs.planning.model_shapes import (
    Teacher,
    read_heads,
    read_teacher,
    shape_of,
    student_shape,
)
from services.shared.jobs.planning.spec_to_plan import (
    JobPlan,
    Unplanned,
    engine_of,
    machine_of,
    plan_job,
)
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.spec import DistillSpec, ModelSource, TeacherSpec
from services.shared.memory import errors as memory_errors
from services.shared.memory.architecture.shape import Shape
from services.shared.memory.planning.alternatives import TEACHER_PLACEMENT
from services.shared.memory.planning.layers import check_planned

log = structlog.get_logger(__name__)


class Planner:
    """Finds the shapes that a spec names and plans them."""

    def __init__(self, store: Store, settings: JobSettings) -> None:
        self._store = store
        self._settings = settings

    def __call__(
        self, spec: TeacherSpec | DistillSpec, chained: TeacherSpec | None = None
    ) -> JobPlan | Unplanned:
        """Return the plan; Unplanned for a model whose activations nobody has worked out.

        `chained` is the teacher of a distillation whose teacher job is not stored yet. Raises
        DoesNotFit with the plan, and InvalidInput naming the field.
        """
        heads = self._heads(spec)
        classes = [len(head.labels) for head in heads]
        if isinstance(spec, DistillSpec) and spec.teacher.path is not None:
            self._check_heads(spec.teacher.path, heads)
        teacher, source, part = None, _source(spec), "model"
        try:
            if isinstance(spec, DistillSpec):
                part = "teacher"
                teacher = self._teacher(spec, chained, classes)
                check_planned(teacher.shape.dims)
                part = "student"
            model = self._model(source, teacher, classes, field=part)
            check_planned(model.dims)
        except memory_errors.InvalidInput as error:
            # An architecture that the plan does not know may still train; nobody can say how large.
            log.info("job_not_planned", part=part, why=str(error))
            named: BaseModel = source
            if isinstance(spec, DistillSpec) and part == "teacher":
                named = spec.teacher if chained is None else chained.model
            return Unplanned(_given(named, part), str(error))
        try:
            return plan_job(
                spec,
                model=model,
                teacher=teacher,
                machine=machine_of(spec, self._settings),
                engine=engine_of(self._settings),
            )
        except memory_errors.InvalidInput as error:
            raise InvalidInput(str(error), field=_spec_field(error.field)) from error

    def _heads(self, spec: TeacherSpec | DistillSpec) -> list[Head]:
        """Return the heads that will be trained."""
        try:
            card: DatasetCard = self._store.dataset(spec.dataset_id)
        except NotFound as error:
            raise InvalidInput(
                f"dataset_id: there is no dataset {spec.dataset_id!r}", field="dataset_id"
            ) from error
        return [head for head in card.heads if spec.heads is None or head.name in spec.heads]

    def _check_heads(self, path: str, student: list[Head]) -> None:
        teacher = read_heads(self._below_roots(path, field="teacher.path"), student)
        if teacher is not None:
            check_same_heads(student, teacher)

    def _model(
        self, source: ModelSource, teacher: Teacher | None, classes: list[int], *, field: str
    ) -> Shape:
        directory = self._directory(source, field=field)
        if teacher is None:
            return shape_of(source, directory=directory, classes=classes)
        return student_shape(source, directory=directory, classes=classes, teacher=teacher.shape)

    def _teacher(
        self, spec: DistillSpec, chained: TeacherSpec | None, classes: list[int]
    ) -> Teacher:
        if chained is not None:
            return Teacher(self._model(chained.model, None, classes, field="teacher"))
        named = spec.teacher
        if named.path is not None:
            directory = self._below_roots(named.path, field="teacher.path")
            return read_teacher(directory, classes=classes)
        if named.model_id is not None:
            return self._registered(named.model_id, classes, field="teacher.model_id")
        assert named.job_id is not None
        try:
            job = self._store.job(named.job_id)
        except NotFound as error:
            raise InvalidInput(
                f"teacher.job_id: there is no job {named.job_id!r}", field="teacher.job_id"
            ) from error
        if job.model_id is not None:
            return self._registered(job.model_id, classes, field="teacher.job_id")
        if not isinstance(job.spec, TeacherSpec):
            raise InvalidInput(
                f"teacher.job_id: job {job.id} distils a student that does not exist yet",
                field="teacher.job_id",
            )
        return Teacher(self._model(job.spec.model, None, classes, field="teacher.job_id"))

    def _registered(self, model_id: str, classes: list[int], *, field: str) -> Teacher:
        return read_teacher(self._artifact(model_id, field=field), classes=classes)

    def _artifact(self, model_id: str, *, field: str) -> Path:
        # Through the registry, because an id from outside may as well be `../../etc`.
        try:
            return self._store.model(model_id).path
        except (NotFound, Conflict) as error:
            raise InvalidInput(f"{field}: there is no model {model_id!r}", field=field) from error

    def _directory(self, source: ModelSource, *, field: str) -> Path | None:
        if source.path is not None:
            return self._below_roots(source.path, field=f"{field}.path")
        if source.model_id is not None:
            return self._artifact(source.model_id, field=f"{field}.model_id")
        return None

    def _below_roots(self, path: str, *, field: str) -> Path:
        return resolve_model(path, roots=self._settings.model_roots, field=field)


def _source(spec: TeacherSpec | DistillSpec) -> ModelSource:
    return spec.model if isinstance(spec, TeacherSpec) else spec.student


def _given(source: BaseModel, part: str) -> str:
    """Return where a spec says which model it means, `student.config` for example."""
    given = source.model_dump(exclude_none=True, exclude={"tokenizer"})
    return f"{part}.{next(iter(given))}"


def _spec_field(field: str) -> str:
    """Return where a spec says what the memory plan objects to."""
    if field in ("ranks", "device", "device_memory", "host_memory"):
        return f"resources.{field}"
    if field == TEACHER_PLACEMENT:
        return f"distillation.{field}"
    return f"recipe.{field}" if not field.startswith("model") else field
