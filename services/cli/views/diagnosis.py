"""A diagnosis on one screen: the answer, the facts behind it, and lines to paste."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from services.cli.terminal import Console
from services.cli.views.diagnosis_tables import facts, headline, lines_to_paste, peak, why
from services.shared.memory.forensics.diagnosis import (
    Confidence,
    Diagnosis,
    Hypothesis,
    Remedy,
    Strength,
)

# Lines of the smallest terminal that people still open.
SCREEN_LINES = 24
_MOST_LEFT = 4
_MOST_REMEDIES = 3
_LINES_OF_THE_FIRST = 4
_LINES_OF_OTHERS = 2
_LONGEST_MEASUREMENT = 3  # lines
_LABEL = 9  # columns


def show_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """Print `diagnosis` on one screen, the answer first; sentences are shortened, lines to paste are not."""
    width = console.width
    lines = [
        _shortened(headline(diagnosis), 2 * width),
        *(_fact(name, value, width) for name, value in facts(diagnosis)),
        *_explanations(diagnosis, width),
    ]
    if diagnosis.next_measurement:
        measure = Text.assemble(("Measure next: ", "bold"), diagnosis.next_measurement)
        lines.append(_shortened(measure, _LONGEST_MEASUREMENT * width - 20))
    taken = sum(-(-len(line) // width) for line in lines) + 2
    lines += _changes(diagnosis, width, room=SCREEN_LINES - taken)
    for line in lines:
        console.print(line, soft_wrap=True)
    rest = _rest(diagnosis)
    if rest:
        console.print(Text(f"More with --all: {rest}.", style="dim"), soft_wrap=True)


def _fact(name: str, value: str, width: int) -> Text:
    first = value.split("\n")[0]
    text = Text.assemble((f"{name:<{_LABEL}}", "bold"), first)
    return _shortened(text, width)


def _shortened(text: Text, most: int) -> Text:
    """Return `text` with at most `most` columns, cut between words."""
    if len(text) <= most:
        return text
    cut = text.plain.rfind(" ", 0, most - 1)
    return text[: cut if cut > 0 else most - 2] + Text(" …")


def _explanations(diagnosis: Diagnosis, width: int) -> Iterator[Text]:
    """Yield why the first explanation holds, or each that is left."""
    if diagnosis.confidence is not Confidence.UNDECIDED:
        best = diagnosis.hypotheses[0]
        yield _fact("Why", why(best), width)
        return
    left = [h for h in diagnosis.hypotheses if h.strength is not Strength.EXCLUDED]
    for hypothesis in left[:_MOST_LEFT]:
        yield _fact("Left", f"{hypothesis.what}: {_reason(hypothesis)}", width)


def _reason(hypothesis: Hypothesis) -> str:
    return why(hypothesis) or str(hypothesis.cause).replace("_", " ")


def _changes(diagnosis: Diagnosis, width: int, *, room: int) -> Iterator[Text]:
    for index, remedy in enumerate(diagnosis.remedies[:_MOST_REMEDIES]):
        pasted = lines_to_paste(remedy)[: _LINES_OF_OTHERS if index else _LINES_OF_THE_FIRST]
        needed = 1 + sum(-(-len(line) // width) for line in pasted)
        if index and needed > room:
            return
        room -= needed
        yield _change(remedy, width)
        yield from pasted


def _change(remedy: Remedy, width: int) -> Text:
    planned = peak(remedy.predicted_peak_bytes, remedy.verdict)
    text = Text.assemble((f"{'Change':<{_LABEL}}", "bold"), remedy.change)
    if not planned:
        return _shortened(text, width)
    return _shortened(text, width - len(planned) - 2) + Text("  ") + planned


def _rest(diagnosis: Diagnosis) -> str:
    excluded = sum(h.strength is Strength.EXCLUDED for h in diagnosis.hypotheses)
    counted = (
        (excluded, "excluded explanations"),
        (len(diagnosis.remedies), "changes with all their lines"),
        (len(diagnosis.notes), "notes"),
    )
    return ", ".join(f"{count} {what}" for count, what in counted if count)
