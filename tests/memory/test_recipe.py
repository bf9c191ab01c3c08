"""The recipe: its JSON, and the engine of a torch version."""

from __future__ import annotations

from dataclasses import fields

import pytest

from services.shared.memory.recipe import Engine, PlannedRecipeDict, Recipe


@pytest.mark.parametrize(
    ("version", "engine"),
    [
        ("2.5.1", Engine.FSDP1),
        ("2.5.1+das.opt1.dtk25041", Engine.FSDP1),
        ("2.6.0", Engine.FSDP2),
        ("2.13.0+cpu", Engine.FSDP2),
        ("3.0", Engine.FSDP2),
    ],
)
def test_fsdp2_is_used_from_torch_2_6_on(version: str, engine: Engine) -> None:
    assert Engine.of_torch(version) is engine


def test_the_json_of_a_recipe_has_the_fields_of_a_recipe() -> None:
    names = [field.name for field in fields(Recipe)]
    assert list(PlannedRecipeDict.__annotations__) == names
    assert list(Recipe().to_dict()) == names
