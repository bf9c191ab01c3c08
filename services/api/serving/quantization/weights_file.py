"""Writing and reading the int8 weights of a student.

The file holds everything but the heads, which stay in the artifact in full precision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from services.api.serving.engines.encoder_weights import ENCODER_FAMILIES, EncoderBackbone
from services.api.serving.engines.linear import LinearWeights
from services.api.serving.engines.packed_weights import (
    Backbone,
    BackboneShape,
    BlockWeights,
    Layer,
    backbone_shape,
    make_layer,
    rope_tables,
    take_blocks,
)
from services.api.serving.quantization.encoder_weights_file import encoder_tensors, load_encoder
from services.api.serving.quantization.int8_linear import (
    Int8Linear,
    Int8Ops,
    Int8Weights,
    quantize_weights,
)
from services.api.serving.quantization.record import int8_weights_path
from services.shared.files.atomic_write import atomic_write
from services.shared.files.hashing import file_sha256
from services.shared.model.classifier import Classifier


def save_int8_weights(classifier: Classifier, artifact_dir: Path, *, max_length: int) -> str:
    """Quantize a classifier's linears to int8, write them, and return the file's hash.

    The classifier is consumed.
    """
    if classifier.config.model_type in ENCODER_FAMILIES:
        tensors, metadata = encoder_tensors(classifier, max_length=max_length)
    else:
        tensors, metadata = _decoder_tensors(classifier)
    path = int8_weights_path(artifact_dir)
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)
    return file_sha256(path)


def _decoder_tensors(classifier: Classifier) -> tuple[dict[str, Tensor], dict[str, str]]:
    module = classifier.backbone
    shape = backbone_shape(classifier)
    metadata = {
        "shape": json.dumps(vars(shape)),
        "scaling": str(float(module.rotary_emb.attention_scaling)),
        "layers": str(classifier.config.num_hidden_layers),
    }
    tensors = {
        "embedding": module.embed_tokens.weight.detach().to(torch.bfloat16),
        "final_norm": module.norm.weight.detach(),
        "frequencies": module.rotary_emb.inv_freq.float(),
    }
    for index, block in enumerate(take_blocks(classifier)):
        for name, tensor in _block_tensors(block):
            tensors[f"{index}.{name}"] = tensor.contiguous()
    return tensors, metadata


def load_int8_backbone(
    artifact_dir: Path, *, max_length: int, dtype: torch.dtype, ops: Int8Ops
) -> Backbone | EncoderBackbone:
    """Return the int8 backbone; everything else is computed in `dtype`."""
    with safe_open(int8_weights_path(artifact_dir), framework="pt") as file:
        metadata = file.metadata()
        if "encoder" in metadata:
            return load_encoder(file, dtype=dtype, ops=ops)
        names = set(file.keys())
        cos, sin = rope_tables(
            file.get_tensor("frequencies"),
            float(metadata["scaling"]),
            max_length=max_length,
            dtype=dtype,
        )
        return Backbone(
            shape=BackboneShape(**json.loads(metadata["shape"])),
            embedding=file.get_tensor("embedding"),
            layers=[
                _load_layer(file, names, str(index), dtype, ops)
                for index in range(int(metadata["layers"]))
            ],
            final_norm=file.get_tensor("final_norm").to(dtype),
            cos=cos,
            sin=sin,
        )


def _block_tensors(block: BlockWeights[LinearWeights]) -> list[tuple[str, Tensor]]:
    tensors = [("attention_norm", block.attention_norm), ("mlp_norm", block.mlp_norm)]
    if block.query_key_norm is not None:
        tensors.append(("query_key_norm", block.query_key_norm))
    for name, linear in block.linears.items():
        quantized = quantize_weights(linear)
        tensors += [(f"{name}.weight", quantized.weight), (f"{name}.scale", quantized.scale)]
        if quantized.bias is not None:
            tensors.append((f"{name}.bias", quantized.bias))
    return tensors


def _load_layer(file: Any, names: set[str], layer: str, dtype: torch.dtype, ops: Int8Ops) -> Layer:
    own = {
        name.removeprefix(f"{layer}."): file.get_tensor(name)
        for name in names
        if name.startswith(f"{layer}.")
    }
    norm = own.get("query_key_norm")
    block: BlockWeights[Int8Weights] = BlockWeights(
        attention_norm=own["attention_norm"].to(dtype),
        query_key_norm=None if norm is None else norm.to(dtype),
        mlp_norm=own["mlp_norm"].to(dtype),
        linears={
            name.removesuffix(".weight"): Int8Weights(
                tensor,
                own[name.replace(".weight", ".scale")],
                own.get(name.replace(".weight", ".bias")),
            )
            for name, tensor in own.items()
            if name.endswith(".weight")
        },
    )
    return make_layer(block, lambda weights: Int8Linear(weights, ops))
