"""From what the database knows of a claimed job to what its worker needs: every reference a path."""

from __future__ import annotations

from pathlib import Path

from services.shared.jobs.db.attempt_queries import ClaimedRow
from services.shared.jobs.errors import InvalidInput
from services.shared.jobs.ids import model_id_of
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.paths import latest_checkpoints, resolve_model
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.spec import DistillSpec, ModelSource, TeacherSpec, job_spec
from services.shared.jobs.state import Reason
from services.shared.jobs.views import Claim


def make_claim(taken: ClaimedRow, *, settings: JobSettings) -> Claim:
    """Return the claim; what is not on disk any more becomes its `problem`."""
    job = taken.job
    assert job.token is not None
    spec = job_spec.validate_python(job.spec)
    dataset_dir = settings.dataset_dir(job.dataset_id)
    unlabelled_dirs = _unlabelled_dirs(spec, settings)
    model_dir = teacher_dir = None
    problem = _missing([dataset_dir, *unlabelled_dirs], Reason.BAD_DATA)
    try:
        model_dir = _model_dir(spec, settings)
        teacher_dir = _teacher_dir(spec, job.teacher_model_id, settings)
        problem = problem or _missing([model_dir, teacher_dir], Reason.BAD_MODEL)
    except InvalidInput as error:
        problem = Outcome(end=End.FAILED, reason=Reason.BAD_MODEL, message=str(error))
    return Claim(
        job_id=job.id,
        attempt=job.attempt,
        token=job.token,
        spec=spec,
        recipe=job.recipe,
        plan=job.plan,
        model_id=model_id_of(job.id, job.attempt),
        dataset_dir=dataset_dir,
        unlabelled_dirs=unlabelled_dirs,
        model_dir=model_dir,
        teacher_dir=teacher_dir,
        resume_dir=latest_checkpoints(settings, taken.earlier),
        problem=problem,
    )


def _unlabelled_dirs(spec: TeacherSpec | DistillSpec, settings: JobSettings) -> list[Path]:
    if isinstance(spec, TeacherSpec):
        return []
    return [settings.dataset_dir(id) for id in spec.distillation.unlabelled_dataset_ids]


def _model_dir(spec: TeacherSpec | DistillSpec, settings: JobSettings) -> Path | None:
    if isinstance(spec, TeacherSpec):
        return _source_dir(spec.model, settings, field="model.path")
    return _source_dir(spec.student, settings, field="student.path")


def _source_dir(source: ModelSource, settings: JobSettings, *, field: str) -> Path | None:
    if source.model_id is not None:
        return settings.model_dir(source.model_id)
    if source.path is not None:
        return resolve_model(source.path, roots=settings.model_roots, field=field)
    return None


def _teacher_dir(
    spec: TeacherSpec | DistillSpec, teacher_model_id: str | None, settings: JobSettings
) -> Path | None:
    if teacher_model_id is not None:
        return settings.model_dir(teacher_model_id)
    if isinstance(spec, DistillSpec) and spec.teacher.path is not None:
        return resolve_model(spec.teacher.path, roots=settings.model_roots, field="teacher.path")
    return None


def _missing(directories: list[Path | None], reason: Reason) -> Outcome | None:
    for directory in directories:
        if directory is not None and not directory.is_dir():
            message = f"{directory} is no longer there."
            return Outcome(end=End.FAILED, reason=reason, message=message)
    return None
