"""`stillhouse diagnose`: a case or a log in, one screen or JSON out."""

import json
from io import StringIO
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from services.cli.commands.diagnose import diagnose
from services.cli.terminal import Console
from services.cli.views.diagnosis import SCREEN_LINES, show_diagnosis
from services.cli.views.diagnosis_tables import show_everything
from services.shared.memory.forensics.case import Case
from services.shared.memory.forensics.diagnose import diagnose as diagnose_case
from services.shared.memory.forensics.diagnosis import DiagnosisDict
from tools.diagnose_score import score, table

DATA = Path(__file__).parents[2] / "data"
GOLDEN = DATA / "golden_case.json"

MESSAGE = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 932.00 MiB. GPU 0 has a total "
    "capacity of 63.98 GiB. Of the allocated memory 59.36 GiB is allocated by PyTorch\n"
)
OPTIONS = [
    "--model",
    "Qwen3-32B",
    "--heads",
    "3,7",
    "--ranks",
    "8",
    "--device",
    "k100_ai",
    "--device-memory",
    "65520MiB",
    "--activation-checkpointing",
    "--torch",
    "2.5.1",
    "--strategy",
    "FSDP1 full_shard",
]

app = typer.Typer()
app.command()(diagnose)


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def answer(*arguments: str, stdin: str | None = None) -> DiagnosisDict:
    result = run(*arguments, "--json", stdin=stdin)
    assert result.exit_code == 0, result.output
    found: DiagnosisDict = json.loads(result.stdout)
    return found


def test_a_case_file_is_diagnosed_as_json() -> None:
    found = answer(str(GOLDEN))
    assert (found["cause"], found["sharded"]) == ("undecided", "yes")
    assert found["request"][0]["match"] == "exact"


def test_a_log_on_standard_input_with_options_gives_the_same_as_a_case() -> None:
    found = answer(*OPTIONS, stdin=MESSAGE)
    left = [h["what"] for h in found["hypotheses"] if h["status"] == "possible"]
    assert any("no_sync" in what for what in left)
    assert any("without temporaries" in what for what in left)


def test_a_log_file_is_distinguished_from_a_case(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text('{"loss": 0.5}\n{"loss": 0.4}\n' + MESSAGE)
    message = answer(str(log))["message"]
    assert message is not None
    assert message["requested_bytes"] == 932 * 2**20


def test_options_override_the_fields_of_a_case(tmp_path: Path) -> None:
    case = tmp_path / "case.json"
    case.write_text(json.dumps({"log": MESSAGE, "ranks": 8, "model_name": "Qwen3-32B"}))
    found = answer(str(case), "--ranks", "7")
    assert found["needs"]["sharded_state_bytes"] == found["needs"]["whole_state_bytes"] // 7


def test_the_readable_form_says_what_to_do() -> None:
    result = run(str(GOLDEN))
    assert result.exit_code == 0
    for words in ("UNDECIDED", "Measure next", "Change", "excluded", "932.00 MiB", "changes "):
        assert words in result.stdout


def test_everything_is_shown_on_request() -> None:
    result = run(str(GOLDEN), "--all")
    assert result.stdout.count("excluded ") >= 6
    assert "What to change" in result.stdout
    assert '{"optimizer": "adafactor"}' in result.stdout


@pytest.mark.parametrize("width", [80, 110])
def test_every_fault_fits_a_screen_with_the_answer_first_and_whole_lines_to_paste(
    width: int,
) -> None:
    for fault in json.loads((DATA / "oom_faults.json").read_text()):
        found = diagnose_case(Case.from_dict(fault["case"]))
        output = StringIO()
        show_diagnosis(Console(width=width, file=output), found)
        rows = output.getvalue().splitlines()
        assert sum(max(1, -(-len(row) // width)) for row in rows) <= SCREEN_LINES, fault["id"]
        assert rows[0].startswith(str(found.cause).replace("_", " ").upper()), fault["id"]
        if found.remedies and found.remedies[0].lines:
            assert any(row.endswith(found.remedies[0].lines[0].line) for row in rows), fault["id"]


def test_no_sentence_is_cut_inside_a_word() -> None:
    for fault in json.loads((DATA / "oom_faults.json").read_text()):
        found = diagnose_case(Case.from_dict(fault["case"]))
        whole, short = StringIO(), StringIO()
        show_everything(Console(width=4000, file=whole), found)
        show_diagnosis(Console(width=80, file=short), found)
        words = set(whole.getvalue().split())
        for row in short.getvalue().splitlines():
            if row.endswith("…"):
                assert row.split()[-2] in words, row


def test_a_certain_cause_is_the_first_word(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0\n")
    assert run(str(log)).stdout.startswith("HOST MEMORY (certain)")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--device-memory", "64"], "device_memory"),
        (["/no/such/file.log"], "source"),
        (["--ranks", "-3"], "ranks"),
    ],
)
def test_a_mistake_names_its_field_and_exits_with_2(arguments: list[str], field: str) -> None:
    result = run(*arguments, "--json", stdin="")
    assert result.exit_code == 2
    assert json.loads(result.stdout.splitlines()[0])["error"]["field"] == field


def test_the_score_prints_every_report_and_the_sums() -> None:
    reports = json.loads((DATA / "oom_reports.json").read_text())[:4]
    text = table(score(reports))
    assert all(report["id"] in text for report in reports)
    assert text.splitlines()[-1].startswith("1 firm reports with a cause: 1 causes right")
