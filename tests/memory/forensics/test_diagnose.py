"""Diagnoses of public reports, one rule at a time, and what a diagnosis never claims."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from services.shared.memory.errors import InvalidInput
from services.shared.memory.forensics.case import Case
from services.shared.memory.forensics.diagnose import diagnose
from services.shared.memory.forensics.diagnosis import (
    Cause,
    Confidence,
    Diagnosis,
    Sharded,
    Strength,
)
from services.shared.memory.forensics.matching.candidates import Match
from services.shared.memory.sizes import GIB
from tools.diagnose_score import Score, score, table

DATA = Path(__file__).parents[2] / "data"
REPORTS = json.loads((DATA / "oom_reports.json").read_text())
SAMPLES = json.loads((DATA / "oom_messages.json").read_text())
CASES = {report["id"]: report["case"] for report in REPORTS}

QWEN3_8B = {
    "model_name": "Qwen3-8B",
    "heads": [3],
    "ranks": 4,
    "framework": "fsdp2",
    "device": "a100-40",
    "precision": "bf16",
}


def read(**case: Any) -> Diagnosis:
    return diagnose(Case.from_dict(case))


def message(requested: str, allocated: str, *, total: str = "39.39 GiB", rest: str = "") -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {requested}. GPU 0 has a total "
        f"capacity of {total}{rest}. Of the allocated memory {allocated} is allocated by PyTorch"
    )


@pytest.fixture(scope="module")
def scores() -> list[Score]:
    return score(REPORTS)


def test_nine_of_ten_firm_reports_get_their_cause(scores: list[Score]) -> None:
    counted = [one for one in scores if one.is_scored]
    assert sum(one.cause_is_correct for one in counted) >= 0.9 * len(counted), table(scores)


def test_nine_of_ten_firm_reports_get_sharding_right(scores: list[Score]) -> None:
    counted = [one for one in scores if one.is_scored]
    assert sum(one.sharding_is_correct for one in counted) >= 0.9 * len(counted), table(scores)


def test_no_report_is_certain_and_wrong(scores: list[Score]) -> None:
    assert not [one.name for one in scores if one.certain_and_wrong]


def test_reports_without_an_established_cause_are_never_certain(scores: list[Score]) -> None:
    unknown = [one for one in scores if one.known_cause is None]
    assert unknown
    assert all(one.diagnosis.confidence is not Confidence.CERTAIN for one in unknown)


@pytest.mark.parametrize("report", REPORTS, ids=[r["id"] for r in REPORTS])
def test_the_known_tensor_is_among_the_candidates(report: Mapping[str, Any]) -> None:
    """Every size that a report worked out from the model's dimensions is found again."""
    found = diagnose(Case.from_dict(report["case"])).request
    for known in report["arithmetic"]:
        dimensions = known["expr_bytes"].replace("//", "*").split("*")
        from_the_shape = report["case"].get("model") and known.get("match") == "exact"
        if not from_the_shape or known["status"] != "trace" or len(dimensions) > 3:
            continue
        sizes = [candidate.size_bytes for candidate in found]
        assert any(abs(size - known["bytes"]) <= 4096 for size in sizes), known["what"]


def test_a_share_of_a_layer_proves_sharding() -> None:
    found = diagnose(Case.from_dict(CASES["cookbook-234"]))
    assert found.sharded is Sharded.YES
    assert "only when 8 ranks divide" in found.sharded_evidence[0]


def test_whole_weights_larger_than_the_card_are_certainly_not_sharded() -> None:
    found = diagnose(Case.from_dict(CASES["lf-257"]))
    assert (found.cause, found.confidence) == (Cause.NOT_SHARDED, Confidence.CERTAIN)
    assert found.remedies[0].change.startswith("configure sharding")


def test_the_fault_comes_before_smaller_recipes_when_nothing_was_sharded() -> None:
    found = read(**{**QWEN3_8B, "framework": "ddp"}, phase="train", log=message("96 MiB", "38 GiB"))
    assert found.cause is Cause.NOT_SHARDED
    assert "configure sharding" in found.remedies[0].change
    assert found.remedies[0].predicted_peak_bytes is not None


