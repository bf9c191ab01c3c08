"""An environment that runs the code of a rank without its memory and without the other ranks.

Tensors have shapes and no values (FakeTensorMode), collectives return at once (torch's `fake` process
group). Code that reads a value gets 1, or False: the loss is finite, no two buffers are equal, and
an attention mask has masked positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor._sharding_prop as sharding_prop
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from services.shared.jobs.run_directory import RunDirectory
from services.shared.training.dry_run.live_storage import replaced
from services.shared.training.process import StopWatch, World

# Absent from torch 2.5, which shards by FSDP1, without DTensor.
_SHAPES = (
    [(sharding_prop, "detect_fake_mode", lambda *_: None)]
    if hasattr(sharding_prop, "detect_fake_mode")
    else []
)


@contextmanager
def fake_world(ranks: int) -> Iterator[World]:
    """Yield the world of rank 0 of `ranks`; inside, every new tensor is a fake tensor."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    stopping = StopWatch(RunDirectory(Path()), rank=1)  # only rank 0 would look for a file
    try:
        with ExitStack() as stack:
            for owner, name, value in (
                # DTensor would otherwise use our mode for its own shape propagation.
                *_SHAPES,
                # Or transformers (5.24) builds the mask that it leaves out in a real run.
                (masking_utils, "is_tracing", lambda *_: False),
                # It reads positions, to learn whether a row holds several texts: ours hold one.
                (masking_utils, "find_packed_sequence_indices", lambda *_: None),
            ):
                stack.enter_context(replaced(owner, name, value))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(_ScalarReads())  # type: ignore[no-untyped-call]
            stack.enter_context(_ListReads())
            yield World(rank=0, size=ranks, device=torch.device("cpu"), stopping=stopping)
    finally:
        dist.destroy_process_group()


class _ScalarReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns a placeholder where code reads a scalar."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return _placeholder(args[0].dtype)
        if func is torch.ops.aten.equal.default:
            return False
        return func(*args, **(kwargs or {}))


class _ListReads(TorchFunctionMode):
    """Returns placeholders where code reads a list, which torch does without an operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist and isinstance(args[0], FakeTensor):
            (values,) = args
            assert values.ndim == 1, values.shape
            return [_placeholder(values.dtype)] * len(values)
        return func(*args, **(kwargs or {}))


def _placeholder(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1
