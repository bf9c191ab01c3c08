"""What a spec takes for a number."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from pydantic import ValidationError

from services.shared.jobs.spec import DistillSpec, Recipe, job_spec
from services.shared.memory.recipe import Recipe as MemoryRecipe

DISTILL = {
    "kind": "distill",
    "dataset_id": "ds_1",
    "teacher": {"path": "teacher"},
    "student": {"path": "student"},
}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("max_attempts", True),
        ("training", {"learning_rate": True}),
        ("training", {"max_steps": True}),
        ("recipe", {"micro_batch_tokens": True}),
        ("resources", {"visible_devices": [True, 2]}),
        ("distillation", {"temperature": True}),
        ("distillation", {"head_weights": {"sentiment": False}}),
        ("distillation", {"soft_weight_final": False}),
        ("gate", {"min_macro_f1_share": False}),
    ],
)
def test_a_boolean_is_refused_as_a_number(place: str, value: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        job_spec.validate_python(DISTILL | {place: value})
    first = refused.value.errors()[0]
    assert first["loc"][1] == place
    assert first["msg"] == "Value error, true and false are no numbers"


def test_numbers_and_booleans_are_accepted() -> None:
    changes = {
        "training": {"learning_rate": 1, "batch_size": 16.0},
        "recipe": {"optimizer_in_backward": True},
    }
    spec = job_spec.validate_python(DISTILL | changes)
    assert (spec.training.learning_rate, spec.training.batch_size) == (1.0, 16)


def _literals() -> list[tuple[str, type[Enum], str]]:
    """Return each value that a spec allows for a field which the memory plan has an enum for."""
    hints = get_type_hints(MemoryRecipe)
    return [
        (name, hints[name], value)
        for name, field in Recipe.model_fields.items()
        if get_origin(field.annotation) is Literal
        for value in get_args(field.annotation)
    ]


# Decided before a plan is made.
OPEN = {"compute": ["auto"], "reduce": ["auto"]}


@pytest.mark.parametrize(("name", "kind", "value"), _literals())
def test_a_recipe_allows_only_values_of_the_memory_plan(
    name: str, kind: type[Enum], value: str
) -> None:
    assert value in {*(member.value for member in kind), *OPEN.get(name, ())}, name


@pytest.mark.parametrize("layers", [3, [0, 5, 11]])
def test_a_student_of_its_teachers_layers_has_its_tokenizer(layers: int | list[int]) -> None:
    spec = job_spec.validate_python(DISTILL | {"student": {"layers_of_teacher": layers}})
    assert isinstance(spec, DistillSpec)
    assert (spec.student.layers_of_teacher, spec.student.tokenizer) == (layers, "teacher")
    assert job_spec.validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("student", "problem"),
    [
        ({"layers_of_teacher": 3, "tokenizer": "own"}, "which may be left out"),
        ({"layers_of_teacher": 0}, "greater than or equal to 1"),
        ({"layers_of_teacher": True}, "true and false are no numbers"),
        ({"layers_of_teacher": []}, "at least 1 item"),
        ({"layers_of_teacher": [3, 3]}, "each layer once, in ascending order"),
        ({"layers_of_teacher": [5, 3]}, "each layer once, in ascending order"),
        ({"layers_of_teacher": [-1]}, "greater than or equal to 0"),
    ],
)
def test_other_layers_of_the_teacher_are_refused(student: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        job_spec.validate_python(DISTILL | {"student": student})
