"""Makes a worker's claim from the row of a job and its references."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sqlalchemy.orm import Session

from services.shared.jobs.db.attempt_queries import ClaimedRow
from services.shared.jobs.db.references import load_references
from services.shared.jobs.errors import InvalidRequest
from services.shared.jobs.ids import model_id_of
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.paths import latest_checkpoints
from services.shared.jobs.resolved_spec import References, ResolvedSpec, resolve_directories
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.spec import job_spec
from services.shared.jobs.state import Reason
from services.shared.jobs.views import Claim


def claimed_references(session: Session, claimed: ClaimedRow) -> References | InvalidRequest:
    """Return what the claimed job refers to, or the error of a reference that no longer exists."""
    try:
        return load_references(session, job_spec.validate_python(claimed.job.spec))
    except InvalidRequest as error:
        return error


def make_claim(
    claimed: ClaimedRow, references: References | InvalidRequest, *, settings: JobSettings
) -> Claim:
    """Return the claim; a directory that no longer exists becomes its `problem`."""
    job = claimed.job
    assert job.token is not None
    spec = job_spec.validate_python(job.spec)
    resolved = None
    try:
        if isinstance(references, InvalidRequest):
            raise references
        resolved = resolve_directories(spec, references, settings=settings)
        problem = _missing(resolved)
    except InvalidRequest as error:
        problem = Outcome(end=End.FAILED, reason=Reason.BAD_MODEL, message=str(error))
    return Claim(
        job_id=job.id,
        attempt=job.attempt,
        token=job.token,
        spec=spec,
        recipe=job.recipe,
        plan=job.plan,
        model_id=model_id_of(job.id, job.attempt),
        resolved=resolved,
        resume_dir=latest_checkpoints(settings, claimed.earlier),
        problem=problem,
    )


def _missing(resolved: ResolvedSpec) -> Outcome | None:
    teacher_dir = resolved.teacher.directory if resolved.teacher else None
    return _absent([resolved.dataset_dir, *resolved.unlabelled_dirs], Reason.BAD_DATA) or _absent(
        [resolved.model_dir, teacher_dir], Reason.BAD_MODEL
    )


def _absent(directories: Sequence[Path | None], reason: Reason) -> Outcome | None:
    for directory in directories:
        if directory is not None and not directory.is_dir():
            message = f"{directory} no longer exists."
            return Outcome(end=End.FAILED, reason=reason, message=message)
    return None
