"""Checks a job before it is stored: its directories exist below the model roots, and its plan fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.api.settings import ApiSettings
from services.shared.jobs.errors import InvalidInput
from services.shared.jobs.paths import resolve_model
from services.shared.jobs.planning.spec_to_plan import JobPlan, Unplanned
from services.shared.jobs.spec import DistillSpec, Recipe, TeacherSpec

Plan = Callable[[TeacherSpec | DistillSpec, TeacherSpec | None], JobPlan | Unplanned]


@dataclass(frozen=True)
class Admitted:
    """What is stored with an admitted job."""

    plan: dict[str, Any] | None
    recipe: Recipe | None  # the one the planner chose if the spec says `auto`
    unplanned: Unplanned | None = None  # why there is no plan


class Admitter:
    """Checks the directories that a spec names, then plans its memory."""

    def __init__(self, settings: ApiSettings, *, plan: Plan) -> None:
        self._settings = settings
        self._plan = plan

    def __call__(
        self, spec: TeacherSpec | DistillSpec, *, teacher: TeacherSpec | None = None
    ) -> Admitted:
        """Return what to store with the job; `teacher` precedes it in a chain.

        Raises InvalidInput naming the field, and DoesNotFit with the plan.
        """
        for field, path in _paths(spec).items():
            model_directory(path, settings=self._settings, field=field)
        planned = self._plan(spec, teacher)
        if isinstance(planned, Unplanned):
            return Admitted(plan=None, recipe=None, unplanned=planned)
        return Admitted(plan=planned.plan, recipe=planned.recipe)


def _paths(spec: TeacherSpec | DistillSpec) -> dict[str, str]:
    if isinstance(spec, TeacherSpec):
        paths = {"model.path": spec.model.path}
    else:
        paths = {"teacher.path": spec.teacher.path, "student.path": spec.student.path}
    return {field: path for field, path in paths.items() if path is not None}


def model_directory(path: str, *, settings: ApiSettings, field: str) -> Path:
    """Return the directory that a spec names, below a model root and with safetensors weights.

    Raises InvalidInput naming the field.
    """
    try:
        directory = resolve_model(path, roots=settings.model_roots, field=field)
    except (OSError, RuntimeError) as error:  # name too long, symlink loop
        raise InvalidInput(f"{field}: not a valid directory path", field=field) from error
    _reject_escaping_links(directory, settings=settings, field=field)
    if not (directory / "config.json").is_file():
        raise InvalidInput(f"{field}: {path!r} has no config.json", field=field)
    if not any(directory.glob("*.safetensors")):
        raise InvalidInput(
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
            raise InvalidInput(message, field=field)
