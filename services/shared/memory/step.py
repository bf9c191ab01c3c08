"""One training step under FSDP1, FSDP2 or DDP, written into the books unit by unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.shared.memory.activations import (
    FinalCost,
    LayerCost,
    final_cost,
    layer_cost,
    mask_bytes,
    tables_bytes,
    tokens_of,
)
from services.shared.memory.recipe import (
    Engine,
    Offload,
    Optimizer,
    OptimizerImpl,
    Prefetch,
    Recipe,
    Sharding,
    Wrap,
)
from services.shared.memory.shape import Shape
from services.shared.memory.sharding import Units, UnitSizes, layer_gradients, units_of
from services.shared.memory.tape import rounded
from services.shared.memory.timeline import Books, Phase

# services/shared/fsdp/adamw_bf16.py updates this many elements at a time.
BF16_CHUNK_ELEMENTS = 16 * 2**20


@dataclass(frozen=True)
class Job:
    """A model in training on one rank: its units, the cost of its layers, the recipe."""

    shape: Shape
    recipe: Recipe
    units: Units
    layer: LayerCost
    final: FinalCost
    tables_bytes: int
    mask_bytes: int
    layer_gradient_bytes: int

    @property
    def num_layers(self) -> int:
        """Number of layers the forward pass runs through."""
        return self.shape.num_layers

    @property
    def on_device(self) -> bool:
        """Whether parameters and gradients stay on the device between their uses."""
        return self.recipe.offload is not Offload.ALL


def job_of(shape: Shape, recipe: Recipe, ranks: int, *, cpu_kernels: bool) -> Job:
    """Return what the books need to know of `shape` trained with `recipe`."""
    tokens = tokens_of(recipe, training=True, cpu_kernels=cpu_kernels)
    checkpointed = recipe.activation_checkpointing
    return Job(
        shape=shape,
        recipe=recipe,
        units=units_of(shape, recipe, ranks),
        layer=layer_cost(shape.dims, tokens, checkpointed=checkpointed),
        final=final_cost(shape.dims, tokens, saving=True),
        tables_bytes=tables_bytes(shape.dims, tokens),
        mask_bytes=mask_bytes(shape.dims, tokens),
        layer_gradient_bytes=layer_gradients(shape, recipe),
    )


class StepWriter:
    """Writes the steps of one job; `ends_only` skips layers between the ends, where no peak lies.

    All that differs from one layer to the next is linear in the layer's index, so the largest of
    equal layers is always among the first two or the last two.
    """

    def __init__(self, job: Job, books: Books, *, ends_only: bool) -> None:
        self.job, self.books, self.ends_only = job, books, ends_only
        self.recipe, self.units = job.recipe, job.units
        self.root, self.layers = job.units.root, job.units.layers
        self.layered = bool(self.layers)
        self.fsdp1 = self.recipe.engine is Engine.FSDP1
        self.keeps = self.recipe.sharding is Sharding.GRAD_OP or self.recipe.engine is Engine.DDP
        self.in_backward = self.recipe.optimizer_in_backward
        self.optimizer_on_device = self.recipe.offload is Offload.NONE
        self.sharded_parameters = units_total(self.units, "parameter_bytes", job.on_device)
        self.sharded_gradients = units_total(self.units, "gradient_bytes", job.on_device)
        self.state = units_total(self.units, "optimizer_bytes", self.optimizer_on_device)

    # -- phases ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Account for the sharded model before the first step."""
        self.books.parameters = self.sharded_parameters

    def forward(self, *, first: bool) -> None:
        """Write a training forward pass; afterwards activations hold all that backward needs."""
        books, units, job = self.books, self.units, self.job
        if first and self.fsdp1:
            self._lazy_init()
        elif self.fsdp1 and books.micro_batch == 0 and not self.in_backward:
            self._leftover_gradients()
        self._gather_root()
        books.activations += job.tables_bytes + job.layer.input_bytes
        if units.embedding is not None:
            self._gather(units.embedding, "embedding", None, held=0)
        base = books.activations
        for index in self._indices():
            books.activations = base + self._saved_before(index)
            self._enter_layer(index)
            books.play("layer", index, job.layer.forward)
            self._leave_layer(index)
        books.activations = base + self._saved_before(job.num_layers)
        books.play("root", None, job.final.forward)
        books.communication = 0
        books.unsharded = self.root.whole_parameter_bytes + self._kept(job.num_layers)

    def backward(self, *, micro_batch: int) -> None:
        """Write a backward pass, unit by unit from the last layer to the root."""
        books, job = self.books, self.job
        reduces = self._reduces(micro_batch)
        base = books.activations - self._saved_before(job.num_layers)
        if not self.recipe.activation_checkpointing:
            # Only a layer that is run again needs the mask again.
            base -= job.mask_bytes
        books.play("root", None, job.final.backward)
        # The first backward pass that adds into gradients of its own finds none before it.
        for index in reversed(self._indices()):
            books.activations = base + self._saved_at(index)
            self._set_gradients(index, micro_batch)
            self._layer_backward(index, after=base + self._saved_after(index), reduces=reduces)
        books.activations = 0
        self._set_gradients(-1, micro_batch)
        self._root_backward(reduces=reduces)
        self._finish_backward(reduces=reduces)

    def optimizer_step(self, *, first: bool) -> None:
        """Write the update of all parameters, unless each was updated in backward."""
        books = self.books
        if self.in_backward:
            books.optimizer = self.state
            return
        if not self.optimizer_on_device:
            books.gradients = 0
            return
        if first and not self.ends_only:
            self._create_state()
        books.optimizer = self.state
        temporaries = self._update_temporaries()
        request = self._largest_update_request()
        books.mark(
            "all", None, "optimizer temporaries", request_bytes=request, temporaries=temporaries
        )
        books.gradients = 0

    # -- forward --------------------------------------------------------------------------------

    def _indices(self) -> list[int]:
        count = self.job.num_layers
        if not self.ends_only or count <= 6:
            return list(range(count))
        return [0, 1, 2, count - 3, count - 2, count - 1]

    def _saved_before(self, index: int) -> int:
        """Activations held when layer `index` begins forward, over the first layer's input."""
        layer = self.job.layer
        if self.recipe.activation_checkpointing:
            return index * layer.input_bytes
        # The embedding's output has a name in the model's forward until that returns.
        return index * layer.saved_bytes + (layer.input_bytes if index else 0)

    def _saved_at(self, index: int) -> int:
        """Activations held while layer `index` runs backward, over the first layer's input."""
        layer = self.job.layer
        if self.recipe.activation_checkpointing:
            return index * layer.input_bytes
        # Nothing but what layers saved: the first layer's input was only passing through.
        return (index + 1) * layer.saved_bytes - layer.input_bytes

    def _saved_after(self, index: int) -> int:
        """Activations held once layer `index` has run backward: the gradient of its input too.

        A checkpointed layer's own input is gone by then.
        """
        layer = self.job.layer
        if self.recipe.activation_checkpointing:
            return index * layer.input_bytes
        return index * layer.saved_bytes

    def _kept(self, layers: int) -> int:
        """Whole parameters of `layers` layers that stay gathered after their forward pass."""
        return layers * self.layers[0].whole_parameter_bytes if self.keeps and self.layered else 0

    def _lazy_init(self) -> None:
        """FSDP1's first forward: the root gathers once in the parameters' own dtype."""
        root, recipe = self.root, self.recipe
        kept = 0
        if self._upcasts():
            # With use_orig_params the checkpoint's shards outlive their upcast until here.
            kept = self.units.total("shard_elements") * recipe.checkpoint.size_bytes
        self.books.mark(
            "root",
            None,
            "whole root for the first gather",
            request_bytes=root.flat_parameter_bytes,
            unsharded=root.flat_parameter_bytes,
            temporaries=rounded(kept),
        )

    def _leftover_gradients(self) -> None:
        """FSDP1 with use_orig_params keeps flat gradients through zero_grad until its next pass."""
        if self.layered and self.job.on_device:
            left = self.sharded_gradients - self.root.gradient_bytes
            self.books.mark("root", None, "gradients of the step before", temporaries=left)

    def _upcasts(self) -> bool:
        recipe = self.recipe
        return (
            self.fsdp1
            and recipe.upcast_after_wrap
            and recipe.checkpoint.size_bytes < recipe.parameters.size_bytes
        )

    def _gather_root(self) -> None:
        books, root = self.books, self.root
        extra = root.compute_shard_bytes if self.fsdp1 else root.gathered_bytes
        books.mark(
            "root",
            None,
            "gathered root",
            request_bytes=root.whole_parameter_bytes,
            unsharded=root.whole_parameter_bytes,
            communication=extra,
        )
        books.unsharded = root.whole_parameter_bytes
        # FSDP2 holds the last gather's buffer until the next unit has copied its own out.
        books.communication = 0 if self.fsdp1 else root.gathered_bytes

    def _gather(self, unit: UnitSizes, name: str, index: int | None, *, held: int) -> None:
        """Gather one unit in forward; `held` are whole parameters of earlier units."""
        books = self.books
        extra = unit.compute_shard_bytes if self.fsdp1 else unit.gathered_bytes
        books.mark(
            name,
            index,
            f"gathered {name}",
            request_bytes=unit.gathered_bytes,
            unsharded=held + unit.whole_parameter_bytes,
            communication=extra,
        )
        if not self.fsdp1:
            books.communication = unit.gathered_bytes

    def _enter_layer(self, index: int) -> None:
        if not self.layered:
            return
        unit, books = self.layers[index], self.books
        kept = self._kept(index)
        self._gather(unit, "layer", index, held=kept)
        books.unsharded = self.root.whole_parameter_bytes + kept + unit.whole_parameter_bytes

    def _leave_layer(self, index: int) -> None:
        if self.layered:
            self.books.unsharded = self.root.whole_parameter_bytes

    # -- backward -------------------------------------------------------------------------------

    def _reduces(self, micro_batch: int) -> bool:
        recipe = self.recipe
        return recipe.reduce_each or micro_batch == recipe.accumulate - 1

    def _set_gradients(self, index: int, micro_batch: int) -> None:
        """Account for the gradients alive when layer `index` (-1: the root) runs backward."""
        books, job, recipe = self.books, self.job, self.recipe
        count = job.num_layers
        done = count - 1 - index
        whole_layer, whole_root = job.layer_gradient_bytes, self.root.whole_gradient_bytes
        shard = self.layers[0].gradient_bytes if self.layered and job.on_device else 0
        books.unsharded_gradients = 0
        if self.layered and not recipe.reduce_each and recipe.accumulate > 1:
            before = micro_batch > 0
            if micro_batch == recipe.accumulate - 1:
                books.gradients = done * shard
                books.unsharded_gradients = (index + 1) * whole_layer + whole_root
            else:
                books.gradients = 0
                held = count if before else done
                books.unsharded_gradients = held * whole_layer + (whole_root if before else 0)
            return
        if self.in_backward:
            books.gradients = 0
            self._grow_state(done)
        elif micro_batch == 0:
            books.gradients = done * shard
        if not self.layered:
            books.unsharded_gradients = done * whole_layer

    def _grow_state(self, done: int) -> None:
        """In backward of the first step, state exists for what has been updated."""
        if self.books.step == 1 and self.optimizer_on_device:
            state = self.layers[0].optimizer_bytes if self.layered else 0
            self.books.optimizer = done * state

    def _layer_backward(self, index: int, *, after: int, reduces: bool) -> None:
        if not self.layered:
            self.books.play("layer", index, self.job.layer.backward)
            return
        unit, books, root = self.layers[index], self.books, self.root
        whole = unit.whole_parameter_bytes
        books.unsharded = root.whole_parameter_bytes + (
            self._kept(index + 1) if self.keeps else whole
        )
        if not self.keeps:
            self._regather(unit, index)
        ahead = self._gathered_ahead(index)
        behind = 0 if self.fsdp1 or index == self.job.num_layers - 1 else unit.reduce_input_bytes
        books.play("layer", index, self.job.layer.backward, communication=ahead + behind * reduces)
        books.activations = after
        if self.fsdp1:
            self._flatten_gradient(unit, index, ahead)
        books.unsharded -= whole
        if reduces:
            self._reduce(unit, index, ahead)

    def _regather(self, unit: UnitSizes, index: int) -> None:
        books = self.books
        extra = unit.compute_shard_bytes if self.fsdp1 else unit.gathered_bytes
        books.mark(
            "layer",
            index,
            "gathered layer",
            request_bytes=unit.gathered_bytes,
            communication=extra,
            temporaries=self.job.layer.input_bytes,
        )

    def _gathered_ahead(self, index: int) -> int:
        """The next unit of backward, gathered while this one computes."""
        if self.keeps:
            return 0
        if self.fsdp1 and self.recipe.prefetch is not Prefetch.PRE:
            return 0
        if index > 0:
            following = self.layers[index - 1]
        elif self.units.embedding is not None:
            following = self.units.embedding
        else:
            return 0
        return following.whole_parameter_bytes if self.fsdp1 else following.gathered_bytes

    def _flatten_gradient(self, unit: UnitSizes, index: int, ahead: int) -> None:
        """FSDP1 copies the parameters' gradients into one flat gradient of the whole unit."""
        self.books.mark(
            "layer",
            index,
            "flat gradient of one layer",
            request_bytes=unit.gathered_bytes,
            communication=ahead,
            unsharded_gradients=unit.whole_gradient_bytes + unit.gathered_bytes,
        )

    def _reduce(self, unit: UnitSizes, index: int, ahead: int) -> None:
        """Reduce one unit's gradients to this rank's part, in the reduce dtype, then its own."""
        books, recipe = self.books, self.recipe
        other = 0 if recipe.reduce is recipe.parameters else unit.reduce_output_bytes
        part = unit.gradient_bytes
        if self.fsdp1:
            raised = 0 if recipe.reduce is recipe.compute else unit.reduce_input_bytes
            books.mark(
                "layer",
                index,
                "reduced gradient",
                request_bytes=max(part, raised),
                communication=ahead + raised + other,
                unsharded_gradients=unit.whole_gradient_bytes,
                temporaries=part,
            )
            return
        books.mark(
            "layer",
            index,
            "reduce-scatter input",
            request_bytes=unit.reduce_input_bytes,
            communication=ahead + unit.reduce_input_bytes,
            unsharded_gradients=unit.whole_gradient_bytes,
        )
        books.mark(
            "layer",
            index,
            "reduced gradient",
            request_bytes=part,
            communication=ahead + unit.reduce_input_bytes + other,
            temporaries=part,
        )

    def _root_backward(self, *, reduces: bool) -> None:
        books, job, recipe = self.books, self.job, self.recipe
        embedding = self.units.embedding
        behind = 0
        if self.layered and not self.fsdp1 and reduces:
            behind = self.layers[0].reduce_input_bytes
        if embedding is not None:
            self._embedding_backward(embedding, behind, reduces=reduces)
            behind = embedding.reduce_input_bytes if not self.fsdp1 and reduces else 0
        self._reduce_root(behind, reduces=reduces)
        assert recipe is self.recipe
        assert job is self.job

    def _embedding_backward(self, unit: UnitSizes, behind: int, *, reduces: bool) -> None:
        books, held = self.books, self.job.layer.input_bytes
        books.unsharded = self.root.whole_parameter_bytes
        gradient = unit.whole_gradient_bytes
        flat = unit.gathered_bytes if self.fsdp1 else 0
        books.mark(
            "embedding",
            None,
            "gradient of the embedding",
            request_bytes=gradient,
            unsharded=unit.whole_parameter_bytes,
            communication=behind,
            unsharded_gradients=gradient + flat,
            temporaries=held,
        )
        if not reduces:
            return
        other = 0 if self.recipe.reduce is self.recipe.parameters else unit.reduce_output_bytes
        books.mark(
            "embedding",
            None,
            "reduce-scatter input",
            request_bytes=unit.reduce_input_bytes,
            communication=unit.reduce_input_bytes,
            unsharded_gradients=gradient,
        )
        books.mark(
            "embedding",
            None,
            "reduced gradient",
            request_bytes=unit.gradient_bytes,
            communication=unit.reduce_input_bytes + other,
            temporaries=unit.gradient_bytes,
        )
        if not self.in_backward and self.job.on_device:
            books.gradients += unit.gradient_bytes

    def _reduce_root(self, behind: int, *, reduces: bool) -> None:
        books, root, recipe = self.books, self.root, self.recipe
        held = self.job.layer.input_bytes if self.units.embedding is None else 0
        whole, gradient = root.whole_parameter_bytes, root.whole_gradient_bytes
        flat = root.gathered_bytes if self.fsdp1 else 0
        if not self.layered:
            books.unsharded_gradients = 0
        books.unsharded = whole
        books.mark(
            "root",
            None,
            "flat gradient of the root" if self.fsdp1 else "gradient of the root",
            request_bytes=max(flat, self.root.largest_tensor_elements * recipe.compute.size_bytes),
            communication=behind,
            unsharded_gradients=gradient + flat,
            temporaries=0 if self.fsdp1 else held,
        )
        books.unsharded = 0 if recipe.sharding is not Sharding.GRAD_OP else 0
        if not reduces:
            return
        other = 0 if recipe.reduce is recipe.parameters else root.reduce_output_bytes
        part, reduced = root.gradient_bytes, root.reduce_input_bytes
        if self.fsdp1:
            raised = 0 if recipe.reduce is recipe.compute else reduced
            books.mark(
                "root",
                None,
                "reduced gradient",
                request_bytes=max(part, raised),
                communication=raised + other,
                unsharded_gradients=gradient,
                temporaries=part,
            )
            return
        books.mark(
            "root",
            None,
            "reduce-scatter input",
            request_bytes=reduced,
            communication=reduced,
            unsharded_gradients=gradient,
        )
        books.mark(
            "root",
            None,
            "reduced gradient",
            request_bytes=part,
            communication=reduced + other,
            temporaries=part,
        )

    def _finish_backward(self, *, reduces: bool) -> None:
        """Leave the books as they are between backward and what follows."""
        books = self.books
        books.unsharded = books.communication = books.unsharded_gradients = 0
        books.activations = 0
        if self.in_backward:
            books.gradients = 0
        elif reduces:
            books.gradients = self.sharded_gradients
        else:
            books.gradients = 0
            books.unsharded_gradients = self.units.total("whole_gradient_bytes")

    # -- optimizer ------------------------------------------------------------------------------

    def _create_state(self) -> None:
        """Write the first step's state creation, tensor group by tensor group."""
        books = self.books
        books.optimizer = 0
        for unit in self.units.all:
            request = unit.largest_piece_elements * self._state_width()
            books.optimizer += unit.optimizer_bytes
            books.mark(unit.name, None, "optimizer state", request_bytes=request)

    def _state_width(self) -> int:
        return self.recipe.parameters.size_bytes

    def _update_temporaries(self) -> int:
        """Return the bytes that the update allocates on top of state and gradients."""
        recipe, units = self.recipe, self.units
        p = recipe.parameters.size_bytes
        largest = max(unit.largest_piece_elements for unit in units.all)
        if recipe.optimizer is Optimizer.ADAMW_BF16:
            return 30 * min(largest, BF16_CHUNK_ELEMENTS)
        if recipe.optimizer is Optimizer.ADAFACTOR:
            return (12 if p == 4 else 20) * largest
        if recipe.optimizer is Optimizer.ADAMW_8BIT:
            return 16 * largest
        if recipe.optimizer is Optimizer.SGD or recipe.optimizer_impl is OptimizerImpl.FUSED:
            return 0
        if recipe.optimizer_impl is OptimizerImpl.FOREACH:
            return units.total("parameter_bytes")
        return 2 * rounded(p * largest)

    def _largest_update_request(self) -> int:
        largest = max(unit.largest_piece_elements for unit in self.units.all)
        return rounded(largest * self.recipe.parameters.size_bytes)


