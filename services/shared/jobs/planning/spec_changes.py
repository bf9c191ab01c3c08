"""Changes of a spec that a retry requests or a remedy proposes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pydantic import ValidationError

from services.shared.jobs.documents import RecipeFields
from services.shared.jobs.errors import InvalidRequest
from services.shared.jobs.spec import DistillSpec, Recipe, TeacherSpec, job_spec
from services.shared.memory.planning.recipe_changes import TEACHER_PLACEMENT


class ChangedSpec(NamedTuple):
    """A spec after changes, and the recipe that it will run with."""

    spec: TeacherSpec | DistillSpec
    recipe: Recipe


def change_spec(
    spec: TeacherSpec | DistillSpec,
    *,
    recipe: RecipeFields,
    recipe_changes: RecipeFields,
    training_changes: Mapping[str, object],
) -> ChangedSpec:
    """Return the spec with changes applied to `recipe` (the one last used) and to its training.

    `recipe_changes` may hold a distillation's `teacher_placement`, as remedies do. Raises
    InvalidRequest naming the field that does not exist or has no such value.
    """
    document = spec.model_dump(mode="json")
    placement, own = split_changes(recipe_changes)
    if placement is not None:
        if not isinstance(spec, DistillSpec):
            raise InvalidRequest(
                f"{TEACHER_PLACEMENT}: only a distillation has a teacher", field=TEACHER_PLACEMENT
            )
        document["distillation"][TEACHER_PLACEMENT] = placement
    if own:
        document["recipe"] = recipe | own
    document["training"] = {**document["training"], **training_changes}
    try:
        return ChangedSpec(job_spec.validate_python(document), Recipe.model_validate(recipe | own))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:] if part != "Recipe")
        raise InvalidRequest(f"{field}: {first['msg']}", field=field) from error


def split_changes(changes: RecipeFields) -> tuple[str | None, RecipeFields]:
    """Return the placement of the teacher (None: unchanged), and the changed fields of the recipe."""
    own = {name: value for name, value in changes.items() if name != TEACHER_PLACEMENT}
    placement = changes.get(TEACHER_PLACEMENT)
    return None if placement is None else str(placement), own
