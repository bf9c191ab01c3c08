"""Whatever reaches a column, Postgres can keep it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import bindparam, select

from services.shared.jobs.db.column_types import CleanJson, CleanText
from services.shared.jobs.db.connection import transaction

if TYPE_CHECKING:
    from tests.jobs.conftest import StoreDriver

TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)
ON_ONE_DATABASE = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@ON_ONE_DATABASE
@given(value=JSON, text=TEXT)
def test_any_value_is_stored_clean(driver: StoreDriver, value: Any, text: str) -> None:
    with transaction(driver.store.engine) as session:
        kept, kept_text = session.execute(
            select(bindparam("value", value, CleanJson), bindparam("text", text, CleanText))
        ).one()
    json.dumps(kept, allow_nan=False)
    # Postgres keeps numbers, not their kind: 1e300 comes back as a whole number.
    assert (
        isinstance(kept, int | float if isinstance(value, float) else type(value)) or kept is None
    )
    assert len(kept_text) == len(text)
    kept_text.encode()
    assert "\x00" not in kept_text
