"""docs/reference.md matches the code and is complete."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import pytest

from services.api.settings import ApiSettings
from services.shared.jobs.state import JobState, Phase, Reason
from services.shared.jobs.views import EventType
from tools import make_reference

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def reference() -> str:
    return (DOCS / "reference.md").read_text(encoding="utf-8")


def test_the_reference_matches_the_code(reference: str) -> None:
    assert reference == make_reference.render(), "run: python -m tools.make_reference"


@pytest.mark.parametrize("member", [*JobState, *Phase, *Reason, *EventType])
def test_every_state_phase_reason_and_event_is_explained(member: Enum, reference: str) -> None:
    assert f"| `{member.value}` |" in reference


@pytest.mark.parametrize("name", ApiSettings.model_fields)
def test_every_setting_is_explained(name: str, reference: str) -> None:
    assert f"| `STILLHOUSE_{name.upper()}` |" in reference


def test_every_route_is_described(reference: str) -> None:
    routes = make_reference.routes()
    assert len(routes) > 20
    for route, operation in routes.items():
        assert f"| `{route}` | {make_reference.sentence(operation)[:20]}" in reference


def test_every_command_line_option_is_listed(reference: str) -> None:
    commands = make_reference.commands()
    assert len(commands) > 15
    for path, command in commands:
        section = reference.partition(f"### `{path}`")[2].partition("\n### ")[0]
        assert section.strip(), path
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("--") and option != "--help":
                    assert f"`{option}`" in section, (path, option)


def test_every_command_has_a_json_option() -> None:
    for path, command in make_reference.commands():
        options = {option for parameter in command.params for option in parameter.opts}
        assert "--json" in options, path
