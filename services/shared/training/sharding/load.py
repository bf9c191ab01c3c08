"""Loading a sharded classifier: each rank reads its own ranges from the files and verifies them.

The host never holds more than a chunk of a tensor. After loading, every shard is summed again on its
device and compared with the sum of what was read: a parameter that was not filled, or was
overwritten, stops the run before the first step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from services.shared.jobs.state import Reason
from services.shared.model.classifier import embedding, initial_heads, initial_projections
from services.shared.training.process import RunFailed, fail_with
from services.shared.training.sharding.safetensors_ranges import TensorFile
from services.shared.training.sharding.shard import LocalShard, Sharded, plain_name

# 4 Mi elements: 16 MiB of float32, and 64 MiB temporarily while they are summed.
CHUNK_ELEMENTS = 4 * 2**20
_HEADS = "heads."
_PROJECTIONS = "projections."
_BACKBONE = "backbone."


class Checksums:
    """Order-sensitive sums of the bits of shards, kept by name."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[int, int]] = {}

    def add(self, name: str, values: Tensor, *, at: int) -> None:
        """Add the bits of `values`, which start `at` elements into the shard."""
        plain, weighted = self._sums.get(name, (0, 0))
        one, other = _sums(values, at=at)
        self._sums[name] = (plain + one) % 2**63, (weighted + other) % 2**63

    def verify(self, shards: Iterable[LocalShard]) -> None:
        """Compare with the current content of the shards. Raises RunFailed, naming the parameters."""
        mismatched = []
        for shard in shards:
            held = Checksums()
            held._sums[shard.name] = (0, 0)
            for at in range(0, shard.local.numel(), CHUNK_ELEMENTS):
                part = shard.local[at : at + CHUNK_ELEMENTS]
                held.add(shard.name, part.cpu(), at=at)
            expected = self._sums.get(shard.name)
            if expected is None or held._sums[shard.name] != expected:
                mismatched.append(shard.name)
        if mismatched:
            raise RunFailed(
                Reason.BAD_MODEL,
                f"{len(mismatched)} parameters do not hold what was loaded for them, first of them "
                f"{', '.join(mismatched[:5])}: nothing was trained",
            )


def _sums(values: Tensor, *, at: int) -> tuple[int, int]:
    bits = values.contiguous().view(
        {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]
    )
    numbers = bits.to(torch.int64)
    # 65521 is the largest prime below 2^16: the weights of neighbours differ for any row length.
    weights = (torch.arange(at, at + len(numbers)) % 65_521) + 1
    return int(numbers.sum()), int((numbers * weights).sum())


def load_pretrained(
    sharded: Sharded,
    directory: Path,
    *,
    seed: int,
    heads: Mapping[str, Tensor] | None = None,
    source_name: Callable[[str], str] = str,
    vocabulary: Sequence[int] | None = None,
) -> None:
    """Fill the backbone from the safetensors files of a directory, the heads from the seed.

    `heads` gives them trained weights instead, as `<head>.weight|bias`. `source_name` says under
    which name the files hold a backbone parameter of ours, where layers are left out; `vocabulary`
    which rows of their token embedding are ours (None: all).
    Raises RunFailed(BAD_MODEL) for missing, misshapen or unreadable tensors and for pickled weights.
    """
    sums = Checksums()
    with fail_with(Reason.BAD_MODEL), ExitStack() as stack:
        files = _open_weights(directory, stack)
        backbone: Any = sharded.classifier.backbone
        trimmed = None if vocabulary is None else _embedding_name(sharded)
        for shard in sharded.shards:
            if not shard.name.startswith(_BACKBONE):
                continue
            name = source_name(shard.name.removeprefix(_BACKBONE))
            key = _key(name, files, prefix=backbone.base_model_prefix)
            if vocabulary is not None and shard.name == trimmed:
                _fill_rows_from_file(shard, files[key], key, vocabulary, sums)
            else:
                _fill_from_file(shard, files[key], key, sums)
    _fill_linears(sharded, seed, heads, sums)
    sums.verify(sharded.shards)


def initialise(sharded: Sharded, *, seed: int) -> None:
    """Fill a model that starts from scratch: the architecture's own initialisation, from the seed.

    Each module is drawn whole on the host under a seed of its own name, and every rank keeps its
    part, so that the first weights do not depend on the number of ranks.
    """
    sums = Checksums()
    shards = {shard.name: shard for shard in sharded.shards}
    for path, module in sharded.module.named_modules():
        own = [name for name, _ in module.named_parameters(recurse=False)]
        prefix = plain_name(f"{path}.") if path else ""
        names = {name: prefix + name for name in own if prefix + name in shards}
        if not names or prefix.startswith((_HEADS, _PROJECTIONS)):
            continue
        drawn = _draw(sharded, module, {k: shards[v] for k, v in names.items()}, f"{seed}/{prefix}")
        for key, name in names.items():
            shard = shards[name]
            _put(shard, drawn[key].reshape(-1)[shard.start : shard.stop], 0, sums)
    _fill_linears(sharded, seed, None, sums)
    sums.verify(sharded.shards)


