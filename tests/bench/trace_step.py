"""Dry run of our own training step at any size: allocated bytes of one rank, without the memory.

    python tests/bench/trace_step.py --ranks 8 --optimizer adamw --in-backward

The model is built, sharded and stepped by the code that trains, but under FakeTensorMode and torch's
`fake` process group, so tensors have shapes and no data. Every storage that an operator makes is
counted (rounded up to 512 bytes, as the caching allocator does) until it is freed. What it cannot
see: the kernel that an accelerator would choose, its workspaces, collectives' buffers, fragmentation.
"""

from __future__ import annotations

import argparse
import json
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor._sharding_prop as sharding_prop
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from services.shared.datasets.card import Head
from services.shared.fsdp import shard as shard_room
from services.shared.fsdp.optimizers import build_optimizer
from services.shared.fsdp.process import StopWatch, World
from services.shared.fsdp.shard import parameter_dtype, shard
from services.shared.jobs.rundir import RunDirectory
from services.shared.jobs.spec import Recipe, Training
from services.shared.model.classifier import build_classifier, make_config
from services.trainer.finetune import combined_loss

BLOCK_BYTES = 512  # c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize
QWEN3_32B = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
QWEN3_06B = QWEN3_32B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
MODELS = {"qwen3-32b": QWEN3_32B, "qwen3-0.6b": QWEN3_06B}
VOCABULARY = 151_936
HEADS = [Head(name="a", labels=list("abc")), Head(name="b", labels=list("abcdefg"))]


class Tracer(TorchDispatchMode):
    """Counts the bytes of live storages, and the most there were in each phase."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._current = 0
        self._phase = "build"
        self.peaks: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for found in tree_leaves(result):
            # A DTensor is a wrapper: what it holds is its local part.
            leaf = found._local_tensor if isinstance(found, DTensor) else found
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self.count(leaf.untyped_storage())
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage at its present size."""
        key = storage._cdata
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        if key not in self._sizes:
            weakref.finalize(storage, self._drop, key)
        self._current += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self._current)

    def _drop(self, key: int) -> None:
        self._current -= self._sizes.pop(key)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute peaks to a phase."""
        before, self._phase = self._phase, name
        self.peaks[name] = self._current
        yield
        self._phase = before


@contextmanager
def resizes_counted(tracer: Tracer) -> Iterator[None]:
    """FSDP frees what it gathered by resizing storages to nothing, which no operator shows."""
    true_resize = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = true_resize(storage, size)
        tracer.count(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
    yield
    torch.UntypedStorage.resize_ = true_resize  # type: ignore[method-assign]


def trace(
    model: str, recipe: Recipe, *, ranks: int, texts: int, tokens: int, steps: int
) -> dict[str, int]:
    """Return the peak bytes of rank 0 by phase, step by step."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    watch = StopWatch(RunDirectory(Path()), rank=1)
    world = World(rank=0, size=ranks, device=torch.device("cpu"), stopping=watch)
    mesh = init_device_mesh("cpu", (ranks,))
    shard_room.init_device_mesh = lambda *_, **__: mesh  # it reads values, which fakes have not
    shard_room._real_buffers = _fake_buffers
    sharding_prop.detect_fake_mode = lambda *_: None  # else shapes are counted as memory
    config = make_config(MODELS[model], vocab_size=VOCABULARY, pad_token_id=0)
    tracer = Tracer()
    with FakeTensorMode(allow_non_fake_inputs=True), tracer, resizes_counted(tracer):
        with tracer.phase("wrap"):
            with torch.device("meta"):
                classifier = build_classifier(config, HEADS, dtype=parameter_dtype(recipe))
            sharded = shard(classifier, recipe, world)
            training = Training(max_grad_norm=None)  # clipping reads values
            optimizer = build_optimizer(sharded, training, world)
        sharded.module.train()
        counts = {head.name: texts * ranks for head in HEADS}
        for step in range(steps):
            ids = torch.zeros(texts, tokens, dtype=torch.int64)
            labels = {head.name: torch.zeros(texts, dtype=torch.int64) for head in HEADS}
            with tracer.phase(f"forward {step + 1}"):
                loss = combined_loss(sharded.module(ids), labels, HEADS, counts, None)
            optimizer.before_backward(learning_rate=1e-5, step=step, part=0, parts=1)
            with tracer.phase(f"backward {step + 1}"):
                (loss * ranks).backward()
                del loss
            with tracer.phase(f"optimizer_step {step + 1}"):
                if recipe.optimizer_in_backward:
                    optimizer.step()
                else:
                    optimizer.rule.apply(sharded.pieces, 1e-5, step)
                    for piece in sharded.pieces:
                        piece.clear_gradient()
    return tracer.peaks


def _fake_buffers(classifier: Any, *, device: torch.device) -> dict[str, Tensor]:
    return {
        name: torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
        for name, buffer in classifier.named_buffers()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-32b", choices=MODELS)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--embedding", default="own")
    parser.add_argument("--in-backward", action="store_true")
    given = parser.parse_args()
    recipe = Recipe(
        optimizer=given.optimizer,
        embedding=given.embedding,
        optimizer_in_backward=given.in_backward,
    )
    began = time.monotonic()
    peaks = trace(
        given.model,
        recipe,
        ranks=given.ranks,
        texts=given.texts,
        tokens=given.tokens,
        steps=given.steps,
    )
    table = {phase: round(size / 2**30, 3) for phase, size in peaks.items()}
    seconds = round(time.monotonic() - began)
    print(json.dumps({"gib": table, "peak_gib": max(table.values()), "seconds": seconds}))


if __name__ == "__main__":
    main()