class TestProbe:
    """What the probe of our own ranks measured after wrapping is decisive."""

    def test_whole_parameters_on_a_rank_are_not_sharded(self) -> None:
        local = 7_568_000_000 * 2
        found = read(**QWEN3_8B, observed={"sharded_units": 37, "local_parameter_bytes": local})
        assert found.sharded is Sharded.NO
        assert (found.cause, found.confidence) == (Cause.NOT_SHARDED, Confidence.CERTAIN)

    def test_a_share_of_the_parameters_is_sharded(self) -> None:
        local = 7_568_000_000 * 4 // 4
        observed = {"local_parameter_bytes": local, "dtypes": ["torch.float32"]}
        assert read(**QWEN3_8B, observed=observed).sharded is Sharded.YES

    def test_no_unit_is_not_sharded(self) -> None:
        found = read(**QWEN3_8B, observed={"sharded_units": 0})
        assert (found.sharded, found.cause) == (Sharded.NO, Cause.NOT_SHARDED)

    def test_one_unit_for_all_is_too_coarse(self) -> None:
        found = read(**QWEN3_8B, observed={"sharded_units": 1})
        assert (found.sharded, found.cause) == (Sharded.PARTLY, Cause.WRAP_TOO_COARSE)

    def test_allocated_bytes_tell_a_replica_from_shards(self) -> None:
        count = 7_568_000_000
        sharded = read(**QWEN3_8B, observed={"allocated_after_wrap_bytes": count})
        whole = read(**QWEN3_8B, observed={"allocated_after_wrap_bytes": 4 * count})
        assert (sharded.sharded, whole.sharded) == (Sharded.YES, Sharded.NO)

    def test_float32_where_bfloat16_was_planned_is_an_upcast(self) -> None:
        found = read(**QWEN3_8B, parameters="bfloat16", observed={"dtypes": ["float32"]})
        assert found.cause is Cause.FP32_UPCAST


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("exitcode  : -9 (pid: 17)", Cause.HOST_MEMORY),
        ("slurmstepd: error: Detected 1 oom_kill event", Cause.HOST_MEMORY),
        ("train.sh: line 3: 4711 Killed   torchrun train.py", Cause.HOST_MEMORY),
        ("subprocess died with <Signals.SIGKILL: 9>", Cause.HOST_MEMORY),
        (SAMPLES[-1]["message"], Cause.HOST_MEMORY),
        ("NCCL WARN Cuda failure 2 'out of memory'", Cause.OUTSIDE_ALLOCATOR),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)", Cause.OUTSIDE_ALLOCATOR),
        ("UR_RESULT_ERROR_OUT_OF_RESOURCES", Cause.DRIVER_LIMIT),
        ("RuntimeError: cudaHostAlloc failed: out of memory", Cause.PINNED_MEMORY),
        ("Upcasted low precision parameters in Block because mixed", Cause.FP32_UPCAST),
        ("mixed requires_grad in one FSDP unit", Cause.WRAP_TOO_COARSE),
        ("Failed to clone() tensor with name lm_head.weight on rank 0", Cause.CHECKPOINT_GATHER),
    ],
)
def test_the_source_of_a_message_determines_the_cause(log: str, cause: Cause) -> None:
    found = read(log=log, sharding_strategy="FSDP1 full_shard", out_of_memory=True)
    assert found.cause is cause


def test_an_exit_by_kill_without_a_log_is_host_memory() -> None:
    assert read(exit_code=-9).cause is Cause.HOST_MEMORY


def test_torchs_own_cpu_allocator_is_certain_and_names_the_tensor() -> None:
    log = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 201326592 bytes."
    found = read(**{**QWEN3_8B, "ranks": 1, "framework": "none", "device": "cpu"}, log=log)
    assert (found.cause, found.confidence) == (Cause.HOST_MEMORY, Confidence.CERTAIN)
    exact = [c for c in found.request if c.match is Match.EXACT]
    assert {(c.size_bytes, c.dtype) for c in exact} >= {(12_288 * 4096 * 4, "float32")}
    assert "mlp.gate_proj" in exact[0].what


