"""A million rows from the upload to the first step: seconds, and memory of each rank.

    make bench-data

Texts are of 12 words, with ten classes. JSON lines and CSV are ingested in a process of their own; then a tiny
decoder is trained on two ranks until its first step, on the same dataset and on one of 1,000 rows.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import Qwen3Config, Qwen3Model

from services.shared.jobs.run_directory import (
    ProgressRecord,
    RunDirectory,
    RunInput,
    StopRequest,
    read_records,
    write_json,
)
from services.shared.model.tokens import train_tokenizer

RANKS = 2
LABELS = 10
WORDS = 12
REPOSITORY = Path(__file__).resolve().parents[2]
TINY: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def rows(count: int) -> Iterator[tuple[str, str]]:
    """Yield texts and labels, the same for the same count."""
    draw = random.Random(0)
    vocabulary = ["".join(draw.choices("abcdefghijklmnop", k=6)) for _ in range(2000)]
    for number in range(count):
        text = " ".join([*draw.choices(vocabulary, k=WORDS), str(number)])
        yield text, f"class {number % LABELS}"


def write_jsonl(path: Path, count: int) -> None:
    """Write a file of JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        for text, label in rows(count):
            file.write(json.dumps({"text": text, "label": label}) + "\n")


def write_csv(path: Path, count: int) -> None:
    """Write a CSV file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows(rows(count))


_INGEST = """
import sys, time
from pathlib import Path
from services.shared.datasets.ingest import ingest
from services.shared.datasets.upload import Layout
layout = Layout.model_validate({"heads": [{"name": "label"}]})
started = time.monotonic()
ingest(Path(sys.argv[1]), layout=layout, id=sys.argv[3], name="x", datasets_dir=Path(sys.argv[2]))
status = Path("/proc/self/status").read_text()  # ru_maxrss would include the process that forked this one
print(time.monotonic() - started, int(status.split("VmHWM:")[1].split()[0]) / 1024)
"""


def ingest(upload: Path, directory: Path, name: str) -> tuple[float, float]:
    """Store an upload in a process of its own; return its seconds and the MiB of its peak."""
    command = [sys.executable, "-c", _INGEST, str(upload), str(directory), name]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    seconds, peak = map(float, found.stdout.split())
    return seconds, peak


def write_model(directory: Path) -> Path:
    """Write an untrained decoder and its tokenizer."""
    tokenizer = train_tokenizer(
        (text for text, _ in rows(1000)), vocab_size=4000, directory=directory
    )
    Qwen3Model(Qwen3Config(vocab_size=len(tokenizer), **TINY)).save_pretrained(str(directory))
    return directory


def first_step(run: RunDirectory, dataset: Path, model: Path) -> tuple[float, list[float]]:
    """Return the seconds until the first step, and the MiB of each rank after it."""
    recipe = {"compute": "float32", "reduce": "float32"}
    task = RunInput.model_validate(
        {
            "job_id": "job_bench",
            "attempt": 1,
            "spec": {
                "kind": "teacher",
                "dataset_id": "ds_bench",
                "model": {"path": "model"},
                "training": {"max_length": 64, "batch_size": 64, "micro_batch_tokens": 4096},
                "recipe": recipe,
            },
            "dataset_dir": dataset,
            "model_dir": model,
            "recipe": recipe,
        }
    )
    write_json(run.spec, task)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(RANKS), "-m", "services.trainer.main", str(run.path)]
    started = time.monotonic()
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE
    )
    peaks: dict[int, float] = {}
    while process.poll() is None:
        peaks |= dict(enumerate(_peaks(process.pid)))
        records = [record for _, record in read_records(run.progress, ProgressRecord)]
        if any(record.step for record in records):
            break
        time.sleep(0.2)
    else:
        raise RuntimeError(process.stderr.read().decode()[-2000:] if process.stderr else "")
    seconds = time.monotonic() - started
    write_json(run.stop, StopRequest(reason="cancelled"))
    process.communicate(timeout=600)
    for record in records:
        if record.message:
            print(f"  {record.message}", flush=True)
    return seconds, list(peaks.values())


def _peaks(parent: int) -> list[float]:
    """Return the most MiB that each child of a process has had, by process id."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    found = []
    for child in sorted(map(int, children)):
        with contextlib.suppress(OSError, IndexError):
            status = Path(f"/proc/{child}/status").read_text()
            found.append(int(status.split("VmHWM:")[1].split()[0]) / 1024)
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        print(f"load: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors", flush=True)
        for name, write in (("csv", write_csv), ("jsonl", write_jsonl)):
            upload = root / f"rows.{name}"
            write(upload, options.rows)
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds, peak = ingest(upload, root / "datasets", name)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print(
                f"{name}: {upload.stat().st_size / 1e6:.0f} MB ingested in {seconds:.1f} s "
                f"({cpu:.1f} s of processor time), peak {peak:.0f} MiB",
                flush=True,
            )
            upload.unlink()
        write_jsonl(root / "few", 1000)
        ingest(root / "few", root / "datasets", "few")
        model = write_model(root / "model")
        for name in ("few", "jsonl"):
            run = RunDirectory(root / f"run-{name}")
            run.path.mkdir()
            seconds, peaks = first_step(run, root / "datasets" / name, model)
            listed = ", ".join(f"{peak:.0f}" for peak in peaks)
            print(f"{name}: first step after {seconds:.1f} s, ranks at {listed} MiB", flush=True)


if __name__ == "__main__":
    main()
