"""`stillhouse plan`: options, JSON, tables, and errors that name the field."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from services.cli.commands.plan import plan

_APP = typer.Typer()
_APP.command()(plan)
_GOLDEN = (
    "--model Qwen/Qwen3-32B --ranks 8 --device-memory 65520MiB --host-memory 125GiB --fsdp 1 "
    "--heads 3,7 --optimizer-impl fused"
)


def _run(options: str, *, code: int = 0) -> Result:
    # Wide enough that no cell of a table is folded.
    result = CliRunner().invoke(_APP, options.split(), env={"COLUMNS": "250"})
    assert result.exit_code == code, result.output
    return result


def _json(options: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(_run(f"{options} --json").stdout)
    return document


def test_the_golden_case_does_not_fit_and_gets_alternatives() -> None:
    document = _json(_GOLDEN)
    assert document["verdict"] == "does_not_fit"
    assert document["peak_phase"] == "backward"
    assert document["peak_bytes"] / 2**30 == pytest.approx(63.56, abs=0.005)
    assert document["layer_unit_bytes"] == 975_196_672
    assert document["alternatives"][0]["changes"] == {"optimizer_in_backward": True}
    assert [entry["changes"]["offload"] for entry in document["refused"]] == ["optimizer", "all"]


def test_seven_ranks_take_more_than_eight() -> None:
    seven = _json(_GOLDEN.replace("--ranks 8", "--ranks 7"))
    assert seven["peak_bytes"] / 2**30 == pytest.approx(72.02, abs=0.005)


def test_a_plan_that_fits_needs_no_alternative() -> None:
    document = _json(f"{_GOLDEN} --parameters bfloat16")
    assert document["verdict"] == "fits"
    assert document["alternatives"] == []


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("--optimizer-in-backward", "optimizer_in_backward", True),
        ("--no-activation-checkpointing", "activation_checkpointing", False),
        ("--no-attention-mask", "attention_mask", False),
        ("--accumulate 4 --no-reduce-each", "reduce_each", False),
        ("--attention math", "attention", "math"),
        ("--prefetch pre", "prefetch", "pre"),
        ("--embedding own", "embedding", "own"),
        ("--wrap root", "wrap", "root"),
        ("--sharding grad_op", "sharding", "grad_op"),
        ("--optimizer adafactor", "optimizer", "adafactor"),
        ("--offload all", "offload", "all"),
        ("--loading rank0", "loading", "rank0"),
        ("--micro-batch 3", "micro_batch", 3),
        ("--fsdp 2", "engine", "fsdp2"),
        ("--reduce float32", "reduce", "float32"),
    ],
)
def test_every_flag_reaches_the_recipe(flags: str, field: str, value: Any) -> None:
    document = _json(f"--model qwen3-0.6b --ranks 2 {flags}")
    assert document["recipe"][field] == value


def test_a_reserve_lowers_the_budget() -> None:
    document = _json(f"{_GOLDEN} --reserve 2GiB")
    assert document["budget_bytes"] == 65520 * 2**20 - 2 * 2**30


def test_a_device_kind_determines_its_memory() -> None:
    document = _json("--model qwen3-8b --ranks 8 --device A100-80")
    assert document["device"] == "a100-80"
    assert document["device_memory_bytes"] > 79 * 2**30


def test_a_config_file_is_planned(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 256,
                "intermediate_size": 512,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 1000,
            }
        )
    )
    document = _json(f"--model {file} --ranks 1 --device cpu")
    assert document["num_parameters"] == 1000 * 256 + 256 + 2 * (
        2 * 256 * 256 + 2 * 128 * 256 + 3 * 256 * 512 + 2 * 256
    )


def test_a_teacher_is_planned_with_its_student() -> None:
    document = _json("--model qwen3-0.6b --teacher qwen3-32b --ranks 8")
    assert document["components"]["other_model"] / 2**30 == pytest.approx(7.45, abs=0.01)


def test_the_table_shows_bars_and_where_the_job_fails() -> None:
    text = _run(_GOLDEN).stdout
    assert "does not fit: peak 63.56 GiB a rank, budget 60.27 GiB" in text
    assert "59.37 GiB allocated, 930.02 MiB more requested (flat gradient of one layer)" in text
    assert "█" in text
    assert "apply the optimizer in backward" in text
    assert "Refused: optimizer state in host memory would take 485.5" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--model qwen3-0.6b --ranks 0", "ranks: 0; accepted: 1 to"),
        ("--model qwen3-0.6b --ranks -3", "ranks: -3"),
        ("--model qwen9-1b", "model: 'qwen9-1b' is neither a path nor a known model"),
        ("--model qwen3-0.6b --device-memory 64", "device_memory: '64' has no unit"),
        ("--model qwen3-0.6b --host-memory 5000000TB", "host_memory: .* out of range"),
        ("--model qwen3-0.6b --heads 3;7", "heads: '3;7'; accepted: classes per head"),
        ("--model qwen3-0.6b --micro-batch 0", "micro_batch: 0"),
        ("--model qwen3-0.6b --device abacus", "device: unknown kind 'abacus'"),
    ],
)
def test_invalid_input_is_rejected_by_the_name_of_its_field(options: str, words: str) -> None:
    result = _run(options, code=2)
    assert re.search(words, result.stderr), result.stderr


def test_an_error_in_json_names_field_and_accepted_values() -> None:
    result = _run("--model qwen3-0.6b --ranks 0 --json", code=2)
    error = json.loads(result.stdout)["error"]
    assert error["field"] == "ranks"
    assert error["accepted"].startswith("1 to")


def test_an_unknown_choice_is_rejected_with_the_known_ones() -> None:
    result = _run("--model qwen3-0.6b --optimizer lion", code=2)
    assert "adafactor" in result.stderr


def test_cards_needed_answers_with_devices_nodes_and_what_it_costs() -> None:
    output = _run("--model qwen3-32b --cards-needed --devices-per-node 4").stdout
    assert "qwen3-32b on 9 x k100_ai (3 nodes of 4)" in output
    assert "AdamW with 8-bit moments" in output


def test_the_largest_model_needs_no_model() -> None:
    result = _run("--largest-model --ranks 4 --heads 3,7 --json")
    documents = json.loads(result.stdout)
    sizes = [document["num_parameters"] for document in documents]
    assert sizes == sorted(sizes)
    assert documents[0]["lossless"]
    assert sizes[-1] > 30e9


def test_a_plan_without_a_model_says_so() -> None:
    assert "model" in _run("--ranks 4", code=2).output


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ("--model qwen3-32b --cards-needed --largest-model", "largest_model"),
        ("--model qwen3-0.6b --teacher qwen3-32b --cards-needed", "teacher"),
        ("--teacher qwen3-32b --largest-model", "teacher"),
    ],
)
def test_questions_that_have_no_answer_together_are_refused(options: str, field: str) -> None:
    assert field in _run(options, code=2).output
