"""What phases, steps and the size of the state leave open or exclude."""

import pytest

from services.shared.memory.forensics.case import Case
from services.shared.memory.forensics.diagnose import diagnose
from services.shared.memory.forensics.diagnosis import Cause, Confidence, Diagnosis, Strength
from services.shared.memory.forensics.free_text import parameters_in_name

FULL_CARD = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.15 GiB "
    "of which 512.00 MiB is free. Of the allocated memory 77.20 GiB is allocated by PyTorch, and 300.00 MiB is "
    "reserved by PyTorch but unallocated."
)
BACKWARD = '  File "train.py", line 10, in step\n    loss.backward()\n'
FORWARD = '  File "model.py", line 10, in forward\n'


def diagnosis(log: str, **stated: object) -> Diagnosis:
    return diagnose(Case.from_dict({"log": log, **stated}))


def left(found: Diagnosis) -> set[Cause]:
    return {h.cause for h in found.hypotheses if h.strength is not Strength.EXCLUDED}


def test_a_full_card_alone_leaves_three_explanations_open() -> None:
    found = diagnosis(FULL_CARD)
    assert found.confidence is Confidence.UNDECIDED
    assert left(found) == {Cause.NOT_SHARDED, Cause.CAPACITY, Cause.LOGITS_OR_ACTIVATIONS}


def test_a_failure_after_finished_steps_is_one_of_activations() -> None:
    bar = "  3%|2         | 31/1000 [01:26<44:10,  2.74s/it]\n"
    found = diagnosis(bar + BACKWARD + FULL_CARD)
    assert found.cause is Cause.LOGITS_OR_ACTIVATIONS
    assert found.confidence is Confidence.LIKELY
    assert left(found) == {Cause.LOGITS_OR_ACTIVATIONS}


def test_a_bar_of_loading_refutes_nothing() -> None:
    bar = "Loading checkpoint shards:  67%|###   | 2/3 [00:20<00:10,  5s/it]\n"
    load = '  File "modeling_utils.py", line 1, in from_pretrained\n'
    found = diagnosis(bar + load + FULL_CARD, model_name="Llama-2-70B", ranks=8)
    assert Cause.NOT_SHARDED in left(found)


def test_one_card_leaves_nothing_to_shard() -> None:
    assert Cause.NOT_SHARDED not in left(diagnosis(FULL_CARD, ranks=1))


def test_a_small_state_leaves_activations_only() -> None:
    found = diagnosis(FORWARD + FULL_CARD, model_name="Qwen3-0.6B", ranks=1)
    assert found.cause is Cause.LOGITS_OR_ACTIVATIONS
    assert found.confidence is Confidence.LIKELY


def test_a_quantised_model_with_adapters_leaves_activations_only() -> None:
    found = diagnosis(
        FORWARD + FULL_CARD, model_name="Llama-2-13B", ranks=1, sharding_strategy="QLoRA on one GPU"
    )
    assert found.cause is Cause.LOGITS_OR_ACTIVATIONS


def test_options_are_read_from_the_log() -> None:
    command = (
        "torchrun --nproc_per_node=8 train.py --model_name_or_path meta-llama/Llama-2-7b-hf "
        '--fsdp "full_shard auto_wrap" --per_device_train_batch_size 4\n'
    )
    found = diagnosis(command + FORWARD + FULL_CARD)
    assert found.needs is not None
    assert found.needs.rank_state_bytes == found.needs.whole_state_bytes // 8
    assert any("read from the log" in note and "ranks 8" in note for note in found.notes)


def test_what_the_case_states_wins_over_the_log() -> None:
    found = diagnosis("world_size=4\n" + FULL_CARD, ranks=2, model_name="Qwen3-8B")
    assert not any("ranks 4" in note for note in found.notes)


