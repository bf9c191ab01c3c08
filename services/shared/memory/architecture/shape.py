"""Shapes of models: from a preset, a config.json, a checkpoint directory or safetensors headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from services.shared.memory.architecture import presets, safetensors_headers
from services.shared.memory.architecture.dimensions import Dimensions
from services.shared.memory.architecture.hf_config import dimensions_of
from services.shared.memory.architecture.parameters import (
    Unit,
    embedding_unit,
    heads_unit,
    language_head_unit,
    layer_units,
    norm_unit,
)
from services.shared.memory.architecture.pooling import Pooling, checkpoint_pooling
from services.shared.memory.errors import InvalidInput


@dataclass(frozen=True)
class Shape:
    """A model as the memory plan sees it: backbone, classifier heads, optionally a language head.

    `heads` holds the number of classes of each linear head; `language_head` is for causal language
    models in diagnosed failures, never for our classifiers.
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
        """Everything before the first layer."""
        return embedding_unit(self.dims)

    @cached_property
    def norm(self) -> Unit:
        """Everything between the last layer and the heads."""
        return norm_unit(self.dims)

    @cached_property
    def outputs(self) -> tuple[Unit, ...]:
        """The classifier heads and the language head, if any."""
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
        """Return this shape with classifier heads of the given numbers of classes."""
        for classes in heads:
            if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
                raise InvalidInput(
                    "heads", f"{classes!r} is not a number of classes", accepted=">= 1"
                )
        return replace(self, heads=tuple(heads))

    def with_language_head(self) -> Shape:
        """Return this shape as a causal language model, its output projection included."""
        return replace(self, language_head=True)

    def with_vocabulary(self, rows: int) -> Shape:
        """Return this shape with a token embedding of `rows` rows."""
        return replace(self, dims=replace(self.dims, vocab_size=rows))

    def with_pooling(self, pooling: Pooling) -> Shape:
        """Return this shape with heads that read a text's states in another way."""
        by_mean = pooling is Pooling.MEAN
        return replace(self, dims=replace(self.dims, mean_pooling=by_mean))

    def with_layers(self, num_layers: int) -> Shape:
        """Return this shape cut or extended to `num_layers` layers of the same kind."""
        if num_layers < 1:
            raise InvalidInput("num_layers", f"{num_layers} layers", accepted=">= 1")
        return replace(self, dims=replace(self.dims, num_layers=num_layers))

    def with_only_layers(self, layers: Sequence[int]) -> Shape:
        """Return this shape with the layers of these numbers alone, counted from 0."""
        dims = replace(self.dims, num_layers=len(layers))
        if dims.experts is not None:
            dense = sum(layer < dims.experts.dense_layers for layer in layers)
            dims = replace(dims, experts=dims.experts._replace(dense_layers=dense))
        return replace(self, dims=dims)


def load(source: str | Path, *, heads: Sequence[int] = ()) -> Shape:
    """Return the shape that `source` names: a preset, a directory, a config.json or safetensors.

    Raises InvalidInput naming `model` when it is none of these.
    """
    path = Path(source)
    try:
        is_directory, is_file = path.is_dir(), path.is_file()
    except OSError:  # longer than a file name may be
        is_directory = is_file = False
    if is_directory:
        return from_pretrained_directory(path, heads=heads)
    if is_file:
        if path.name.endswith((".safetensors", ".safetensors.index.json")):
            return from_safetensors(path, heads=heads)
        return from_config(safetensors_headers.read_json(path), heads=heads, name=str(source))
    if str(source).endswith((".json", ".safetensors")):
        raise InvalidInput("model", f"there is no file {source}")
    return from_preset(str(source), heads=heads)


def from_preset(name: str, *, heads: Sequence[int] = ()) -> Shape:
    """Return the shape of a published model by its name, in any case, with or without owner.

    Raises InvalidInput with the known names nearest to it.
    """
    found = presets.find_exact(name)
    if found is None:
        raise InvalidInput(
            "model",
            f"{name[:80]!r} is neither a path nor a known model",
            accepted=(*presets.nearest(name), "a directory, config.json or safetensors index"),
        )
    return Shape(*found).with_heads(heads)


def find_preset(text: str) -> Shape | None:
    """Return the published model that free text such as "Vicuna-13B (fp16)" names, or None."""
    found = presets.find_in_text(text)
    return Shape(*found) if found else None


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, in the order of the table."""
    return tuple(presets.PRESETS)


def from_config(
    config: Mapping[str, Any], *, heads: Sequence[int] = (), name: str = "config.json"
) -> Shape:
    """Return the shape that a Hugging Face config describes.

    Raises InvalidInput for an unknown architecture and for missing keys, naming them.
    """
    return Shape(name, dimensions_of(config)).with_heads(heads)


def from_pretrained_directory(
    directory: str | Path, *, heads: Sequence[int] = (), pooling: Pooling | None = None
) -> Shape:
    """Return the shape of a Hugging Face model directory, its weights checked against its config.

    `pooling` replaces that of the checkpoint. Only headers of the safetensors files are read.

    Raises InvalidInput for a directory without
    config or weights, for a truncated header, for a weight whose shape the config contradicts, and for
    a pooling that is not supported.
    """
    folder = Path(directory)
    if not (folder / "config.json").is_file():
        raise InvalidInput("model", f"{folder} has no config.json")
    config = safetensors_headers.read_json(folder / "config.json")
    shape = from_config(config, heads=heads, name=str(directory))
    _check_weights(shape, safetensors_headers.directory_shapes(folder))
    pooling = pooling or checkpoint_pooling(folder)
    return shape if pooling is None else shape.with_pooling(pooling)


def from_safetensors(path: str | Path, *, heads: Sequence[int] = ()) -> Shape:
    """Return the shape of a safetensors file or index; the number of attention heads comes
    from the config.json in the same directory.

    Raises InvalidInput for a truncated header, a missing shard, or no config.json:
    tensor shapes alone do not show how many heads share a projection.
    """
    file = Path(path)
    shapes = safetensors_headers.file_shapes(file)
    config = file.parent / "config.json"
    if not config.is_file():
        raise InvalidInput(
            "model", f"{file.parent} has no config.json, which gives the number of attention heads"
        )
    shape = from_config(safetensors_headers.read_json(config), heads=heads, name=str(path))
    _check_weights(shape, shapes)
    return shape


def _check_weights(shape: Shape, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the embedding, the one weight that every checkpoint layout names alike."""
    expected = shape.embedding.tensors[0]
    for name, found in shapes.items():
        if name.endswith(expected.name) and found != expected.shape:
            raise InvalidInput(
                "model", f"weight {name} has shape {found}, the config says {expected.shape}"
            )
