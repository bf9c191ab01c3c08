"""What a recipe derives from its surroundings."""

from __future__ import annotations

import pytest

from services.shared.memory.recipe import Engine


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
