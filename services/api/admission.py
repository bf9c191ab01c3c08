"""Checks a job before it is stored: its directories exist below the model roots, and its plan fits."""

from __future__ import annotations

from pathlib import Path

from services.api.settings import ApiSettings
from services.shared.jobs.db.store import Store
from services.shared.jobs.errors import InvalidRequest
from services.shared.jobs.paths import resolve_model
from services.shared.jobs.planning.calculations import PlanRequest, answer_plan, planned_spec
from services.shared.jobs.planning.model_shapes import read_heads
from services.shared.jobs.projects import DEFAULT_PROJECT, Access
from services.shared.jobs.resolved_spec import PlannedSpec, ResolvedSpec, check_same_heads
from services.shared.jobs.spec import DistillSpec, TeacherSpec
from services.shared.jobs.supply.check import ModelSupply
from services.shared.sandbox.sandbox import Sandbox


class Admission:
    """What happens to a spec before a job is stored: its references are resolved, its memory planned."""

    def __init__(self, store: Store, settings: ApiSettings, calculations: Sandbox) -> None:
        self._store = store
        self._settings = settings
        self._calculations = calculations
        self._supply = ModelSupply(calculations)

    def resolve(
        self,
        spec: TeacherSpec | DistillSpec,
        *,
        project: str = DEFAULT_PROJECT,
        chained: ResolvedSpec | None = None,
    ) -> ResolvedSpec:
        """Return the spec with everything it refers to in `project`; `chained` is its teacher in a chain.

        Raises InvalidRequest naming the field.
        """
        for field, directory in named_directories(spec, settings=self._settings).items():
            if refusal := self._supply.refusal(directory):
                raise InvalidRequest(f"{field}: {refusal}", field=field)
        resolved = self._store.within(Access(project=project)).resolve(spec, chained=chained)
        _check_teacher_heads(resolved)
        return resolved

    def plan(self, resolved: ResolvedSpec) -> PlannedSpec:
        """Return what to store with the job, calculated in a sandbox.

        Raises InvalidRequest, DoesNotFit with the plan, and SandboxError.
        """
        settings = self._settings
        request = PlanRequest(
            resolved,
            host_memory=settings.host_memory,
            engine=settings.engine,
            processors_dir=settings.processors_dir,
        )
        return planned_spec(resolved, self._calculations.run(answer_plan, request))


def named_directories(spec: TeacherSpec | DistillSpec, *, settings: ApiSettings) -> dict[str, Path]:
    """Return the model directories that a spec names, by field. Raises InvalidRequest naming the field."""
    return {
        field: model_directory(path, settings=settings, field=field)
        for field, path in _paths(spec).items()
    }


def _check_teacher_heads(resolved: ResolvedSpec) -> None:
    """Compare the heads of a teacher in a directory; the database knows those of all others."""
    if not isinstance(resolved.spec, DistillSpec) or resolved.spec.teacher.path is None:
        return
    assert resolved.teacher is not None
    assert resolved.teacher.directory is not None
    heads = read_heads(resolved.teacher.directory, resolved.heads)
    if heads is not None:
        check_same_heads(resolved.heads, heads)


def _paths(spec: TeacherSpec | DistillSpec) -> dict[str, str]:
    if isinstance(spec, TeacherSpec):
        paths = {"model.path": spec.model.path}
    else:
        paths = {"teacher.path": spec.teacher.path, "student.path": spec.student.path}
    return {field: path for field, path in paths.items() if path is not None}


def model_directory(path: str, *, settings: ApiSettings, field: str) -> Path:
    """Return the directory that a spec names, below a model root and with safetensors weights.

    Raises InvalidRequest naming the field.
    """
    try:
        directory = resolve_model(path, roots=settings.model_roots, field=field)
    except (OSError, RuntimeError) as error:  # name too long, symlink loop
        raise InvalidRequest(f"{field}: not a valid directory path", field=field) from error
    _reject_escaping_links(directory, settings=settings, field=field)
    if not (directory / "config.json").is_file():
        raise InvalidRequest(f"{field}: {path!r} has no config.json", field=field)
    if not any(directory.glob("*.safetensors")):
        raise InvalidRequest(
            f"{field}: {path!r} has no *.safetensors files; other weight formats are not supported",
            field=field,
        )
    return directory


def _reject_escaping_links(directory: Path, *, settings: ApiSettings, field: str) -> None:
    roots = [root.resolve() for root in settings.model_roots]
    for path in directory.iterdir():
        try:
            inside = any(path.resolve().is_relative_to(root) for root in roots)
        except (OSError, RuntimeError):  # symlink loop
            inside = False
        if not inside:
            message = (
                f"{field}: {path.name[:100]!r} is a symlink that leads outside the model roots"
            )
            raise InvalidRequest(message, field=field)
