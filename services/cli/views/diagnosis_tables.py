"""Everything that a diagnosis holds, as tables: what `stillhouse diagnose --all` prints."""

from __future__ import annotations

import json

from rich.table import Table
from rich.text import Text

from services.cli.terminal import Console
from services.shared.memory.forensics.diagnosis import (
    Confidence,
    Diagnosis,
    Hypothesis,
    Remedy,
    Strength,
)
from services.shared.memory.oom_log.message_parser import excerpt
from services.shared.memory.planning.plan_contract import Verdict
from services.shared.memory.sizes import format_size

_STYLES = {
    Confidence.CERTAIN: "bold red",
    Confidence.LIKELY: "bold yellow",
    Confidence.UNDECIDED: "bold cyan",
}
_MARKS = {
    Strength.CERTAIN: ("certain", "bold green"),
    Strength.LIKELY: ("likely", "green"),
    Strength.POSSIBLE: ("left", "yellow"),
    Strength.EXCLUDED: ("excluded", "red"),
}
_VERDICTS = {
    Verdict.FITS: ("fits", "green"),
    Verdict.TIGHT: ("tight", "yellow"),
    Verdict.DOES_NOT_FIT: ("no", "red"),
    Verdict.UNKNOWN: ("unknown", "default"),
}
_MOST_CANDIDATES = 3


def show_everything(console: Console, diagnosis: Diagnosis) -> None:
    """Print all of `diagnosis`, the verdict first and what to do last."""
    console.print(headline(diagnosis))
    console.print(_facts(diagnosis))
    if diagnosis.hypotheses:
        console.print(_explanations(diagnosis.hypotheses))
    if diagnosis.next_measurement:
        console.print(Text.assemble(("Measure next: ", "bold"), diagnosis.next_measurement))
    if diagnosis.remedies:
        console.print(_remedies(diagnosis))
        for remedy in diagnosis.remedies:
            for text in lines_to_paste(remedy):
                console.print(text, soft_wrap=True)
    for note in diagnosis.notes:
        console.print(Text(f"Note: {note}.", style="dim"))


def headline(diagnosis: Diagnosis) -> Text:
    """Return the answer in one sentence, or what is missing for one."""
    style = _STYLES[diagnosis.confidence]
    cause = str(diagnosis.cause).replace("_", " ")
    text = Text(cause.upper(), style=style)
    if diagnosis.confidence is not Confidence.UNDECIDED:
        text.append(f" ({diagnosis.confidence})", style=style)
    text.append(f"  {diagnosis.summary}", style="not bold default")
    return text


def _facts(diagnosis: Diagnosis) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, value in facts(diagnosis):
        grid.add_row(name, Text(value))
    return grid


