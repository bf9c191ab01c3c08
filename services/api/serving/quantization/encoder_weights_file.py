"""The int8 weights of an encoder in the weights file: everything but its linears keeps its precision."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from services.api.serving.engines.encoder_weights import (
    EncoderBackbone,
    EncoderBlock,
    EncoderLayer,
    EncoderShape,
    Norm,
    Rope,
    make_encoder_layer,
    take_embeddings,
    take_encoder_blocks,
)
from services.api.serving.engines.linear import Activation
from services.api.serving.quantization.int8_linear import (
    Int8Linear,
    Int8Ops,
    Int8Weights,
    quantize_weights,
)
from services.shared.memory.architecture.pooling import Pooling
from services.shared.model.classifier import Classifier

_TABLES = ("words", "positions", "types")
_NORMS = ("attention_norm", "mlp_norm")


def encoder_tensors(
    classifier: Classifier, *, max_length: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of an encoder, its linears in 8 bits, and the file's metadata.

    The classifier is consumed.
    """
    fields = take_embeddings(classifier, max_length=max_length)
    tensors = {name: fields[name] for name in _TABLES if fields[name] is not None}
    tensors |= dict(_norm_tensors("embedding_norm", fields["embedding_norm"]))
    tensors |= dict(_norm_tensors("final_norm", fields["final_norm"]))
    for is_local, rope in fields["ropes"].items():
        tensors |= {f"rope.{int(is_local)}.cos": rope.cos, f"rope.{int(is_local)}.sin": rope.sin}
    are_local = []
    for index, block in enumerate(take_encoder_blocks(classifier)):
        are_local.append(block.is_local)
        for norm in _NORMS:
            tensors |= dict(_norm_tensors(f"{index}.{norm}", getattr(block, norm)))
        for name, linear in block.linears.items():
            quantized = quantize_weights(linear)
            tensors[f"{index}.{name}.weight"] = quantized.weight
            tensors[f"{index}.{name}.scale"] = quantized.scale
            if quantized.bias is not None:
                tensors[f"{index}.{name}.bias"] = quantized.bias
    metadata = {"encoder": json.dumps(asdict(fields["shape"])), "local": json.dumps(are_local)}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, metadata


def load_encoder(file: Any, *, dtype: torch.dtype, ops: Int8Ops) -> EncoderBackbone:
    """Return the encoder of an open weights file; what is not in 8 bits is computed in `dtype`."""
    metadata, names = file.metadata(), set(file.keys())
    shape = _shape(json.loads(metadata["encoder"]))

    def tensor(name: str) -> Tensor | None:
        return file.get_tensor(name).to(dtype) if name in names else None

    def norm(name: str) -> Norm | None:
        weight = tensor(f"{name}.weight")
        return None if weight is None else Norm(weight, tensor(f"{name}.bias"))

    def rope(is_local: bool) -> Rope | None:
        cos, sin = (tensor(f"rope.{int(is_local)}.{part}") for part in ("cos", "sin"))
        return None if cos is None or sin is None else Rope(cos, sin)

    def linear(layer: int, name: str) -> Int8Weights:
        own = f"{layer}.{name}"
        follows = shape.activation if shape.post_norm and name == "up" else Activation.NONE
        bias = file.get_tensor(f"{own}.bias") if f"{own}.bias" in names else None
        return Int8Weights(
            file.get_tensor(f"{own}.weight"), file.get_tensor(f"{own}.scale"), bias, follows
        )

    def layer(index: int, *, is_local: bool) -> EncoderLayer:
        mlp_norm = norm(f"{index}.mlp_norm")
        assert mlp_norm is not None
        linears = {
            name.split(".")[1]
            for name in names
            if name.startswith(f"{index}.") and name.endswith(".scale")
        }
        block: EncoderBlock[Int8Weights] = EncoderBlock(
            attention_norm=norm(f"{index}.attention_norm"),
            mlp_norm=mlp_norm,
            is_local=is_local,
            linears={name: linear(index, name) for name in linears},
        )
        return make_encoder_layer(block, lambda weights: Int8Linear(weights, ops))

    embedding_norm = norm("embedding_norm")
    assert embedding_norm is not None
    ropes = {is_local: rope(is_local) for is_local in (False, True)}
    return EncoderBackbone(
        shape=shape,
        words=file.get_tensor("words"),
        positions=tensor("positions"),
        types=tensor("types"),
        embedding_norm=embedding_norm,
        ropes={is_local: found for is_local, found in ropes.items() if found is not None},
        layers=[
            layer(index, is_local=is_local)
            for index, is_local in enumerate(json.loads(metadata["local"]))
        ],
        final_norm=norm("final_norm"),
    )


def _shape(fields: dict[str, Any]) -> EncoderShape:
    return EncoderShape(
        **fields
        | {"pooling": Pooling(fields["pooling"]), "activation": Activation(fields["activation"])}
    )


def _norm_tensors(name: str, norm: Norm | None) -> Iterator[tuple[str, Tensor]]:
    if norm is None:
        return
    yield f"{name}.weight", norm.weight
    if norm.bias is not None:
        yield f"{name}.bias", norm.bias
