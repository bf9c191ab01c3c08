"""The recipe: every choice that the memory of a training job depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, TypedDict, cast

from services.shared.memory.errors import InvalidInput


class Precision(str, Enum):
    """A floating-point type that parameters, computation or reduction use."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    __str__ = str.__str__

    @property
    def size_bytes(self) -> int:
        """Bytes of one value."""
        return 4 if self is Precision.FLOAT32 else 2


class Sharding(str, Enum):
    """What is sharded over the ranks.

    `grad_op` keeps parameters unsharded from forward to backward; `hybrid` shards within groups of
    `shard_ranks` and replicates over the groups; `none` replicates everything.
    """

    FULL = "full"
    GRAD_OP = "grad_op"
    HYBRID = "hybrid"
    NONE = "none"

    __str__ = str.__str__


class Engine(str, Enum):
    """The sharding or replicating engine: torch's FullyShardedDataParallel, fully_shard, or DDP."""

    FSDP1 = "fsdp1"
    FSDP2 = "fsdp2"
    DDP = "ddp"

    __str__ = str.__str__

    @classmethod
    def of_torch(cls, version: str) -> Engine:
        """Return the FSDP generation of a torch release: `fully_shard` became public with 2.6."""
        major, minor = version.split(".")[:2]
        return cls.FSDP2 if (int(major), int(minor)) >= (2, 6) else cls.FSDP1


class Optimizer(str, Enum):
    """The update rule; `adamw_bf16` keeps parameters and moments in bfloat16, `adamw_split` the rest of a
    32-bit master apart from bfloat16 parameters, with 8-bit moments, `adamw_split24` that of a 24-bit one.
    """

    ADAMW = "adamw"
    ADAMW_BF16 = "adamw_bf16"
    ADAMW_8BIT = "adamw_8bit"
    ADAMW_SPLIT = "adamw_split"
    ADAMW_SPLIT24 = "adamw_split24"
    ADAFACTOR = "adafactor"
    SGD = "sgd"

    __str__ = str.__str__


# Their parameters are bfloat16, whatever the recipe says.
BFLOAT16_OPTIMIZERS = frozenset(
    {Optimizer.ADAMW_BF16, Optimizer.ADAMW_SPLIT, Optimizer.ADAMW_SPLIT24}
)


class OptimizerImpl(str, Enum):
    """How the update runs over parameters: one kernel, list operations, or one by one."""

    FUSED = "fused"
    FOREACH = "foreach"
    FOR_LOOP = "for_loop"

    __str__ = str.__str__


class Wrap(str, Enum):
    """Which modules are sharding units: each layer, or the whole model as one."""

    LAYER = "layer"
    ROOT = "root"

    __str__ = str.__str__


class Embedding(str, Enum):
    """Whether the embedding belongs to the root unit or is a unit of its own."""

    ROOT = "root"
    OWN = "own"

    __str__ = str.__str__


class Attention(str, Enum):
    """The attention kernel: `sdpa` is flash or memory-efficient, `math` materialises scores."""

    SDPA = "sdpa"
    EAGER = "eager"
    MATH = "math"

    __str__ = str.__str__


class Prefetch(str, Enum):
    """FSDP1's backward prefetch; FSDP2 always gathers the next unit ahead."""

    NONE = "none"
    PRE = "pre"
    POST = "post"

    __str__ = str.__str__


