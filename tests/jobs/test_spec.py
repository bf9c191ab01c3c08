"""What a spec takes for a number."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from services.shared.jobs.spec import job_spec

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
def test_true_is_no_number(place: str, value: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        job_spec.validate_python(DISTILL | {place: value})
    first = refused.value.errors()[0]
    assert first["loc"][1] == place
    assert first["msg"] == "Value error, true and false are no numbers"


def test_numbers_and_switches_are_taken() -> None:
    changes = {
        "training": {"learning_rate": 1, "batch_size": 16.0},
        "recipe": {"optimizer_in_backward": True},
    }
    spec = job_spec.validate_python(DISTILL | changes)
    assert (spec.training.learning_rate, spec.training.batch_size) == (1.0, 16)
