"""Looks at a job before it is stored: do its directories exist, are they ours, does it fit?"""

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
    """What is stored with a job that may run."""

    plan: dict[str, Any] | None
    recipe: Recipe | None  # the one select_heads where the spec says `auto`
    unplanned: Unplanned | None = None  # why there is no plan


class Admitter:
    """Checks what a spec names on this server's disk, then plans it."""

    def __init__(self, settings: ApiSettings, *, plan: Plan) -> None:
        self._settings = settings
        self._plan = plan

    def __call__(
        self, spec: TeacherSpec | DistillSpec, *, teacher: TeacherSpec | None = None
    ) -> Admitted:
        """Return what is to be stored with the job; `teacher` is what comes before it in a chain.

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
        named = {"model.path": spec.model.path}
    else:
        named = {"teacher.path": spec.teacher.path, "student.path": spec.student.path}
    return {field: path for field, path in named.items() if path is not None}


def model_directory(path: str, *, settings: ApiSettings, field: str) -> Path:
    """Return the directory that a spec names, below a model root and with weights we read.

    Raises InvalidInput naming the field.
    """
    try:
        directory = resolve_model(path, roots=settings.model_roots, field=field)
    except (OSError, RuntimeError) as error:  # a name too long, links in a circle
        raise InvalidInput(f"{field}: this is no path of a directory", field=field) from error
    _refuse_links_out(directory, settings=settings, field=field)
    if not (directory / "config.json").is_file():
        raise InvalidInput(f"{field}: {path!r} has no config.json", field=field)
    if not any(directory.glob("*.safetensors")):
        raise InvalidInput(
            f"{field}: {path!r} has no *.safetensors; nothing else is read, and never a pickle",
            field=field,
        )
    return directory


def _refuse_links_out(directory: Path, *, settings: ApiSettings, field: str) -> None:
    roots = [root.resolve() for root in settings.model_roots]
    for path in directory.iterdir():
        try:
            stays = any(path.resolve().is_relative_to(root) for root in roots)
        except (OSError, RuntimeError):  # links in a circle
            stays = False
        if not stays:
            message = f"{field}: {path.name[:100]!r} is a link that leads out of the model roots"
            raise InvalidInput(message, field=field)
