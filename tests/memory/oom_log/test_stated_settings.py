"""Settings that logs state, in the forms of the usual launchers and trainers."""

import pytest

from services.shared.memory.oom_log.stated_settings import StatedSettings, settings_in
from services.shared.memory.oom_log.traceback_sites import completed_steps_in

COMMAND = """deepspeed --num_gpus=8 train.py --model_name_or_path meta-llama/Llama-2-7b-hf \\
    --per_device_train_batch_size 4 --max_seq_length 2048 --gradient_checkpointing True \\
    --deepspeed ds_z3_offload_config.json --bf16 True --optim adamw_torch --gradient_accumulation_steps 8"""
ACCELERATE = """distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_offload_params: true
num_processes: 2
"""
ARGUMENTS = """Namespace(model='x', per_device_train_batch_size=2, world_size=4)
{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "gradient_accumulation_steps": "auto"}
trainable params: 4,194,304 || all params: 6,742,609,920 || trainable%: 0.06"""


def test_a_command_line_states_the_job() -> None:
    assert settings_in(COMMAND) == StatedSettings(
        model_name="meta-llama/Llama-2-7b-hf",
        ranks=8,
        micro_batch=4,
        sequence_length=2048,
        accumulate=8,
        activation_checkpointing=True,
        optimizer="adamw_torch",
        strategy="DeepSpeed ZeRO-3, offload",
        precision="--bf16",
    )


def test_a_configuration_of_accelerate_states_the_strategy() -> None:
    found = settings_in(ACCELERATE)
    assert (found.strategy, found.ranks) == ("FSDP FULL_SHARD, offload all", 2)


def test_printed_arguments_and_a_deepspeed_configuration_are_read() -> None:
    found = settings_in(ARGUMENTS)
    assert found.strategy == "DeepSpeed ZeRO-2, offload optimizer"
    assert (found.micro_batch, found.ranks, found.accumulate) == (2, 4, None)
    assert found.num_parameters == 6_742_609_920


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'labels' in model(**batch)",
        'micro_batch_size: "auto", num_gpus: None, model: str = "gpt"',
        "the model name is not known; optimizer step; stage 3 of the plan; fsdp is great",
    ],
)
def test_words_that_set_nothing_state_nothing(text: str) -> None:
    assert settings_in(text) == StatedSettings()


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("Loading checkpoint shards:  67%|###   | 2/3 [00:20<00:10,  5s/it]", None),
        ("Map: 100%|####| 5000/5000 [00:01<00:00, 4000 examples/s]", None),
        ("  1%|          | 307/46384 [40:26<101:10:22,  7.90s/it]", 307),
        (
            "Loading checkpoint shards: 100%|#| 3/3 [00:20<00:00]\n  0%|  | 0/100 [00:00<?, ?it/s]",
            0,
        ),
        ("{'loss': 1.93, 'learning_rate': 2e-05, 'epoch': 0.01}", 1),
        (" iteration       12/  500000 | consumed samples: 12288 |", 12),
        ("epoch 0 step: 120, loss: 3.2", 120),
        (
            "Resuming, continuing training from global step 500\n 50%|##  | 500/1000 [00:00<?, ?it/s]",
            0,
        ),
        ("RuntimeError: shape mismatch", None),
    ],
)
def test_only_finished_training_steps_of_this_run_count(text: str, steps: int | None) -> None:
    assert completed_steps_in(text) == steps
