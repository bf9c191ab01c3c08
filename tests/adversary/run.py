"""Attacks a real API on loopback and prints what held: `make adversary`.

    python -m tests.adversary.run [NAME...]

Every attack is bounded in time and size. The exit code is 1 where one had an effect.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.adversary.attacks import ATTACKS, Attack, NotHeld
from tests.adversary.target import Target, target


def main() -> None:
    """Run the attacks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=", ".join(each.name for each in ATTACKS))
    names = parser.parse_args().names
    attacks = [each for each in ATTACKS if not names or each.name in names]
    table = Table("attack", "held", "seen", "seconds", box=None)
    num_failed = 0
    with tempfile.TemporaryDirectory() as directory, target(Path(directory)) as attacked:
        for attack in attacks:
            started = time.monotonic()
            held, seen = attempt(attack, attacked)
            num_failed += not held
            seconds = time.monotonic() - started
            table.add_row(attack.tries, "yes" if held else "NO", seen, f"{seconds:.1f}")
            print(f"{'held' if held else 'NOT HELD':<8} {attack.name}: {seen}", flush=True)
    Console(width=140).print(table)
    print(f"{len(attacks) - num_failed} of {len(attacks)} held")
    sys.exit(int(num_failed > 0))


def attempt(attack: Attack, attacked: Target) -> tuple[bool, str]:
    """Return whether an attack was held, and what was seen."""
    try:
        return True, attack.act(attacked)
    except NotHeld as seen:
        return False, str(seen)
    except Exception as error:  # noqa: BLE001 - an attack that breaks its own client was not held
        return False, f"{type(error).__name__}: {error}"[:200]


if __name__ == "__main__":
    main()
