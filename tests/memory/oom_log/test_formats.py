"""The tables of texts, against the parser and the page made from them."""

import json
from pathlib import Path

import pytest

from services.shared.memory.oom_log.formats.table import OTHER_FORMATS
from services.shared.memory.oom_log.formats.text_format import Verified
from services.shared.memory.oom_log.formats.torch_messages import TORCH_MESSAGES
from services.shared.memory.oom_log.log_scanner import read_log
from services.shared.memory.oom_log.message_formats import MessageKind
from services.shared.memory.oom_log.message_parser import read_message
from tools.make_oom_messages import TARGET, page

DATA = Path(__file__).parents[2] / "data"
EXAMPLES = [(f.format_id, example) for f in OTHER_FORMATS for example in f.examples]


@pytest.mark.parametrize(("format_id", "example"), EXAMPLES)
def test_every_example_is_read_as_its_format(format_id: str, example: str) -> None:
    message = read_message(example)
    assert message is not None
    assert message.format_id == format_id


@pytest.mark.parametrize(("format_id", "example"), EXAMPLES)
def test_a_scan_finds_every_example_in_a_log(format_id: str, example: str) -> None:
    found = read_log(f"step 12: loss 0.5\n{example}\nthe end\n").primary
    assert found is not None
    assert found.format_id == format_id


def test_every_format_names_its_origins() -> None:
    assert len({f.format_id for f in OTHER_FORMATS}) == len(OTHER_FORMATS)
    for text in OTHER_FORMATS:
        assert text.examples
        assert text.triggers
        assert text.origins
        for origin in text.origins:
            assert origin.component
            assert origin.versions
            if origin.verified in (Verified.SOURCE, Verified.BINARY):
                assert origin.file != "-"


def test_every_message_that_the_parser_names_is_in_a_table() -> None:
    known = {m.format_id for m in TORCH_MESSAGES} | {f.format_id for f in OTHER_FORMATS}
    for sample in json.loads((DATA / "oom_messages.json").read_text()):
        message = read_message(sample["message"])
        assert message is not None
        assert set(message.format_id.split("|")) & known, message.format_id


@pytest.mark.parametrize(
    "text",
    [
        # torch_npu prints this head for every failed call, whatever failed
        "[ERROR] ERR00100 PTA call acl api failed",
        # Ray's list of what may have ended a worker
        "There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due "
        "to high memory usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly",
        "wandb: System metrics 12.1GB / 24.0GB (50%)",
    ],
)
def test_texts_that_only_mention_memory_are_no_failure(text: str) -> None:
    assert read_message(text) is None


def test_a_job_that_the_scheduler_preempted_is_no_memory_failure() -> None:
    message = read_message(
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***"
    )
    assert message is not None
    assert message.kind is MessageKind.TIME_LIMIT


def test_the_page_is_generated_from_the_tables() -> None:
    assert TARGET.read_text(encoding="utf-8") == page(), "run: python -m tools.make_oom_messages"
