"""Real pretrained models, whole, from POST /jobs to /predict: `make test-pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from services.cli.main import app
from tests.pretrained_models import ROOT, pretrained_model
from tests.system.conftest import running_platform
from tests.system.test_chain import predict, upload

pytestmark = [pytest.mark.system, pytest.mark.pretrained, pytest.mark.timeout(1800)]

COMMON: dict[str, Any] = {
    "training": {"max_steps": 12, "learning_rate": 3e-4, "batch_size": 16, "max_length": 32},
    "recipe": {"activation_checkpointing": False},
    "resources": {"ranks": "auto", "device": "cpu"},
}


@pytest.mark.parametrize("name", ["multilingual-e5-small", "smollm2-135m"])
def test_a_pretrained_teacher_is_distilled_into_some_of_its_layers_and_served(
    name: str, tmp_path: Path
) -> None:
    pretrained_model(name)
    with running_platform(tmp_path, models=ROOT) as platform:
        url = platform.url
        chain = {
            "kind": "chain",
            "teacher": {"dataset_id": upload(url), "model": {"path": name}, **COMMON},
            "distill": {
                "student": {"layers_of_teacher": 3, "trim_vocabulary": True},
                "gate": {"min_macro_f1_share": 0.9},
                "promote": "when_passed",
                **COMMON,
            },
        }
        (tmp_path / "chain.json").write_text(
            httpx.Request("POST", url, json=chain).content.decode()
        )
        command = [
            "jobs",
            "submit",
            str(tmp_path / "chain.json"),
            "--watch",
            "--json",
            "--url",
            url,
        ]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        student, teacher = httpx.get(f"{url}/models").json()["items"]
        assert teacher["metrics"]["heads"]["sentiment"]["accuracy"] > 0.9
        assert "against_teacher" in student["metrics"]["heads"]["sentiment"]
        assert student["gate"]["passed"], student["gate"]["message"]
        assert student["parameters"] < teacher["parameters"] / 4
        assert predict(url, "review 7: the room was dirty")["label"] == "negative"
