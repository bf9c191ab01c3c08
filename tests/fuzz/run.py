"""Runs schemathesis against a real API with all its routes: `make fuzz`.

    python -m tests.fuzz.run SCHEMATHESIS [--examples N] [--seed N] [--directory DIR]

SCHEMATHESIS is its executable, in a separate environment. Counts come from the API's own metrics.
Exits with 1 if a check failed, a response was a 5xx other than 503, or there were too few requests.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from services.api.problems import PROBLEM_TYPES
from tests.fuzz.api_alone import ApiAlone, api_alone
from tests.fuzz.seed import Seeds, seed

HERE = Path(__file__).parent
FEWEST_REQUESTS = 5000
SETTINGS = {
    # The fuzzer sends requests with one key as fast as it can, and invalid keys too.
    "requests_per_second": "0",
    "predict_per_second": "0",
    "wrong_keys_per_minute": "0",
    # The event stream of a job that never runs would not end.
    "event_stream_seconds": "0.1",
    "event_poll_seconds": "0.05",
    "upload_limit_bytes": str(2**20),
}


class Answer(NamedTuple):
    """The labels of the request counter."""

    method: str
    route: str
    status: int


def main() -> None:
    """Start a platform, seed and fuzz it, and report the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("schemathesis", type=Path)
    parser.add_argument("--examples", type=int, default=100, help="Per operation and phase.")
    parser.add_argument("--seed", type=int, help="Repeats a run; random by default.")
    parser.add_argument("--directory", type=Path, default=Path(".stillhouse/fuzz/platform"))
    options = parser.parse_args()
    shutil.rmtree(options.directory, ignore_errors=True)
    with api_alone(options.directory, **SETTINGS) as api:
        seeds = seed(api)
        before = answers(api)
        code = fuzz(api, seeds, options)
        found = answers(api) - before
    crashes = [line for line in api.log.read_text().splitlines() if "request_failed" in line]
    total = sum(found.values())
    by_status: Counter[int] = Counter()
    for answer, count in found.items():
        by_status[answer.status] += count
    known = {(answer.method, answer.route) for answer in found if answer.status < 405}
    done = {(answer.method, answer.route) for answer in found if answer.status < 300}
    print(f"\nThe API answered {total} requests:", dict(sorted(by_status.items())))
    print(f"Operations that succeeded at least once: {len(done)}; never:", sorted(known - done))
    print(f"Requests that broke something on the server: {len(crashes)} (in {api.log})")
    broken = sum(count for status, count in by_status.items() if status >= 500 and status != 503)
    if code or broken or crashes or total < FEWEST_REQUESTS:
        sys.exit(f"fuzz: failed (schemathesis ended with {code}, {broken} answers were 5xx)")
    print("fuzz: passed")


def fuzz(api: ApiAlone, seeds: Seeds, options: argparse.Namespace) -> int:
    """Run schemathesis with every phase and check; return its exit code."""
    directory = api.log.parents[1].resolve()
    config = directory / "schemathesis.toml"
    config.write_text((HERE / "schemathesis.toml").read_text() + _dictionaries(seeds))
    command = [str(options.schemathesis.absolute()), "--config-file", str(config), "run"]
    command += [f"{api.url}/openapi.json", "--header", f"Authorization: Bearer {api.key}"]
    command += [
        "--checks",
        "all",
        "--mode",
        "all",
        "--phases",
        "examples,coverage,fuzzing,stateful",
    ]
    command += ["--max-examples", str(options.examples), "--no-color"]
    command += ["--report", "json", "--report-dir", str(directory / "report")]
    if options.seed is not None:
        command += ["--seed", str(options.seed)]
    kinds = {slug: status for slug, (status, _) in PROBLEM_TYPES.items()}
    env = {
        **os.environ,
        "PYTHONPATH": str(HERE.parents[1]),
        "SCHEMATHESIS_HOOKS": "tests.fuzz.hooks",
        "FUZZ_DATASET_ID": seeds.dataset_id,
        "FUZZ_PROBLEM_KINDS": json.dumps(kinds),
    }
    # schemathesis leaves its files for `st replay` in the working directory.
    return subprocess.run(command, env=env, cwd=directory, check=False).returncode


def _dictionaries(seeds: Seeds) -> str:
    values = {
        "job_ids": seeds.job_ids,
        "dataset_ids": [seeds.dataset_id],
        "model_ids": [seeds.model_id, *seeds.job_ids],
    }
    # A JSON list of plain strings is a TOML array.
    return "".join(f"\n[dictionaries.{n}]\nvalues = {json.dumps(v)}\n" for n, v in values.items())


def answers(api: ApiAlone) -> Counter[Answer]:
    """Return the request counts of the API's metrics by method, route and status."""
    with api.client() as client:
        text = client.get("/metrics").text
    line = r'^stillhouse_http_requests_total\{method="(.*?)",route="(.*?)",status="(.*?)"\} (\S+)$'
    found: Counter[Answer] = Counter()
    for method, route, status, count in re.findall(line, text, re.MULTILINE):
        found[Answer(method, route, int(status))] += int(float(count))
    return found


if __name__ == "__main__":
    main()