class Offload(str, Enum):
    """What is kept in host memory: nothing, the optimizer state, or parameters and gradients too."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    ALL = "all"

    __str__ = str.__str__


class Loading(str, Enum):
    """Which ranks hold the whole checkpoint in host memory while it is loaded."""

    RANK0 = "rank0"
    EVERY_RANK = "every_rank"
    SLICED = "sliced"

    __str__ = str.__str__


@dataclass(frozen=True)
class Recipe:
    """Every setting that the memory of a training job depends on; defaults are the trainer's.

    A micro-batch is `micro_batch` texts of `sequence_length` tokens on each rank; `accumulate`
    micro-batches make a step, and with `reduce_each` false their gradients stay unsharded on every
    rank until the last. `reshard_root` frees FSDP2's root between forward and backward.
    `attention_mask`: an explicit mask is materialised. `upcast_after_wrap`: FSDP1 as accelerate uses
    it, wrapping in the checkpoint's dtype and then upcasting the shards.
    Raises InvalidInput for values out of range and for combinations that do not exist.
    """

    sharding: Sharding = Sharding.FULL
    engine: Engine = Engine.FSDP2
    shard_ranks: int | None = None
    reshard_root: bool = False
    wrap: Wrap = Wrap.LAYER
    embedding: Embedding = Embedding.ROOT
    prefetch: Prefetch = Prefetch.NONE
    parameters: Precision = Precision.FLOAT32
    compute: Precision = Precision.BFLOAT16
    reduce: Precision = Precision.BFLOAT16
    optimizer: Optimizer = Optimizer.ADAMW
    optimizer_impl: OptimizerImpl = OptimizerImpl.FUSED
    optimizer_in_backward: bool = False
    activation_checkpointing: bool = True
    attention: Attention = Attention.SDPA
    attention_mask: bool = True
    micro_batch: int = 1
    sequence_length: int = 2048
    accumulate: int = 1
    reduce_each: bool = True
    offload: Offload = Offload.NONE
    loading: Loading = Loading.SLICED
    checkpoint: Precision = Precision.BFLOAT16
    upcast_after_wrap: bool = True
    data_workers: int = 2
    training_texts: int = 0  # which every rank holds an index of, in host memory

    def __post_init__(self) -> None:
        for name, kind in _ENUMS.items():
            object.__setattr__(self, name, _member(name, kind, getattr(self, name)))
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise InvalidInput(
                    name, f"{value!r}", accepted=f"a whole number from {low} to {high}"
                )
        if self.optimizer in BFLOAT16_OPTIMIZERS:
            object.__setattr__(self, "parameters", Precision.BFLOAT16)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if (self.sharding is Sharding.HYBRID) != (self.shard_ranks is not None):
            raise InvalidInput(
                "shard_ranks", "is the group size of hybrid sharding, and only of it"
            )
        if self.engine is Engine.DDP and self.sharding is not Sharding.NONE:
            raise InvalidInput("sharding", f"DDP does not shard ({self.sharding})", accepted="none")

    @property
    def tokens(self) -> int:
        """Padded tokens of one micro-batch on one rank."""
        return self.micro_batch * self.sequence_length

    @property
    def upcasts(self) -> bool:
        """Whether FSDP1's shards are upcast after wrapping, as accelerate does."""
        return (
            self.engine is Engine.FSDP1
            and self.upcast_after_wrap
            and self.checkpoint.size_bytes < self.parameters.size_bytes
        )

    @property
    def accumulated_gradient_width(self) -> int:
        """Bytes of one value of a gradient kept unsharded over micro-batches.

        FSDP2 keeps these in the reduce dtype, FSDP1 in the compute dtype.
        """
        compute, reduce = self.compute.size_bytes, self.reduce.size_bytes
        return max(compute, reduce) if self.engine is Engine.FSDP2 else compute

    @property
    def accumulates_in_place(self) -> bool:
        """Whether a later micro-batch adds each weight's gradient directly to an unsharded one.

        FSDP1 adds flat gradients of whole units; FSDP2 keeps them in the reduce dtype, separate
        from those of the micro-batch, where that is not the compute dtype.
        """
        if self.engine is Engine.FSDP1:
            return False
        whole = self.wrap is Wrap.ROOT or not self.reduce_each
        return whole and self.reduce is self.compute

    def with_changes(self, changes: Mapping[str, Any]) -> Recipe:
        """Return this recipe with the named fields changed; raise InvalidInput for an unknown one."""
        known = [field.name for field in fields(self)]
        for name in changes:
            if name not in known:
                raise InvalidInput(name, "is not a field of a recipe", accepted=known)
        return replace(self, **changes)

    def to_dict(self) -> PlannedRecipeDict:
        """Return the fields as plain JSON values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = {name: str(v) if isinstance(v, Enum) else v for name, v in values.items()}
        return cast("PlannedRecipeDict", plain)


class PlannedRecipeDict(TypedDict):
    """A recipe as JSON: enums by their values. See `Recipe`."""

    sharding: str
    engine: str
    shard_ranks: int | None
    reshard_root: bool
    wrap: str
    embedding: str
    prefetch: str
    parameters: str
    compute: str
    reduce: str
    optimizer: str
    optimizer_impl: str
    optimizer_in_backward: bool
    activation_checkpointing: bool
    attention: str
    attention_mask: bool
    micro_batch: int
    sequence_length: int
    accumulate: int
    reduce_each: bool
    offload: str
    loading: str
    checkpoint: str
    upcast_after_wrap: bool
    data_workers: int
    training_texts: int


_ENUMS: dict[str, type[Enum]] = {
    "sharding": Sharding,
    "engine": Engine,
    "wrap": Wrap,
    "embedding": Embedding,
    "prefetch": Prefetch,
    "parameters": Precision,
    "compute": Precision,
    "reduce": Precision,
    "checkpoint": Precision,
    "optimizer": Optimizer,
    "optimizer_impl": OptimizerImpl,
    "attention": Attention,
    "offload": Offload,
    "loading": Loading,
}
_RANGES = {
    "micro_batch": (1, 65_536),
    "sequence_length": (1, 1_048_576),
    "accumulate": (1, 65_536),
    "data_workers": (0, 1_024),
    "training_texts": (0, 1_000_000_000),
}


def _member(field: str, kind: type[Enum], value: Any) -> Enum:
    try:
        return kind(value)
    except ValueError as error:
        accepted = [str(member) for member in kind]
        raise InvalidInput(field, f"{value!r}", accepted=accepted) from error
