"""A job on one rank, ready to be written into the ledger: units, layer costs, what stays where."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from services.shared.memory.architecture.shape import Shape
from services.shared.memory.planning.layer_costs import (
    FinalCost,
    LayerCost,
    final_cost,
    front_bytes,
    layer_cost,
    mask_bytes,
    tables_bytes,
    tokens_of,
)
from services.shared.memory.planning.ledger import MemoryLedger
from services.shared.memory.planning.sharding_units import (
    Units,
    layer_gradients,
    parameter_pieces,
    units_of,
)
from services.shared.memory.recipe import Engine, Offload, Recipe, Sharding


@dataclass(frozen=True)
class RankJob:
    """A model in training on one rank: its units, the cost of its layers, the recipe."""

    shape: Shape
    recipe: Recipe
    ranks: int
    units: Units
    layer: LayerCost
    adding_layer: LayerCost
    final: FinalCost
    tables_bytes: int
    mask_bytes: int
    front_bytes: int
    layer_gradient_bytes: int
    held_layer_gradient_bytes: int

    @property
    def num_layers(self) -> int:
        """Number of layers the forward pass runs through."""
        return self.shape.num_layers

    @property
    def fsdp1(self) -> bool:
        """Whether units are flat parameters."""
        return self.recipe.engine is Engine.FSDP1

    @property
    def layered(self) -> bool:
        """Whether each layer is a unit of its own."""
        return bool(self.units.layers)

    @property
    def keeps_whole(self) -> bool:
        """Whether layers stay gathered from forward to backward."""
        return self.recipe.sharding is Sharding.GRAD_OP or self.recipe.engine is Engine.DDP

    @property
    def resharded_root(self) -> bool:
        """Whether the root is gathered a second time, for backward."""
        fsdp2 = self.recipe.engine is Engine.FSDP2
        return fsdp2 and self.recipe.reshard_root and not self.keeps_whole

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
        """This rank's parameters on the device."""
        return self.units.total("parameter_bytes") if self.on_device else 0

    @cached_property
    def gradient_bytes(self) -> int:
        """This rank's reduced gradients on the device."""
        return self.units.total("gradient_bytes") if self.on_device else 0

    @cached_property
    def pieces(self) -> list[tuple[str, int]]:
        """Name and elements of this rank's parameters, in the model's order."""
        return parameter_pieces(self.shape, self.recipe, self.ranks)

    @cached_property
    def state_bytes(self) -> int:
        """This rank's optimizer state on the device."""
        return self.units.total("optimizer_bytes") if self.state_on_device else 0


def job_of(shape: Shape, recipe: Recipe, ranks: int, *, cpu_kernels: bool) -> RankJob:
    """Return what the ledger need to know of `shape` trained with `recipe`."""
    tokens = tokens_of(recipe, training=True, cpu_kernels=cpu_kernels)
    return RankJob(
        shape=shape,
        recipe=recipe,
        ranks=ranks,
        units=units_of(shape, recipe, ranks),
        layer=layer_cost(shape.dims, tokens, checkpointed=recipe.activation_checkpointing),
        adding_layer=layer_cost(
            shape.dims,
            tokens,
            checkpointed=recipe.activation_checkpointing,
            adding=recipe.accumulate > 1 and recipe.adds_in_place,
        ),
        final=final_cost(shape.dims, tokens, saving=True),
        tables_bytes=tables_bytes(shape.dims, tokens),
        mask_bytes=mask_bytes(shape.dims, tokens),
        front_bytes=front_bytes(shape.dims, tokens),
        layer_gradient_bytes=layer_gradients(shape, recipe.compute.size_bytes),
        held_layer_gradient_bytes=layer_gradients(shape, recipe.held_gradient_width),
    )


class SimulationRun:
    """A job and its ledger; `ends_only` skips the layers between the ends, where no peak lies.

    All that differs from one layer to the next is linear in the layer's index, so the largest of
    equal layers is among the first three or the last three.
    """

    def __init__(self, job: RankJob, ledger: MemoryLedger, *, ends_only: bool) -> None:
        self.job, self.ledger, self.ends_only = job, ledger, ends_only

    def indices(self) -> list[int]:
        """Return the layers to visit, in the order of the forward pass."""
        count = self.job.num_layers
        if not self.ends_only or count <= 6:
            return list(range(count))
        return [0, 1, 2, count - 3, count - 2, count - 1]

    def saved_before(self, index: int) -> int:
        """Activations held when layer `index` begins forward, over the first layer's input."""
        layer = self.job.layer
        if self.job.recipe.activation_checkpointing:
            return index * layer.input_bytes
        # The embedding's output has a name in the model's forward until that returns.
        named = 0 if layer.saves_input or not index else layer.input_bytes
        return index * layer.saved_bytes + named

    def saved_at(self, index: int) -> int:
        """Activations held while layer `index` runs backward, over the first layer's input."""
        layer = self.job.layer
        if self.job.recipe.activation_checkpointing:
            return index * layer.input_bytes
        # Nothing but what layers saved: the first layer's input was only passing through.
        return (index + 1) * layer.saved_bytes - layer.input_bytes

    def saved_after(self, index: int) -> int:
        """Activations held once layer `index` has run backward, the gradient of its input among them.

        A checkpointed layer's own input is gone by then.
        """
        layer = self.job.layer
        if self.job.recipe.activation_checkpointing:
            return index * layer.input_bytes
        return index * layer.saved_bytes

    def kept_bytes(self, layers: int) -> int:
        """Whole parameters that stay gathered once `layers` layers have run forward."""
        units = self.job.units
        if not (self.job.keeps_whole and units.layers):
            return 0
        embedding = units.embedding.whole_parameter_bytes if units.embedding else 0
        return embedding + layers * units.layers[0].whole_parameter_bytes