def test_a_known_micro_batch_names_activations_by_the_jobs_own_timeline() -> None:
    log = message("72.00 MiB", "30.00 GiB")
    found = read(**QWEN3_8B, log=log, micro_batch=1, sequence_length=3072, phase="forward")
    assert any("MLP" in c.what and c.match is Match.EXACT for c in found.request)


def test_memory_free_beyond_the_request_is_no_shortage() -> None:
    log = message("64.00 MiB", "10.00 GiB", rest=" of which 20.00 GiB is free")
    assert read(log=log + ", and 1.00 GiB is reserved by PyTorch but unallocated").cause is (
        Cause.DRIVER_LIMIT
    )


def test_another_process_on_the_device_is_recognised() -> None:
    log = (
        "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 39.39 GiB of "
        "which 20.00 MiB is free. Process 77 has 30.00 GiB memory in use. Including non-PyTorch "
        "memory, this process has 9.30 GiB memory in use. Of the allocated memory 8.00 GiB is "
        "allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated."
    )
    assert read(log=log).cause is Cause.OTHER_PROCESS


def test_free_blocks_that_would_suffice_packed_are_fragmentation() -> None:
    log = message("2.00 GiB", "20.00 GiB", rest=" of which 1.00 GiB is free")
    found = read(log=log + ", and 17.00 GiB is reserved by PyTorch but unallocated.")
    assert found.cause is Cause.FRAGMENTATION


def test_temporaries_are_the_cause_only_where_the_job_fits_without_them() -> None:
    trace = "in torch._foreach_sqrt\ntorch.OutOfMemoryError"
    fits = read(**QWEN3_8B, log=trace, optimizer="adamw foreach", phase="optimizer_step")
    crowded = read(
        **{**QWEN3_8B, "device": "a10g"},
        log=trace,
        optimizer="adamw foreach",
        phase="optimizer_step",
    )
    assert fits.cause is Cause.OPTIMIZER_TEMPORARIES
    assert crowded.cause is Cause.CAPACITY


def test_creating_the_optimizers_state_is_not_a_temporary() -> None:
    log = "in step\n  self._init_group(group)\n  in _init_group: torch.zeros_like(p)\ntorch.OutOfMemoryError"
    assert read(**QWEN3_8B, log=log, phase="optimizer_step").cause is Cause.CAPACITY


def test_loading_onto_the_card_before_wrapping_is_not_sharded() -> None:
    found = read(phase="load", sharding_strategy="FSDP1", log="CUDA out of memory.", ranks=8)
    assert (found.cause, found.sharded) == (Cause.NOT_SHARDED, Sharded.NO)


def test_adapters_alone_do_not_need_the_state_of_a_full_training() -> None:
    job = {"model_name": "Llama-2-70B", "ranks": 8, "device": "a100-80", "out_of_memory": True}
    full = read(**job, sharding_strategy="FSDP1")
    lora = read(**job, sharding_strategy="FSDP1, LoRA")
    assert full.cause is Cause.CAPACITY
    assert lora.cause is Cause.UNDECIDED


def test_a_traceback_through_an_engine_replaces_a_missing_strategy() -> None:
    log = (
        '  File "torch/distributed/fsdp/_flat_param.py", line 1, in _alloc_padded_unsharded\n'
        + message("386.00 MiB", "38.00 GiB")
    )
    assert read(model_name="Qwen3-8B", heads=[2], ranks=4, log=log).sharded is Sharded.YES


def test_an_empty_case_is_undecided_and_requests_the_message() -> None:
    found = read()
    assert (found.cause, found.confidence) == (Cause.UNDECIDED, Confidence.UNDECIDED)
    assert found.next_measurement is not None
    assert "whole message" in found.next_measurement


def test_every_undecided_report_names_what_to_measure(scores: list[Score]) -> None:
    undecided = [s for s in scores if s.diagnosis.confidence is Confidence.UNDECIDED]
    assert undecided
    assert all(one.diagnosis.next_measurement for one in undecided)


