"""`stillhouse trace`: the options of `plan`, tables, JSON, and errors that name the field."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from services.cli.commands.trace import trace

_APP = typer.Typer()
_APP.command()(trace)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    file.write_text(json.dumps({"model_type": "llama", "vocab_size": 500} | sizes | heads))
    return file


def _run(options: str, *, code: int = 0) -> Result:
    result = CliRunner().invoke(_APP, options.split(), env={"COLUMNS": "250"})
    assert result.exit_code == code, result.output
    return result


def test_each_phase_is_printed_with_its_planned_peak(model: Path) -> None:
    text = _run(f"--model {model} --ranks 2 --sequence-length 64").stdout
    assert "dry run of the training step with fsdp2" in text or "with fsdp1" in text
    for phase in ("wrap", "forward", "backward", "optimizer_step", "evaluation"):
        assert phase in text
    assert "Largest at the peak" in text


def test_an_error_in_json_names_the_field() -> None:
    result = _run("--model qwen3-0.6b --ranks 2 --offload all --json", code=2)
    assert json.loads(result.stdout)["error"]["field"] == "offload"


def test_a_failing_run_prints_why(model: Path) -> None:
    options = "--ranks 2 --fsdp 1 --optimizer adafactor --optimizer-in-backward"
    result = _run(f"--model {model} {options}", code=1)
    assert "adafactor cannot be applied in the backward pass under FSDP1" in result.stderr
