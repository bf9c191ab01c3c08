"""Changes of a spec that a retry asks for, or that a remedy proposes."""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import ValidationError

from services.shared.jobs.errors import InvalidInput
from services.shared.jobs.spec import DistillSpec, Recipe, TeacherSpec, job_spec
from services.shared.memory.planning.alternatives import TEACHER_PLACEMENT


class ChangedSpec(NamedTuple):
    """A spec after changes, and the recipe that it will run with."""

    spec: TeacherSpec | DistillSpec
    recipe: Recipe


def change_spec(
    spec: TeacherSpec | DistillSpec,
    *,
    recipe: dict[str, Any],
    recipe_changes: dict[str, Any],
    training_changes: dict[str, Any],
) -> ChangedSpec:
    """Return the spec with changes applied to `recipe` (the one last used) and to its training.

    `recipe_changes` may hold a distillation's `teacher_placement`, as remedies do. Raises
    InvalidInput naming the field that does not exist or has no such value.
    """
    document = spec.model_dump(mode="json")
    placement, own = split_changes(recipe_changes)
    if placement is not None:
        if not isinstance(spec, DistillSpec):
            raise InvalidInput(
                f"{TEACHER_PLACEMENT}: only a distillation has a teacher", field=TEACHER_PLACEMENT
            )
        document["distillation"][TEACHER_PLACEMENT] = placement
    if own:
        document["recipe"] = recipe | own
    document["training"] = document["training"] | training_changes
    try:
        return ChangedSpec(job_spec.validate_python(document), Recipe.model_validate(recipe | own))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:] if part != "Recipe")
        raise InvalidInput(f"{field}: {first['msg']}", field=field) from error


def split_changes(changes: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return where a change places the teacher (None: unchanged), and the fields of the recipe."""
    own = {name: value for name, value in changes.items() if name != TEACHER_PLACEMENT}
    return changes.get(TEACHER_PLACEMENT), own
