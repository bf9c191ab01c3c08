"""Writes docs/reference.md from the code: `python -m tools.make_reference`.

A test compares the file with what this prints, so the reference cannot rot. Meanings that no code
holds stand here, and a state or reason without one is an error.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from services.api.app import create_app
from services.api.settings import ApiSettings
from services.cli.main import app as command_line
from services.shared.jobs import spec
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.state import TRANSITIONS, JobState, Phase, Reason
from services.shared.jobs.views import EventType

TARGET = Path(__file__).parents[1] / "docs" / "reference.md"

STATES = {
    JobState.WAITING: "A distillation whose teacher job has not ended yet.",
    JobState.QUEUED: "Ready; waits for a worker.",
    JobState.RUNNING: "A worker holds its lease; `phase` says what the ranks do.",
    JobState.CANCELLING: "Asked to stop; the ranks save a checkpoint and leave.",
    JobState.SUCCEEDED: "Its model is registered.",
    JobState.FAILED: "`reason` and `message` say why; it can be retried.",
    JobState.CANCELLED: "Ended on request; it can be retried and goes on from its checkpoint.",
}
PHASES = {
    Phase.LAUNCHING: "The worker has claimed the job and starts torchrun.",
    Phase.LOADING: "Each rank reads its part of the weights.",
    Phase.WRAPPING: "The model is sharded and what each rank holds is checked.",
    Phase.TRAINING: "Optimizer steps.",
    Phase.EVALUATING: "The validation split is scored.",
    Phase.SAVING: "A checkpoint is written.",
    Phase.EXPORTING: "The artifact is written, unit by unit.",
    Phase.FINISHING: "The artifact is sealed and the report written.",
}
REASONS = {
    Reason.DEVICE_OUT_OF_MEMORY: "A rank's accelerator ran out; see `diagnosis` and its remedies.",
    Reason.HOST_OUT_OF_MEMORY: "The host ran out: an allocation failed, or the kernel killed a rank.",
    Reason.NOT_SHARDED: "A rank held more parameters than planned after wrapping; stopped before step 1.",
    Reason.BAD_DATA: "The dataset is gone or does not suit the job.",
    Reason.BAD_MODEL: "The model cannot be found, read or used.",
    Reason.BAD_CHECKPOINT: "The checkpoint to resume from is broken or belongs to another job.",
    Reason.BAD_SPEC: "The ranks found a contradiction that admission could not see.",
    Reason.NON_FINITE_LOSS: "The loss or the gradient became NaN or infinite; `message` names the step.",
    Reason.NON_FINITE_TEACHER: "The teacher's own logits are not finite.",
    Reason.DISK_FULL: "No space was left; the last good checkpoint is kept.",
    Reason.COLLECTIVE_TIMEOUT: "Ranks waited in vain for each other and none of them says why.",
    Reason.LAUNCH_FAILED: "The ranks did not start; the end of torchrun.log says why.",
    Reason.CRASHED: "A rank ended by an error or a signal of another kind.",
    Reason.LOST: "Its worker fell silent and no attempt was left.",
    Reason.TIMED_OUT: "It ran longer than `timeout_seconds`.",
    Reason.PARENT_FAILED: "The teacher job that it waited for did not succeed.",
    Reason.CANCELLED: "Somebody asked for it.",
}
EVENTS = {
    EventType.STATE: "The job moved: `state`, and `reason` and `message` where there are any.",
    EventType.PHASE: "The ranks began something else: `phase`.",
    EventType.EVALUATION: "The validation split was scored: `evaluation`, `step`, `epoch`.",
}
_SPECS = (
    spec.TeacherSpec,
    spec.DistillSpec,
    spec.ChainSpec,
    spec.ModelSource,
    spec.TrainedTokenizer,
    spec.TeacherSource,
    spec.Training,
    spec.Recipe,
    spec.Resources,
    spec.Distillation,
    spec.Gate,
)


def main() -> None:
    """Write the reference."""
    TARGET.write_text(render(), encoding="utf-8")


def render() -> str:
    """Return the whole reference as Markdown."""
    parts = [
        "# Reference",
        "Made by `python -m tools.make_reference`; a test keeps it true. Edit the code, not this file.",
        *_states(),
        *_section("Phases", "phase", PHASES, Phase),
        *_section("Reasons", "reason", REASONS, Reason),
        *_section("Events", "event", EVENTS, EventType),
        *_routes(),
        "## Job specs",
        "The body of `POST /jobs`, chosen by `kind`: `teacher` (TeacherSpec), `distill` (DistillSpec) or "
        "`chain` (ChainSpec).",
        *(block for model in _SPECS for block in _fields(model)),
        *_settings(),
        *_commands(),
    ]
    return "\n\n".join(parts) + "\n"


def _states() -> Iterator[str]:
    yield "## States"
    rows = []
    for state in JobState:
        targets = ", ".join(f"`{t}`" for t in JobState if t in TRANSITIONS[state]) or "nothing"
        rows.append((f"`{state}`", STATES[state], targets))
    yield _table(("state", "meaning", "becomes"), rows)


def _section(
    title: str, column: str, meanings: dict[Any, str], members: type[enum.Enum]
) -> Iterator[str]:
    yield f"## {title}"
    yield _table((column, "meaning"), [(f"`{m}`", meanings[m]) for m in members])


def _routes() -> Iterator[str]:
    yield "## Routes"
    yield "Schemas and examples are at `/docs` of a running API."
    rows = [(f"`{route}`", sentence(operation)) for route, operation in routes().items()]
    yield _table(("route", "what it does"), rows)


def sentence(operation: dict[str, Any]) -> str:
    """Return what an operation says of itself, in one line."""
    return str(operation.get("description") or operation["summary"]).split("\n")[0]


def routes() -> dict[str, dict[str, Any]]:
    """Return the API's operations by `METHOD /path`; its parts are not needed for that."""
    api = create_app(_NoParts())  # type: ignore[arg-type]
    return {
        f"{method.upper()} {path}": operation
        for path, operations in api.openapi()["paths"].items()
        for method, operation in operations.items()
    }