def facts(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Return what was read and computed, each with its name: message, request, sharding, needs."""
    named = (
        ("Message", _message_line(diagnosis)),
        ("Request", _request_line(diagnosis)),
        ("Sharded", f"{diagnosis.sharded}: {'; '.join(diagnosis.sharded_evidence)}"),
        ("Needs", _needs_line(diagnosis)),
    )
    return [(name, value) for name, value in named if value]


def lines_to_paste(remedy: Remedy) -> list[Text]:
    """Return the lines of a remedy with their launchers, our own `changes` as JSON last."""
    named = [(str(line.launcher), line.line) for line in remedy.lines]
    if remedy.changes:
        named.append(("changes", json.dumps(remedy.changes)))
    return [Text.assemble((f"  {name:<13} ", "dim"), line) for name, line in named]


def _message_line(diagnosis: Diagnosis) -> str:
    message, accounts = diagnosis.message, diagnosis.accounts
    if message is None:
        return "none found"
    if accounts.requested_bytes is None and accounts.allocated_bytes is None:
        return f"{message.backend}, {message.kind}: {excerpt(message.text, 0, 90)}"
    parts = []
    for size, words in (
        (accounts.requested_bytes, "requested"),
        (accounts.allocated_bytes, "allocated"),
        (accounts.cached_bytes, "cached, unallocated"),
        (accounts.free_bytes, "free"),
        (accounts.outside_bytes, "outside of torch"),
        (accounts.total_bytes, "card"),
    ):
        if size is not None:
            parts.append(f"{format_size(size)} {words}")
    return f"{str(message.backend).upper()}: {', '.join(parts)} [{message.format_id}]"


def _request_line(diagnosis: Diagnosis) -> str:
    lines = []
    for found in diagnosis.request[:_MOST_CANDIDATES]:
        match = str(found.match).replace("_", " ") + (", ambiguous" if found.ambiguous else "")
        lines.append(f"{found.what}, {found.dtype}, {format_size(found.size_bytes)} ({match})")
    return "\n".join(lines)


def _needs_line(diagnosis: Diagnosis) -> str:
    needs, planned = diagnosis.needs, diagnosis.planned
    parts = []
    if needs:
        parts.append(
            f"{needs.num_parameters / 1e9:.3f} B parameters x {needs.bytes_per_parameter} B = "
            f"{format_size(needs.whole_state_bytes)}"
        )
    if needs and needs.rank_state_bytes:
        parts.append(f"{format_size(needs.rank_state_bytes)} a rank before any activation")
    if planned:
        verdict = str(planned.verdict).replace("_", " ")
        fused = planned.fused_peak_bytes
        instead = f", {format_size(fused)} fused" if fused else ""
        parts.append(
            f"planned peak {format_size(planned.peak_bytes)} "
            f"({planned.optimizer_impl} optimizer{instead}) of "
            f"{format_size(planned.budget_bytes)} usable: {verdict}"
        )
    return "; ".join(parts)


def _explanations(hypotheses: tuple[Hypothesis, ...]) -> Table:
    """Return a row for each hypothesis: its predictions where computed, else its reasons."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("Explanation", ratio=5)
    table.add_column("allocated", no_wrap=True, justify="right")
    table.add_column("requests", no_wrap=True, justify="right")
    table.add_column("where, and why", ratio=5)
    for hypothesis in hypotheses:
        mark, style = _MARKS[hypothesis.strength]
        table.add_row(
            Text(mark, style=style),
            Text(hypothesis.what),
            _size(hypothesis.predicted_allocated_bytes),
            _size(hypothesis.predicted_request_bytes),
            Text(why(hypothesis)),
        )
    return table


def _size(size: int | None) -> str:
    return "" if size is None else format_size(size)


def why(hypothesis: Hypothesis) -> str:
    """Return the evidence for and against a hypothesis."""
    if not hypothesis.where:
        return "; ".join((*hypothesis.reasons, *hypothesis.objections))
    if hypothesis.strength is Strength.EXCLUDED:
        never = [text for text in hypothesis.objections if " never " in text or "nothing" in text]
        return "; ".join((hypothesis.where, *(text.rpartition("; ")[2] for text in never)))
    tokens = " or ".join(f"{tokens:,}" for tokens in hypothesis.tokens)
    parts = [hypothesis.where, f"{tokens} tokens" if tokens else "", *hypothesis.objections]
    return "; ".join(part for part in parts if part)


def _remedies(diagnosis: Diagnosis) -> Table:
    fewer = next((r.one_rank_less.ranks for r in diagnosis.remedies if r.one_rank_less), None)
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("What to change", ratio=4)
    table.add_column("peak a rank", no_wrap=True)
    if fewer:
        table.add_column(f"on {fewer}", no_wrap=True)
    table.add_column("costs", ratio=4)
    for remedy in diagnosis.remedies:
        cells = [Text(remedy.change), peak(remedy.predicted_peak_bytes, remedy.verdict)]
        if fewer:
            less = remedy.one_rank_less
            cells.append(peak(less.predicted_peak_bytes, less.verdict) if less else Text(""))
        table.add_row(*cells, Text(remedy.costs.partition(";")[0]))
    return table


def peak(size: int | None, verdict: Verdict) -> Text:
    """Return a peak and whether it fits."""
    if size is None:
        return Text("")
    word, style = _VERDICTS[verdict]
    return Text(f"{size / 2**30:.2f} GiB {word}", style=style)
