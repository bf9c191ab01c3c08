"""The shape of one model: its units and tensors, whatever they were read from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from services.shared.memory.dimensions import Dimensions
from services.shared.memory.errors import InvalidInput
from services.shared.memory.tensors import (
    Unit,
    embedding_unit,
    heads_unit,
    language_head_unit,
    layer_units,
    norm_unit,
)


@dataclass(frozen=True)
class Shape:
    """A model as the memory plan sees it: backbone, classifier heads, perhaps a language head.

    `heads` holds the number of classes of each linear head; `language_head` is for the causal
    models of other people's failures, never for our classifiers.
    """

    name: str
    dims: Dimensions
    heads: tuple[int, ...] = ()
    language_head: bool = False

    @cached_property
    def layers(self) -> tuple[Unit, ...]:
        """The transformer layers, in order."""
        return layer_units(self.dims)

    @cached_property
    def embedding(self) -> Unit:
        """Everything in front of the first layer."""
        return embedding_unit(self.dims)

    @cached_property
    def norm(self) -> Unit:
        """Everything between the last layer and the heads."""
        return norm_unit(self.dims)

    @cached_property
    def outputs(self) -> tuple[Unit, ...]:
        """The classifier heads and the language head, where there are any."""
        units = [heads_unit(self.dims, self.heads)] if self.heads else []
        if self.language_head:
            units.append(language_head_unit(self.dims))
        return tuple(units)

    @property
    def units(self) -> tuple[Unit, ...]:
        """All units in the order of the forward pass."""
        return (self.embedding, *self.layers, self.norm, *self.outputs)

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters; tied embeddings count once."""
        return sum(unit.elements for unit in self.units)

    @property
    def num_layers(self) -> int:
        """Number of transformer layers, those of a decoder side included."""
        return self.dims.num_layers + self.dims.decoder_layers

    def with_heads(self, heads: Sequence[int]) -> Shape:
        """Return this shape with classifier heads of so many classes each."""
        for classes in heads:
            if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
                raise InvalidInput(
                    "heads", f"{classes!r} is not a number of classes", accepted=">= 1"
                )
        return replace(self, heads=tuple(heads))

    def with_language_head(self) -> Shape:
        """Return this shape as a causal language model, its output projection included."""
        return replace(self, language_head=True)

    def with_layers(self, num_layers: int) -> Shape:
        """Return this shape cut or extended to `num_layers` layers of the same kind."""
        if num_layers < 1:
            raise InvalidInput("num_layers", f"{num_layers} layers", accepted=">= 1")
        return replace(self, dims=replace(self.dims, num_layers=num_layers))
