"""`docs/memory.md` says what the plan computes."""

import json
from pathlib import Path

from services.shared.memory.planning.ledger import Components
from tools.plan_errors import TRACES, table, trace_errors

_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs/memory.md").read_text(encoding="utf-8")


def test_the_page_s_table_of_errors_is_the_command_s() -> None:
    traces = json.loads((_ROOT / TRACES).read_text(encoding="utf-8"))
    written = _PAGE.split("<!-- errors: begin -->\n")[1].split("<!-- errors: end -->")[0]
    assert written.strip() == table(trace_errors(traces))


def test_the_page_explains_every_component() -> None:
    for name in Components._fields:
        assert f"| {name.replace('_', ' ')} |" in _PAGE