def _draw(
    sharded: Sharded, module: nn.Module, shards: dict[str, LocalShard], label: str
) -> dict[str, Tensor]:
    """Return the whole first values of one module's own parameters."""
    twin: Any = object.__new__(type(module))  # FSDP2's classes cannot be copied
    twin.__dict__ = dict(module.__dict__)
    twin._parameters = dict.fromkeys(module._parameters) | {
        key: nn.Parameter(torch.full(shard.shape, float("nan"), dtype=shard.local.dtype))
        for key, shard in shards.items()
    }
    seed = int.from_bytes(hashlib.sha256(label.encode()).digest()[:7], "big")
    backbone: Any = sharded.classifier.backbone
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        if hasattr(twin, "reset_parameters"):
            twin.reset_parameters()
        backbone._init_weights(twin)
    drawn = {key: value.detach() for key, value in twin._parameters.items() if value is not None}
    for key, value in drawn.items():
        if value.isnan().any():
            raise RunFailed(
                Reason.BAD_MODEL,
                f"{type(backbone).__name__} does not initialise {shards[key].name!r}: "
                "start from a checkpoint",
            )
    return drawn


def _fill_linears(
    sharded: Sharded, seed: int, heads: Mapping[str, Tensor] | None, sums: Checksums
) -> None:
    """Fill the heads, and a student's projections."""
    first = initial_heads(sharded.classifier, seed) if heads is None else heads
    values = {f"{_HEADS}{name}": value for name, value in first.items()}
    for name, value in initial_projections(sharded.classifier, seed).items():
        values[f"{_PROJECTIONS}{name}"] = value
    for shard in sharded.shards:
        if not shard.name.startswith(_BACKBONE):
            if tuple(values[shard.name].shape) != shard.shape:
                raise RunFailed(
                    Reason.BAD_MODEL,
                    f"{shard.name} has shape {list(values[shard.name].shape)}, the model expects "
                    f"{list(shard.shape)}",
                )
            whole = values[shard.name].reshape(-1)
            _put(shard, whole[shard.start : shard.stop], 0, sums)


def _open_weights(directory: Path, stack: ExitStack) -> dict[str, TensorFile]:
    """Open every weight file of a Hugging Face directory and return which holds which tensor."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        names = _indexed_files(index)
    elif single.is_file():
        names = [single.name]
    elif any(directory.glob("*.bin")) or any(directory.glob("*.pt")):
        raise ValueError(
            f"{directory} holds pickled weights (.bin), which may run code when they are read; "
            "convert them to safetensors"
        )
    else:
        raise ValueError(f"{directory} holds no model.safetensors and no index of several")
    where: dict[str, TensorFile] = {}
    for name in names:
        file = stack.enter_context(TensorFile(directory / name))
        where |= dict.fromkeys(file.entries, file)
    return where


def _indexed_files(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of weight files: {error!r}") from error
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{index} names {name!r}, which is not a safetensors file name")
    return names


def _key(name: str, where: dict[str, TensorFile], *, prefix: str) -> str:
    """Return under which key the files hold a backbone parameter."""
    forms = [name]
    # Checkpoints older than transformers 4 use these names for the norms of BERT-like models.
    for new, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
        if name.endswith(new):
            forms.append(name.removesuffix(new) + old)
    candidates = [p + form for form in forms for p in ("", f"{prefix}.", "model.")]
    if name.endswith(("embed_tokens.weight", "word_embeddings.weight")):
        # A tied model may have been saved under the name of its output side only.
        candidates += ["lm_head.weight", "cls.predictions.decoder.weight"]
    for key in candidates:
        if key in where:
            return key
    raise ValueError(
        f"the files hold no tensor for parameter {name!r} "
        f"(looked for {', '.join(dict.fromkeys(candidates))})"
    )


def _fill_from_file(shard: LocalShard, file: TensorFile, key: str, sums: Checksums) -> None:
    shape = file.entries[key].shape
    if shape != shard.shape:
        raise ValueError(
            f"{file.path.name}: tensor {key!r} has shape {list(shape)}, "
            f"the model expects {list(shard.shape)}"
        )
    for at in range(shard.start, max(shard.stop, shard.start + 1), CHUNK_ELEMENTS):
        stop = min(at + CHUNK_ELEMENTS, shard.stop)
        _put(shard, file.read(key, at, stop), at - shard.start, sums)


def _embedding_name(sharded: Sharded) -> str:
    tokens = embedding(sharded.classifier)
    names = (name for name, module in sharded.classifier.named_modules() if module is tokens)
    return plain_name(f"{next(names)}.weight")


def _fill_rows_from_file(
    shard: LocalShard, file: TensorFile, key: str, rows: Sequence[int], sums: Checksums
) -> None:
    """Fill a shard of the rows `rows` of a matrix; neighbouring rows are read together."""
    shape = file.entries[key].shape
    if (len(rows), *shape[1:]) != shard.shape or rows[-1] >= shape[0]:
        raise ValueError(
            f"{file.path.name}: tensor {key!r} has shape {list(shape)}, of which {len(rows)} rows up to "
            f"{rows[-1]} are to be read as {list(shard.shape)}"
        )
    width = shard.shape[1]
    for first, last in _runs(rows):
        at, end = max(first * width, shard.start), min(last * width, shard.stop)
        moved = (rows[first] - first) * width  # to the place of these rows in the file
        for start in range(at, end, CHUNK_ELEMENTS):
            stop = min(start + CHUNK_ELEMENTS, end)
            _put(shard, file.read(key, start + moved, stop + moved), start - shard.start, sums)


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges [first, last) of positions in `rows` that hold consecutive numbers."""
    first = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] != rows[at - 1] + 1:
            yield first, at
            first = at


def _put(shard: LocalShard, values: Tensor, at: int, sums: Checksums) -> None:
    """Copy values into a shard from element `at` on, and add them to its checksum."""
    converted = values.to(shard.local.dtype)
    sums.add(shard.name, converted, at=at)
    with torch.no_grad():
        shard.local[at : at + len(converted)].copy_(converted)