def test_weights_that_fit_only_in_two_bytes_name_the_dtype() -> None:
    log = '  File "modeling_utils.py", line 1, in from_pretrained\n' + FULL_CARD
    found = diagnosis(log, model_name="Qwen3-32B", ranks=1)
    assert Cause.FP32_UPCAST in left(found)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("LLaDA-8B-Instruct", 8.0),
        ("Qwen3-30B-A3B", 30.0),
        ("bloom-560m", 0.56),
        ("bloom-7b1", 7.1),
        ("Mixtral-8x7B", 45.9),
        ("llama7b", 7.0),
        ("gpt-neo 2.7B", 2.7),
        ("bert-base-4bit", None),
        ("", None),
    ],
)
def test_a_name_states_the_number_of_parameters(name: str, billions: float | None) -> None:
    found = parameters_in_name(name)
    assert found == (None if billions is None else pytest.approx(billions * 1e9, rel=0.01))


def test_a_server_that_fills_the_card_at_its_start_is_named() -> None:
    frame = '  File "vllm/v1/worker/gpu_worker.py", line 185, in determine_available_memory\n'
    found = diagnosis(frame + FULL_CARD)
    assert (found.cause, found.confidence) == (Cause.SERVING_START_UP, Confidence.LIKELY)


def test_a_refusal_while_pinning_is_one_of_the_host() -> None:
    frame = '  File "stage3.py", line 12, in __init__\n    buffer = torch.empty(n).pin_memory()\n'
    found = diagnosis(frame + "RuntimeError: CUDA error: out of memory")
    assert found.cause is Cause.PINNED_MEMORY


def test_a_state_beyond_the_card_is_why_before_any_activation_is() -> None:
    found = diagnosis(
        BACKWARD + FULL_CARD, model_name="Qwen3-32B", ranks=4, sharding_strategy="ZeRO-3"
    )
    assert (found.cause, found.confidence) == (Cause.CAPACITY, Confidence.LIKELY)
    assert len({(h.cause, h.what) for h in found.hypotheses}) == len(found.hypotheses)


def test_generation_on_a_card_that_its_weights_fill_is_left_open() -> None:
    frame = '  File "generate.py", line 3, in generate\n'
    found = diagnosis(frame + FULL_CARD, model={"num_parameters": 36_000_000_000}, ranks=1)
    assert found.confidence is Confidence.UNDECIDED
    assert {Cause.LOGITS_OR_ACTIVATIONS, Cause.CAPACITY} <= left(found)


def test_a_server_that_is_only_named_by_its_command_is_recognised() -> None:
    command = "vllm serve Qwen/Qwen3-32B --tensor-parallel-size 4 --gpu-memory-utilization 0.85\n"
    found = diagnosis(command + FULL_CARD)
    assert found.cause is Cause.SERVING_START_UP


def test_training_next_to_a_server_is_no_start_of_a_server() -> None:
    log = "(EngineCore_DP0 pid=7) INFO ready\n" + BACKWARD + FULL_CARD
    assert diagnosis(log).cause is not Cause.SERVING_START_UP


def test_killed_on_a_line_of_its_own_is_a_kill() -> None:
    bar = "Training:   1%|          | 12/1042 [19:40<28:10:22, 98.47s/it]\n"
    assert diagnosis(bar + "Killed\n").cause is Cause.HOST_MEMORY
    assert diagnosis("the worker was Killed by hand\n").message is None


def test_the_only_explanation_that_sizes_leave_is_likely() -> None:
    found = diagnosis(
        FULL_CARD, model_name="Llama-2-13B", ranks=1, sharding_strategy="QLoRA on one GPU"
    )
    assert (found.cause, found.confidence) == (Cause.LOGITS_OR_ACTIVATIONS, Confidence.LIKELY)


def test_free_pieces_inside_the_allocator_leave_fragmentation_open() -> None:
    log = (
        BACKWARD + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 11.66 GiB. "
        "10.41 GiB is reserved by PyTorch but unallocated."
    )
    assert Cause.FRAGMENTATION in left(diagnosis(log))
