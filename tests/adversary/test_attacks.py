"""Each attack that takes seconds, against a real API; `make adversary` runs the longer ones too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.adversary.attacks import ATTACKS, Attack, NotHeld
from tests.adversary.run import attempt
from tests.adversary.target import Target, target


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with target(tmp_path_factory.mktemp("adversary")) as found:
        yield found


@pytest.mark.parametrize(
    "attack", [each for each in ATTACKS if not each.is_long], ids=lambda each: each.name
)
def test_an_attack_has_no_effect(attacked: Target, attack: Attack) -> None:
    attack.act(attacked)


def _breaks(_: Target) -> str:
    raise NotHeld("it broke")


def _raises(_: Target) -> str:
    raise ConnectionError("the server is gone")


def test_an_attack_with_an_effect_is_reported(attacked: Target) -> None:
    assert attempt(Attack("breaks", _breaks), attacked) == (False, "it broke")
    held, seen = attempt(Attack("raises", _raises), attacked)
    assert not held
    assert "the server is gone" in seen
