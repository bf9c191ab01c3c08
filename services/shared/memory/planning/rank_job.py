"""A job on one rank, ready for simulation: units, layer costs, and what is on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from services.shared.memory.architecture.shape import Shape
from services.shared.memory.planning.layer_costs import (
    FinalCost,
    LayerCost,
    embedding_saved_bytes,
    final_cost,
    layer_cost,
    mask_bytes,
    shared_input_bytes,
    tokens_of,
)
from services.shared.memory.planning.ledger import MemoryLedger
from services.shared.memory.planning.sharding_units import (
    Units,
    layer_gradients,
    local_parameter_shards,
    units_of,
)
from services.shared.memory.recipe import Engine, Offload, Recipe, Sharding


@dataclass(frozen=True)
class RankJob:
    """A model in training on one rank: its units, its layers' costs, the recipe."""

    shape: Shape
    recipe: Recipe
    ranks: int
    units: Units
    layers: tuple[LayerCost, ...]
    adding_layers: tuple[LayerCost, ...]
    final: FinalCost
    shared_input_bytes: int
    mask_bytes: int
    embedding_saved_bytes: int

    @property
    def num_layers(self) -> int:
        """Number of layers the forward pass runs through."""
        return self.shape.num_layers

    @property
    def input_bytes(self) -> int:
        """Bytes of one layer's input: the hidden states of a micro-batch."""
        return self.layers[0].input_bytes

    @property
    def fsdp1(self) -> bool:
        """Whether units are flat parameters (FSDP1)."""
        return self.recipe.engine is Engine.FSDP1

    @property
    def layered(self) -> bool:
        """Whether each layer is a unit of its own."""
        return bool(self.units.layers)

    @property
    def keeps_unsharded(self) -> bool:
        """Whether layers stay unsharded from forward to backward."""
        return self.recipe.sharding is Sharding.GRAD_OP or self.recipe.engine is Engine.DDP

    @property
    def regathers_root(self) -> bool:
        """Whether the root is gathered a second time, for backward."""
        fsdp2 = self.recipe.engine is Engine.FSDP2
        return fsdp2 and self.recipe.reshard_root and not self.keeps_unsharded

    @property
    def on_device(self) -> bool:
        """Whether parameters and gradients stay on the device between their uses."""
        return self.recipe.offload is not Offload.ALL

    @property
    def state_on_device(self) -> bool:
        """Whether the optimizer's state lives, and the update runs, on the device."""
        return self.recipe.offload is Offload.NONE

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of this rank's parameters on the device."""
        return self.units.total("parameter_bytes") if self.on_device else 0

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of this rank's reduced gradients on the device."""
        return self.units.total("gradient_bytes") if self.on_device else 0

    @cached_property
    def local_shards(self) -> list[tuple[str, int]]:
        """Name and number of elements of this rank's shard of each parameter, in the model's order."""
        return local_parameter_shards(self.shape, self.recipe, self.ranks)

    @cached_property
    def saved_below(self) -> tuple[int, ...]:
        """Bytes that the first n layers save for backward, by n."""
        return tuple(accumulate((cost.saved_bytes for cost in self.layers), initial=0))

    @cached_property
    def gradients_below(self) -> tuple[int, ...]:
        """Bytes of the whole gradients of the first n layers, in the compute dtype, by n."""
        return layer_gradients(self.shape, self.recipe.compute.size_bytes)

    @cached_property
    def accumulated_below(self) -> tuple[int, ...]:
        """Bytes of the whole gradients of the first n layers as they are accumulated, by n."""
        return layer_gradients(self.shape, self.recipe.accumulated_gradient_width)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of this rank's optimizer state on the device."""
        return self.units.total("optimizer_bytes") if self.state_on_device else 0


def job_of(shape: Shape, recipe: Recipe, ranks: int, *, cpu_kernels: bool) -> RankJob:
    """Return the job of training `shape` with `recipe`, as seen by one rank."""
    tokens = tokens_of(recipe, training=True, cpu_kernels=cpu_kernels)
    checkpointed = recipe.activation_checkpointing
    adding = recipe.accumulate > 1 and recipe.accumulates_in_place
    kinds = [shape.dims.of_layer(index) for index in range(shape.num_layers)]
    return RankJob(
        shape=shape,
        recipe=recipe,
        ranks=ranks,
        units=units_of(shape, recipe, ranks),
        layers=tuple(layer_cost(kind, tokens, checkpointed=checkpointed) for kind in kinds),
        adding_layers=tuple(
            layer_cost(kind, tokens, checkpointed=checkpointed, adding=adding) for kind in kinds
        ),
        final=final_cost(shape.dims, tokens, saving=True),
        shared_input_bytes=shared_input_bytes(shape.dims, tokens),
        mask_bytes=mask_bytes(shape.dims, tokens),
        embedding_saved_bytes=embedding_saved_bytes(shape.dims, tokens),
    )


class SimulationRun:
    """A job and its ledger; `ends_only` skips the middle layers, none of which has the peak.

    All that differs from one layer to the next of its kind is linear in the layer's index, so the
    largest of equal layers in a row is among the first three or the last three.
    """

    def __init__(self, job: RankJob, ledger: MemoryLedger, *, ends_only: bool) -> None:
        self.job, self.ledger, self.ends_only = job, ledger, ends_only

    def indices(self) -> list[int]:
        """Return the layers to visit, in the order of the forward pass."""
        count = self.job.num_layers
        if not self.ends_only:
            return list(range(count))
        costs = self.job.layers
        starts = [i for i in range(count) if i == 0 or costs[i] is not costs[i - 1]]
        visited: set[int] = set()
        for start, end in zip(starts, [*starts[1:], count], strict=True):
            visited |= set(range(start, min(start + 3, end))) | set(range(max(end - 3, start), end))
        return sorted(visited)

    def saved_before(self, index: int) -> int:
        """Activations held when layer `index` begins forward, over the first layer's input."""
        job = self.job
        if job.recipe.activation_checkpointing:
            return index * job.input_bytes
        # The model's forward holds the embedding's output until it returns.
        named = 0 if job.layers[0].saves_input or not index else job.input_bytes
        return job.saved_below[index] + named

    def saved_at(self, index: int) -> int:
        """Activations held while layer `index` runs backward, over the first layer's input."""
        job = self.job
        if job.recipe.activation_checkpointing:
            return index * job.input_bytes
        # Only what layers saved: no layer needs the first layer's input itself.
        return job.saved_below[index + 1] - job.input_bytes

    def saved_after(self, index: int) -> int:
        """Activations held once layer `index` has run backward, the gradient of its input included.

        A checkpointed layer's own input is freed by then.
        """
        job = self.job
        if job.recipe.activation_checkpointing:
            return index * job.input_bytes
        return job.saved_below[index]

    def kept_bytes(self, layers: int) -> int:
        """Return the bytes of parameters that stay unsharded once `layers` layers have run forward."""
        units = self.job.units
        if not (self.job.keeps_unsharded and units.layers):
            return 0
        embedding = units.embedding.unsharded_parameter_bytes if units.embedding else 0
        return embedding + units.layers_below("unsharded_parameter_bytes", layers)
