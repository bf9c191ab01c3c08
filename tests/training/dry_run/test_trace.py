"""The memory of a training step: planned, counted in a dry run, counted in a real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from services.cli.commands.trace import Row, compare, prepare
from services.cli.plan_request import PlanRequest
from services.shared.memory.architecture.shape import from_config
from services.shared.memory.hardware import machine
from services.shared.memory.planning.frozen_teacher import FrozenTeacher, Placement
from services.shared.memory.planning.ledger import PlanPhase
from services.shared.memory.planning.plan import Plan
from services.shared.memory.recipe import Engine, Recipe
from services.shared.training.dry_run.trace import main
from services.shared.training.sharding.shard import default_engine

REPOSITORY = Path(__file__).parents[3]
needs_dry_runs = pytest.mark.skipif(
    default_engine() is Engine.FSDP1, reason="torch has no dry runs before 2.6"
)
DECODER = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "pad_token_id": 0,
}
ENCODER = {
    "model_type": "bert",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
}
BY_MEAN = ENCODER | {"classifier_pooling": "mean"}
MODERNBERT = BY_MEAN | {"model_type": "modernbert", "intermediate_size": 192, "pad_token_id": 0}
TEACHER = DECODER | {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
OWN: dict[str, Any] = {"embedding": "own"}
WHOLE: dict[str, Any] = {"teacher": TEACHER, "placement": Placement.REPLICATED}
IN_BACKWARD = OWN | {"optimizer_in_backward": True}
# The batch, which the loop still names in the optimizer step, and scalars of a block each.
NOT_PLANNED_BYTES = 20_480
CASES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "plain": (DECODER, 2, {}),
    "optimizer in backward": (DECODER, 8, IN_BACKWARD),
    "bf16 states": (DECODER, 2, OWN | {"optimizer": "adamw_bf16"}),
    "bf16 states in backward": (DECODER, 8, IN_BACKWARD | {"optimizer": "adamw_bf16"}),
    "8-bit moments": (DECODER, 2, OWN | {"optimizer": "adamw_8bit"}),
    "8-bit moments in backward": (DECODER, 8, IN_BACKWARD | {"optimizer": "adamw_8bit"}),
    "split master": (DECODER, 2, OWN | {"optimizer": "adamw_split"}),
    "split master in backward": (DECODER, 8, IN_BACKWARD | {"optimizer": "adamw_split"}),
    "split 24-bit master in backward": (DECODER, 8, IN_BACKWARD | {"optimizer": "adamw_split24"}),
    "adafactor": (DECODER, 2, OWN | {"optimizer": "adafactor"}),
    "accumulation": (DECODER, 8, OWN | {"accumulate": 3}),
    "accumulation in backward": (DECODER, 2, IN_BACKWARD | {"accumulate": 2}),
    "sgd foreach": (DECODER, 2, {"optimizer": "sgd", "optimizer_impl": "foreach"}),
    "foreach": (DECODER, 2, {"optimizer_impl": "foreach"}),
    "no checkpointing": (DECODER, 8, {"activation_checkpointing": False, "micro_batch": 4}),
    "eager": (DECODER, 8, OWN | {"attention": "eager", "micro_batch": 2}),
    "one unit": (DECODER, 2, {"wrap": "root"}),
    "float32": (DECODER, 8, OWN | {"compute": "float32", "reduce": "float32"}),
    "kept whole": (DECODER, 8, {"sharding": "grad_op"}),
    "kept whole, embedding too": (DECODER, 8, OWN | {"sharding": "grad_op"}),
    "replicas": (DECODER, 8, {"sharding": "none"}),
    "encoder": (ENCODER, 2, OWN | {"micro_batch": 4}),
    "encoder by mean": (BY_MEAN, 2, OWN | {"micro_batch": 4}),
    "encoder by mean, no checkpointing": (
        BY_MEAN,
        2,
        {"activation_checkpointing": False, "micro_batch": 4},
    ),
    "modernbert by mean": (MODERNBERT, 2, OWN | {"micro_batch": 4}),
    "decoder by mean": (DECODER | {"classifier_pooling": "mean"}, 2, OWN),
    "fsdp1 in backward": (DECODER, 8, IN_BACKWARD | {"engine": "fsdp1"}),
    "distillation": (DECODER, 8, OWN | {"teacher": TEACHER}),
    "distillation of an encoder": (ENCODER, 2, OWN | {"micro_batch": 4, "teacher": TEACHER}),
    "distillation, the teacher whole": (DECODER, 8, OWN | WHOLE),
    "distillation of replicas, the teacher whole": (DECODER, 2, OWN | {"sharding": "none"} | WHOLE),
    "distillation in smaller micro-batches": (DECODER, 2, OWN | {"accumulate": 2} | WHOLE),
    "distillation of one unit": (DECODER, 2, {"wrap": "root", "teacher": TEACHER}),
}


def request_of(
    directory: Path, config: dict[str, Any], ranks: int, recipe: dict[str, Any]
) -> PlanRequest:
    """Return what the command line would have read; the models lie in `directory`."""
    knobs = {"sequence_length": 256} | recipe
    teacher = knobs.pop("teacher", None)
    placement = knobs.pop("placement", Placement.SHARDED)
    paths = {}
    for name, mapping in (("model", config), ("teacher", teacher)):
        if mapping is not None:
            paths[name] = directory / f"{name}.json"
            paths[name].write_text(json.dumps(mapping), encoding="utf-8")
    return PlanRequest(
        model=str(paths["model"]),
        shape=from_config(config, heads=(3, 7)),
        recipe=Recipe(**knobs),
        hardware=machine("cpu", ranks=ranks),
        teacher_model=str(paths["teacher"]) if teacher else None,
        teacher=FrozenTeacher(from_config(teacher, heads=(3, 7)), placement) if teacher else None,
    )


REAL: dict[str, dict[str, Any]] = {
    "adamw": OWN,
    "bf16 states in backward": IN_BACKWARD | {"optimizer": "adamw_bf16"},
    "distillation": OWN | {"teacher": TEACHER},
    "distillation, the teacher whole": OWN | WHOLE,
}
# What a DCU trains with: these run on torch 2.5 too.
FSDP1: dict[str, dict[str, Any]] = {
    "adamw": OWN,
    "in backward": IN_BACKWARD,
    "bf16 states in backward": IN_BACKWARD | {"optimizer": "adamw_bf16"},
    "accumulation": OWN | {"accumulate": 2},
    "kept whole": OWN | {"sharding": "grad_op"},
    "distillation": OWN | {"teacher": TEACHER},
}
ON_TWO_RANKS = {"attention": "eager", "micro_batch": 2, "sequence_length": 64}


class TracedCase(NamedTuple):
    """A request file, and the plan of the same run."""

    file: Path
    planned: Plan


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TracedCase]:
    """Return the requests: CASES by name, REAL by "real " and its name, FSDP1 by "ranks "."""
    real = {f"real {name}": ON_TWO_RANKS | knobs for name, knobs in REAL.items()}
    fsdp1 = {
        f"ranks {name}": ON_TWO_RANKS | knobs | {"engine": "fsdp1"} for name, knobs in FSDP1.items()
    }
    on_two_ranks = {name: (DECODER, 2, knobs) for name, knobs in (real | fsdp1).items()}
    found = {}
    for name, case in (CASES | on_two_ranks).items():
        directory = tmp_path_factory.mktemp("case")
        job, planned = prepare(request_of(directory, *case))
        file = directory / "request.json"
        file.write_text(json.dumps(job), encoding="utf-8")
        found[name] = TracedCase(file, planned)
    found["auto"] = _without_formats(found["plain"], tmp_path_factory.mktemp("auto"))
    return found


def _without_formats(case: TracedCase, directory: Path) -> TracedCase:
    """Return a case whose request leaves its number formats to the machine, as specs do by default."""
    job = json.loads(case.file.read_text(encoding="utf-8"))
    del job["recipe"]["compute"], job["recipe"]["reduce"]
    file = directory / "request.json"
    file.write_text(json.dumps(job), encoding="utf-8")
    return TracedCase(file, case.planned)


@pytest.fixture(scope="module")
def dry(requests: dict[str, TracedCase]) -> dict[str, Any]:
    """Return the dry traces; one process makes them, for it imports torch once."""
    chosen = {name: one for name, one in requests.items() if not name.startswith("ranks ")}
    return _traces(chosen, [sys.executable, "-m"])


@pytest.fixture(scope="module")
def real(requests: dict[str, TracedCase]) -> dict[str, Any]:
    """Return the traces of real runs on two gloo ranks."""
    wanted = ("ranks ",) if default_engine() is Engine.FSDP1 else ("real ", "ranks ")
    chosen = {name: one for name, one in requests.items() if name.startswith(wanted)}
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return _traces(chosen, [*ranks, "--nproc-per-node", "2", "-m"], "--real")


def _traces(requests: dict[str, TracedCase], command: list[str], *flags: str) -> dict[str, Any]:
    files = [str(one.file) for one in requests.values()]
    run = subprocess.run(
        [*command, "services.shared.training.dry_run.trace", *files, *flags],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    lines = run.stdout.splitlines()[-len(files) :]
    return {name: json.loads(line) for name, line in zip(requests, lines, strict=True)}


@needs_dry_runs
@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_what_our_own_step_takes(
    case: str, requests: dict[str, TracedCase], dry: dict[str, Any]
) -> None:
    found, planned = dry[case], requests[case].planned
    assert planned.peak_bytes == pytest.approx(found["peak_bytes"], rel=0.005)
    rows = compare(found, planned)
    training = [row for row in rows if row.phase in ("forward", "backward", "optimizer_step")]
    assert {row.step for row in training} == {1, 2}
    for row in training:
        if row.planned_bytes:  # with the optimizer in backward, nothing is left to plan
            allowed = 0.01 * row.traced_bytes + NOT_PLANNED_BYTES
            assert row.planned_bytes == pytest.approx(row.traced_bytes, abs=allowed), row


@needs_dry_runs
def test_formats_left_to_the_machine_are_those_of_accelerators(dry: dict[str, Any]) -> None:
    assert _peaks(dry["auto"]) == _peaks(dry["plain"])


@needs_dry_runs
@pytest.mark.parametrize("case", REAL)
def test_a_real_run_on_two_ranks_takes_the_same_bytes(
    case: str, dry: dict[str, Any], real: dict[str, Any]
) -> None:
    one, other = dry[f"real {case}"], real[f"real {case}"]
    assert (one["real"], other["real"]) == (False, True)
    assert one["peak_bytes"] == other["peak_bytes"]
    assert _peaks(one) == _peaks(other)


@pytest.mark.parametrize("case", FSDP1)
def test_the_plan_is_what_fsdp1_takes_on_two_ranks(
    case: str, requests: dict[str, TracedCase], real: dict[str, Any]
) -> None:
    found, planned = real[f"ranks {case}"], requests[f"ranks {case}"].planned
    assert (found["real"], found["engine"]) == (True, "fsdp1")
    assert planned.peak_bytes == pytest.approx(found["peak_bytes"], rel=0.005)


def test_an_old_torch_says_that_it_has_no_dry_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "services.shared.training.dry_run.trace.default_engine", lambda: Engine.FSDP1
    )
    with pytest.raises(SystemExit, match=r"needs torch 2\.6"):
        main([])


def _peaks(found: dict[str, Any]) -> dict[tuple[str, int], int]:
    # In optimizer_step gloo may still hold the scalar of the last reduction, one block.
    return {
        (entry["phase"], entry["step"]): entry["peak_bytes"]
        for entry in found["phases"]
        if entry["phase"] != PlanPhase.OPTIMIZER_STEP
    }


def test_what_a_plan_says_nothing_of_has_no_error() -> None:
    assert Row("load", 0, 0, 100, 0, "", 0).error is None


@pytest.mark.parametrize(
    ("knobs", "field"),
    [
        ({"offload": "all"}, "offload"),
        ({"accumulate": 2, "reduce_each": False}, "reduce_each"),
        ({"attention": "math"}, "attention"),
        ({"sharding": "hybrid", "shard_ranks": 2}, "sharding"),
    ],
)
def test_what_our_ranks_cannot_do_is_refused_by_name(
    knobs: dict[str, Any], field: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=field):
        prepare(request_of(tmp_path, DECODER, 4, knobs))
