"""`python -m tests.fuzz.logs`: diagnose thousands of mutated logs; every answer must serialise.

The logs are those of every report and message in tests/data. Each is diagnosed alone, and one in ten also with the
fields of its report, some of them removed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from services.shared.memory.errors import InvalidInput
from services.shared.memory.forensics.case import Case
from services.shared.memory.forensics.diagnose import diagnose

DATA = Path(__file__).parents[1] / "data"
_INSERTED = (
    "",
    "9" * 20,
    " GiB",
    "\n",
    "(",
    "\ufffd",
    "-9",
    " 1e999 ",
    "%s",
    "\0",
    "\x1b[31m",
    "[rank3]: ",
)

_WITH_FIELDS = 10  # timelines of a known model take longer than all of the parsing
_KEPT = 0.8  # of a report's fields


def mutated(text: str, chance: random.Random) -> str:
    """Return `text` with one to six pieces removed, inserted, repeated or moved."""
    for _ in range(chance.randint(1, 6)):
        start = chance.randrange(len(text) + 1)
        end = min(len(text), start + chance.randint(0, 30))
        kind = chance.randrange(4)
        if kind == 0:
            text = text[:start] + text[end:]
        elif kind == 1:
            text = text[:start] + chance.choice(_INSERTED) + text[start:]
        elif kind == 2:
            text = text[:start] + text[start:end] * 3 + text[end:]
        else:
            text = text[end:] + text[:start]
    return text


def known_cases() -> list[dict[str, Any]]:
    """Return the cases of all reports, and one for each message of the catalogue."""
    cases = [
        report["case"]
        for path in sorted(DATA.glob("oom_*.json"))
        if path.name != "oom_messages.json"
        for report in json.loads(path.read_text(encoding="utf-8"))
    ]
    messages = json.loads((DATA / "oom_messages.json").read_text(encoding="utf-8"))
    return [*cases, *({"log": sample["message"]} for sample in messages)]


def main() -> None:
    """Diagnose `--logs` mutated logs; an exception ends the run with the case that raised it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=16)
    options = parser.parse_args()
    chance, cases = random.Random(options.seed), known_cases()
    began, refused, longest = time.monotonic(), 0, 0.0
    for number in range(options.logs):
        report = chance.choice(cases)
        log = mutated(str(report.get("log", "")), chance)
        stated = report if number % _WITH_FIELDS == 0 else {}
        case = {name: value for name, value in stated.items() if chance.random() < _KEPT}
        case["log"] = log
        started = time.monotonic()
        try:
            assert json.dumps(diagnose(Case.from_dict(case)).to_dict())
        except InvalidInput:
            refused += 1
        except Exception:
            sys.stderr.write(f"log {number} of seed {options.seed}: {json.dumps(case)}\n")
            raise
        longest = max(longest, time.monotonic() - started)
    seconds = time.monotonic() - began
    sys.stdout.write(
        f"{options.logs:,} mutated logs of {len(cases)} cases in {seconds:.0f} s: no exception, "
        f"{refused} refused as invalid; longest {longest:.1f} s\n"
    )


if __name__ == "__main__":
    main()
