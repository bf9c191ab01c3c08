"""Scanning logs for failures: every catalogued message, in any log around it."""

import io
import json
import random
import time
import tracemalloc
from pathlib import Path
from typing import TypedDict

import pytest

from services.shared.memory.forensics.device_accounts import read_accounts
from services.shared.memory.oom_log.log_scanner import read_log
from services.shared.memory.oom_log.message_formats import Backend, MessageKind
from services.shared.memory.oom_log.message_parser import (
    Message,
    PrintedSize,
    read_message,
    read_printed_size,
)
from services.shared.memory.oom_log.traceback_sites import Note, Site


class Sample(TypedDict):
    """One published message, and the numbers in it by the name of their group."""

    format: str
    message: str
    groups: dict[str, str]


DATA = Path(__file__).parents[2] / "data"
SAMPLES: list[Sample] = json.loads((DATA / "oom_messages.json").read_text())
BY_FORMAT = {sample["format"]: sample["message"] for sample in SAMPLES}
FIELD_OF_GROUP = {
    "tried": "requested",
    "total": "total",
    "alloc": "allocated",
    "cur": "allocated",
    "active": "active",
    "free": "free",
    "allowed": "allowed",
    "limit": "allowed",
    "reserved": "reserved",
    "unalloc": "unallocated",
    "priv": "private_pools",
    "proc": "process",
}
# Samples that are variants of one catalogue entry, and the entry.
ENTRY = {
    "F1-allowed": "F1",
    "F4-private-0bytes": "F4",
    "F4-container": "F4",
    "F4-wsl": "F4",
    "F-nvml-init": "F-nvml",
    "H1b": "H1",
    "H1c": "H1",
    "H1d": "H1",
    "H2b": "S1",
}
F4 = BY_FORMAT["F4"]


def printed(text: str) -> PrintedSize:
    return PrintedSize(int(text), 0) if text.isdigit() else read_printed_size(text)


def primary_message(log: str | bytes) -> Message:
    message = read_log(log).primary
    assert message is not None
    return message


@pytest.mark.parametrize("sample", SAMPLES, ids=[s["format"] for s in SAMPLES])
def test_every_catalogued_message_gives_its_numbers(sample: Sample) -> None:
    message = primary_message(f"step 7\n{sample['message']}\nbye")
    expected = {
        FIELD_OF_GROUP[group]: printed(text)
        for group, text in sample["groups"].items()
        if group in FIELD_OF_GROUP
    }
    found = {name: getattr(message, name) for name in FIELD_OF_GROUP.values()}
    assert {name: value for name, value in found.items() if value is not None} == expected


@pytest.mark.parametrize("sample", SAMPLES, ids=[s["format"] for s in SAMPLES])
def test_every_catalogued_message_is_given_its_entry(sample: Sample) -> None:
    entry = ENTRY.get(sample["format"], sample["format"])
    assert entry in primary_message(sample["message"]).format_id.split("|")


@pytest.mark.parametrize("sample", SAMPLES, ids=[s["format"] for s in SAMPLES])
def test_a_message_broken_over_prefixed_lines_reads_like_the_whole_one(sample: Sample) -> None:
    words, lines = sample["message"].split(" "), []
    while words:
        lines.append("[rank5]: 2026-01-02 03:04:05,678 ERROR " + " ".join(words[:6]))
        words = words[6:]
    broken = primary_message("\n".join(lines))
    whole = read_message(sample["message"])
    assert whole is not None
    assert (broken.identity, broken.free, broken.others) == (
        whole.identity,
        whole.free,
        whole.others,
    )
    assert broken.rank == 5


def test_a_message_broken_inside_words_by_a_narrow_terminal_is_joined() -> None:
    narrow = "\n".join(F4[at : at + 80] for at in range(0, len(F4), 80))
    assert primary_message(narrow).identity == primary_message(F4).identity