def units_total(units: Units, field: str, on_device: bool) -> int:
    """Return the sum of `field` over units, or nothing where it lives on the host."""
    return units.total(field) if on_device else 0


def write_steps(writer: StepWriter, *, steps: Sequence[int]) -> None:
    """Write the given steps (1 is the first, which has no optimizer state yet)."""
    books, recipe = writer.books, writer.recipe
    writer.begin()
    for step in steps:
        for micro_batch in _micro_batches(recipe, ends_only=writer.ends_only):
            books.enter(Phase.FORWARD, step=step, micro_batch=micro_batch)
            writer.forward(first=step == 1 and micro_batch == 0)
            books.enter(Phase.BACKWARD, step=step, micro_batch=micro_batch)
            writer.backward(micro_batch=micro_batch)
        books.enter(Phase.OPTIMIZER_STEP, step=step)
        writer.optimizer_step(first=step == 1)


def _micro_batches(recipe: Recipe, *, ends_only: bool) -> list[int]:
    """Return the micro-batches that differ: the first, one between, the last."""
    count = recipe.accumulate
    if recipe.wrap is Wrap.ROOT and recipe.reduce_each:
        return list(range(min(count, 2)))
    if not ends_only and count <= 4:
        return list(range(count))
    return sorted({0, min(1, count - 1), count - 1})
