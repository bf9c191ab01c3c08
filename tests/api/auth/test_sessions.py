"""Sessions: what a cookie proves, how long, and what ends it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from services.api.auth.keys import ApiKey, Keys, Scope
from services.api.auth.sessions import Sessions

KEY = ApiKey(sha256=hashlib.sha256(b"a key").hexdigest(), scopes=frozenset({Scope.READ}))
KEYS = Keys({"reader": KEY})


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sessions(tmp_path: Path, clock: Clock) -> Sessions:
    return Sessions(tmp_path / "secret", idle_seconds=3600, most_seconds=7200, clock=clock)


def test_a_cookie_names_its_key_and_every_process_accepts_it(
    sessions: Sessions, tmp_path: Path, clock: Clock
) -> None:
    cookie, session = sessions.start(KEY)
    other = Sessions(tmp_path / "secret", idle_seconds=3600, most_seconds=7200, clock=clock)
    assert other.find(cookie, KEYS) == ("reader", KEY, session)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert KEY.sha256 not in cookie


def test_no_part_of_a_cookie_can_be_changed(sessions: Sessions) -> None:
    cookie, _ = sessions.start(KEY)
    parts = cookie.split(".")
    for index, part in enumerate(parts):
        other = part[:-1] + ("1" if part[-1] != "1" else "2")
        assert sessions.find(".".join([*parts[:index], other, *parts[index + 1 :]]), KEYS) is None
    for broken in (
        "",
        "....",
        "a.b.c.d.e",
        cookie + ".x",
        "a" * 10_000,
        f"{parts[0]}...{parts[4]}",
    ):
        assert sessions.find(broken, KEYS) is None
    assert sessions.find(cookie, KEYS) is not None


def test_a_session_ends_after_its_time_unless_it_is_renewed(
    sessions: Sessions, clock: Clock
) -> None:
    cookie, session = sessions.start(KEY)
    assert sessions.renew(KEY, session) is None  # too early
    clock.now += 3000
    renewed = sessions.renew(KEY, session)
    assert renewed is not None
    clock.now += 1000
    assert sessions.find(cookie, KEYS) is None
    found = sessions.find(renewed[0], KEYS)
    assert found is not None
    assert found[2].csrf_token == session.csrf_token
    clock.now += 2000
    last = sessions.renew(KEY, renewed[1])
    assert last is not None
    assert last[1].expires == session.began + 7200  # not for ever
    clock.now = session.began + 7200
    assert sessions.find(last[0], KEYS) is None


def test_a_revoked_key_and_a_sign_out_end_a_session(sessions: Sessions) -> None:
    cookie, session = sessions.start(KEY)
    assert sessions.find(cookie, Keys({})) is None
    replaced = ApiKey(sha256=KEY.sha256[:16] + "0" * 48, scopes=KEY.scopes)
    assert sessions.find(cookie, Keys({"reader": replaced})) is None
    sessions.end(session)
    assert sessions.find(cookie, KEYS) is None


def test_another_secret_makes_every_cookie_invalid(
    sessions: Sessions, tmp_path: Path, clock: Clock
) -> None:
    cookie, _ = sessions.start(KEY)
    other = Sessions(tmp_path / "other", idle_seconds=3600, most_seconds=7200, clock=clock)
    assert other.find(cookie, KEYS) is None


def test_a_signature_of_any_characters_is_refused(sessions: Sessions) -> None:
    cookie, _ = sessions.start(KEY)
    unsigned = cookie.rsplit(".", 1)[0]
    for signature in ("", "0" * 64, "\xe9" * 64, "\ud800"):
        assert sessions.find(f"{unsigned}.{signature}", KEYS) is None