def test_lines_of_other_ranks_in_between_are_left_out() -> None:
    first, second = F4.split(" GPU 0")
    log = f"[rank1]: {first}\n[rank2]: Traceback (most recent call last):\n[rank1]: GPU 0{second}"
    message = primary_message(log)
    assert (message.rank, message.identity) == (1, primary_message(F4).identity)


def test_eight_ranks_that_fail_alike_are_one_message_of_eight_ranks() -> None:
    reading = read_log("\n".join(f"[rank{rank}]: {F4}" for rank in range(8)))
    assert len(reading.messages) == 1
    assert reading.ranks == frozenset(range(8))
    assert reading.repetitions == 8


def test_a_cut_message_keeps_the_numbers_before_the_cut() -> None:
    message = primary_message(F4[: F4.index("Of the allocated")])
    assert message.requested == printed("388.00 MiB")
    assert message.free == printed("95.75 MiB")
    assert message.allocated is None


def test_a_hundred_megabytes_of_log_are_read_in_bounded_memory() -> None:
    line = b"[rank3]: 2026-01-01 00:00:00 INFO step 10 loss 0.532 lr 1e-9 tokens/s 12345\n"
    half = line * (50_000_000 // len(line))
    log = io.BytesIO(half + f"[rank3]: torch.OutOfMemoryError: {F4}\n".encode() + half)
    tracemalloc.start()
    reading = read_log(log)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert reading.primary is not None
    assert reading.primary.identity == primary_message(f"torch.OutOfMemoryError: {F4}").identity
    assert peak < 16 << 20


def test_a_message_across_the_border_of_two_blocks_is_found() -> None:
    for before in range((1 << 20) - len(F4), (1 << 20) + 1, 97):
        assert primary_message("x" * before + "\n" + F4).identity == primary_message(F4).identity


def test_a_device_failure_outranks_the_kills_and_time_outs_that_follow_it() -> None:
    log = (
        f"[rank3]: torch.OutOfMemoryError: {F4}\n"
        "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)\n"
        "exitcode  : -9 (pid: 17)\n"
        "CUDA out of memory. Tried to allocate more than 1EB memory.\n"
    )
    reading = read_log(log)
    assert reading.primary is not None
    assert reading.primary.rank == 3
    assert Note.COLLECTIVE_TIMEOUT in reading.notes


def test_the_traceback_and_the_progress_bar_before_a_message_are_read() -> None:
    log = (
        "  1%|▏         | 1/1250 [00:21<7:24:11, 21.34s/it]\n"
        "Traceback (most recent call last):\n"
        '  File "trainer.py", line 2536, in _inner_training_loop\n'
        '  File "torch/optim/adamw.py", line 220, in step\n'
        "    exp_avg_sq_sqrt = torch._foreach_sqrt(device_exp_avg_sqs)\n"
        f"torch.OutOfMemoryError: {F4}\n"
    )
    reading = read_log(log)
    assert reading.completed_steps == 1
    assert {Site.OPTIMIZER, Site.FOREACH} <= set(reading.sites)


@pytest.mark.parametrize(
    ("line", "note"),
    [
        (
            "UserWarning: Upcasted low precision parameters in Qwen3DecoderLayer because",
            Note.UPCAST,
        ),
        ("DeepSpeed Zero3 Init flag is only applicable for ZeRO Stage 3.", Note.ZERO3_INIT_OFF),
        ("FSDP is switching to use `NO_SHARD` instead of FULL_SHARD", Note.NO_SHARD),
        ("module has both parameters with requires_grad=True and False", Note.MIXED_REQUIRES_GRAD),
        ("Failed to clone() tensor with name lm_head.weight on rank 3.", Note.CLONE_FAILED),
        ("2 pytorch allocator cache flushes since last step. this happens", Note.CACHE_FLUSHES),
    ],
)
def test_warnings_that_explain_memory_are_noted(line: str, note: Note) -> None:
    assert note in read_log(f"[rank0]: {line}\n").notes


def test_the_tensor_whose_clone_failed_is_named() -> None:
    log = "Failed to clone() tensor with name layers.30.mlp.down_proj.weight on rank 0. This may"
    assert read_log(log).cloned_tensor == "layers.30.mlp.down_proj.weight"


def test_a_sentence_in_prose_gives_both_numbers() -> None:
    message = primary_message(
        "HIP out of memory, 59.36 GB allocated per card, 932 MB more requested"
    )
    assert message.kind is MessageKind.PROSE
    assert message.backend is Backend.HIP
    assert message.allocated == printed("59.36 GiB")
    assert message.requested == printed("932 MiB")


@pytest.mark.parametrize(
    "log",
    [
        "",
        "loss 0.51\nloss 0.48\n",
        "no OOM so far, all 8 ranks alive",
        "exitcode: 0",
        b"\xff\xfe\x00binary\x00\x9f",
    ],
)
def test_a_log_without_a_failure_gives_no_message(log: str | bytes) -> None:
    assert read_log(log).primary is None


def test_a_log_in_sixteen_bit_text_is_read() -> None:
    assert primary_message(F4.encode("utf-16")).identity == primary_message(F4).identity


def test_a_log_that_only_repeats_trigger_words_is_passed_in_bounded_time() -> None:
    spam = "OOM exitcode SIGKILL of memory " * 200_000
    began = time.monotonic()
    read_log(spam)
    assert time.monotonic() - began < 20


def test_ten_thousand_mutated_messages_never_raise_and_stay_fast() -> None:
    chance = random.Random(20261129)
    texts = [sample["message"] for sample in SAMPLES]
    slowest = 0.0
    for _ in range(10_000):
        mutated = mutate(chance.choice(texts), chance)
        began = time.perf_counter()
        reading = read_log(mutated)
        if reading.primary is not None:
            read_accounts(reading.primary)
        slowest = max(slowest, time.perf_counter() - began)
    assert slowest < 1.0


def mutate(text: str, chance: random.Random) -> str | bytes:
    letters = list(text)
    for _ in range(chance.randint(1, 12)):
        at = chance.randrange(len(letters) + 1)
        kind = chance.randrange(6)
        if kind == 0:
            del letters[at : at + chance.randint(1, 30)]
        elif kind == 1:
            letters.insert(
                at, chance.choice(["\n", "\r\n", "\x00", "\x1b[31m", "[rank9]: ", "٣", "9"])
            )
        elif kind == 2:
            letters[at:at] = letters[: chance.randint(0, 60)]
        elif kind == 3 and at < len(letters):
            letters[at] = chr(chance.randrange(1, 0x2FF))
        elif kind == 4:
            letters.insert(at, "9" * chance.randint(1, 400))
        else:
            letters = letters[:at] or ["G"]
    mutated = "".join(letters)
    raw = mutated.encode("utf-8", errors="surrogatepass")
    return mutated if chance.random() < 0.5 else raw[: chance.randrange(len(raw) + 1)]


def test_accounts_subtract_what_torch_holds_from_the_card() -> None:
    accounts = read_accounts(primary_message(F4))
    total, free = printed("9.68 GiB").size_bytes, printed("95.75 MiB").size_bytes
    held = printed("6.61 GiB").size_bytes + printed("2.57 GiB").size_bytes
    assert accounts.outside_bytes == total - free - held


def test_a_process_sentence_separates_other_processes() -> None:
    accounts = read_accounts(primary_message(BY_FORMAT["F3"]))
    assert accounts.other_processes_bytes == pytest.approx(306 << 20, abs=16 << 20)


def test_in_a_container_the_largest_other_process_is_the_job_itself() -> None:
    accounts = read_accounts(primary_message(BY_FORMAT["F4-container"]))
    assert accounts.other_processes_bytes in (None, 0)


def test_an_overflowed_process_size_is_ignored() -> None:
    accounts = read_accounts(primary_message(BY_FORMAT["F4-wsl"]))
    assert accounts.other_processes_bytes is None
    assert accounts.outside_bytes is not None