class _NoParts:
    """Stands where the API's parts would be; nothing is called on it that matters here."""

    def __getattr__(self, name: str) -> _NoParts:
        return _NoParts()

    def __call__(self, *_: object) -> _NoParts:
        return self


def _fields(model: type[BaseModel]) -> Iterator[str]:
    yield f"### {model.__name__}"
    yield (model.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
    properties = model.model_json_schema().get("properties", {})
    rows = []
    for name, field in model.model_fields.items():
        default = "needed" if field.is_required() else f"`{_default(field.default)}`"
        rows.append((f"`{name}`", _type(properties[name]), default, field.description or ""))
    yield _table(("field", "type", "default", "meaning"), rows)


def _default(value: Any) -> str:
    if isinstance(value, BaseModel):
        return f"{type(value).__name__}()"
    if isinstance(value, enum.Enum):
        return str(value.value)
    return "-" if value is PydanticUndefined else str(value)


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(choice) for choice in schema["anyOf"])
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return ", ".join(str(value) for value in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    bounds = [
        f"{sign} {schema[key]}"
        for key, sign in (
            ("minimum", ">="),
            ("exclusiveMinimum", ">"),
            ("maximum", "<="),
            ("exclusiveMaximum", "<"),
        )
        if key in schema
    ]
    return " ".join([str(schema.get("type", "object")), *bounds])


def _settings() -> Iterator[str]:
    yield "## Settings"
    yield "Read from the environment by API and workers; those of the API alone come second."
    own = [name for name in ApiSettings.model_fields if name not in JobSettings.model_fields]
    for title, names in (("API and workers", list(JobSettings.model_fields)), ("API", own)):
        rows = []
        for name in names:
            field = ApiSettings.model_fields[name]
            default = "needed" if field.is_required() else f"`{_default(field.default)}`"
            rows.append((f"`STILLHOUSE_{name.upper()}`", default, field.description or ""))
        yield f"### {title}"
        yield _table(("variable", "default", "meaning"), rows)


def _commands() -> Iterator[str]:
    yield "## Command line"
    for path, command in commands():
        yield f"### `{path}`"
        yield (command.help or "").strip().split("\n")[0]
        rows = []
        for parameter in command.params:
            if parameter.name == "help":
                continue
            names = [*parameter.opts, *parameter.secondary_opts]
            is_option = isinstance(parameter, click.Option) or names[0].startswith("-")
            shown = ", ".join(f"`{n}`" for n in names) if is_option else f"`{names[0].upper()}`"
            rows.append((shown, getattr(parameter, "help", None) or ""))
        if rows:
            yield _table(("argument or option", "meaning"), rows)


def commands() -> list[tuple[str, Any]]:
    """Return every command with its whole name, in the order of `--help`."""
    return list(_walk("stillhouse", typer.main.get_command(command_line)))


def _walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        for name, child in command.commands.items():
            yield from _walk(f"{path} {name}", child)
    else:
        yield path, command


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ").strip()


if __name__ == "__main__":
    main()