def test_a_decided_cause_names_no_measurement(scores: list[Score]) -> None:
    decided = [s for s in scores if s.diagnosis.confidence is not Confidence.UNDECIDED]
    assert all(one.diagnosis.next_measurement is None for one in decided)


class TestCase:
    """A case from JSON: every field optional, mistakes named."""

    def test_an_unknown_field_is_kept_as_a_note(self) -> None:
        found = read(sequence_lenght=2048)
        assert any("'sequence_lenght'" in note for note in found.notes)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("ranks", "eight"),
            ("ranks", 2.5),
            ("ranks", -1),
            ("model", "qwen3"),
            ("framework", "horovod"),
            ("parameters", "float17"),
            ("activation_checkpointing", "perhaps"),
            ("heads", 3),
            ("exit_code", "killed"),
            ("log", ["a", "list"]),
        ],
    )
    def test_a_mistake_names_its_field(self, field: str, value: object) -> None:
        with pytest.raises(InvalidInput) as caught:
            Case.from_dict({field: value})
        assert caught.value.field == field

    def test_null_is_the_same_as_leaving_out(self) -> None:
        assert Case.from_dict({"ranks": None, "log": None}) == Case()

    def test_free_text_values_are_understood(self) -> None:
        case = Case.from_dict({"parameters": "bf16", "framework": "FSDP1 full_shard"})
        assert (str(case.parameters), str(case.framework)) == ("bfloat16", "fsdp1")

    def test_the_contracts_short_model_gives_a_shape(self) -> None:
        model = {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_layers": 32,
            "num_heads": 32,
            "num_kv_heads": 32,
            "head_dim": 128,
            "vocab_size": 32000,
            "tied": False,
        }
        found = read(
            model=model, ranks=8, sharding_strategy="FSDP1", log=message("388 MiB", "1 GiB")
        )
        assert found.request[0].size_bytes == 202_383_360 * 2

    def test_an_absurd_number_of_layers_is_refused(self) -> None:
        model = {"hidden_size": 8, "num_layers": 10**6, "num_heads": 1, "vocab_size": 8}
        with pytest.raises(InvalidInput, match="num_layers"):
            read(model=model)


def test_the_json_has_the_fields_of_the_contract() -> None:
    found = json.loads(json.dumps(diagnose(Case.from_dict(CASES["trl-3436"])).to_dict()))
    assert found.keys() >= {"cause", "confidence", "sharded", "message", "request", "hypotheses"}
    assert found.keys() >= {"next_measurement", "remedies"}
    assert found["request"][0].keys() >= {"what", "bytes", "dtype", "match"}
    assert found["hypotheses"][0].keys() >= {
        "cause",
        "predicted_allocated_bytes",
        "predicted_request_bytes",
        "for",
        "against",
    }
    assert found["remedies"][0].keys() >= {"change", "predicted_peak_bytes", "verdict", "costs"}
    assert found["message"]["requested_bytes"] == 388 * 2**20


def test_randomly_combined_cases_never_raise() -> None:
    chance = random.Random(7)
    values: dict[str, list[Any]] = {"exit_code": [-9, 1], "observed": [{"sharded_units": 0}, {}]}
    for case in CASES.values():
        for name, value in case.items():
            values.setdefault(name, []).append(value)
    values["log"] += [sample["message"] for sample in SAMPLES]
    for _ in range(400):
        case = {name: chance.choice(v) for name, v in values.items() if chance.random() < 0.5}
        assert json.dumps(read(**case).to_dict())


def test_every_hypothesis_has_a_reason(scores: list[Score]) -> None:
    for one in scores:
        for hypothesis in one.diagnosis.hypotheses:
            excluded = hypothesis.strength is Strength.EXCLUDED
            assert hypothesis.objections if excluded else hypothesis.reasons


def test_a_fitting_recipe_is_smaller_than_the_card() -> None:
    found = diagnose(Case.from_dict(CASES["alpaca-223"]))
    fitting = [
        peak for r in found.remedies if r.verdict == "fits" and (peak := r.predicted_peak_bytes)
    ]
    assert fitting
    assert all(peak < 31.75 * GIB for peak in fitting)
