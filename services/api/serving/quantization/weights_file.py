"""The weights of a student prepared for 8-bit serving: how they are written and read.

The file holds all that the engine reads but the heads, which stay in the artifact, in full precision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from services.api.serving.engines.packed_weights import (
    Backbone,
    Block,
    Layer,
    Product,
    Shape,
    make_layer,
    rotations,
    shape_of,
    take_blocks,
)
from services.api.serving.quantization.int8_linear import (
    Conversions,
    Int8Linear,
    QuantisedProduct,
    quantise_product,
)
from services.api.serving.quantization.record import prepared_weights
from services.shared.files.atomic_write import atomic_write
from services.shared.files.hashing import file_sha256
from services.shared.model.classifier import Classifier


def save_weights(classifier: Classifier, artifact_dir: Path) -> str:
    """Round a classifier's products to int8, write them, and return the file's hash.

    The classifier is used up.
    """
    module = classifier.backbone
    shape = shape_of(classifier)
    about = {
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
    path = prepared_weights(artifact_dir)
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, metadata=about)
    return file_sha256(path)


def load_backbone(
    artifact_dir: Path, *, max_length: int, dtype: torch.dtype, conversions: Conversions
) -> Backbone:
    """Return the prepared backbone; what is not int8 is computed in `dtype`."""
    with safe_open(prepared_weights(artifact_dir), framework="pt") as file:
        about = file.metadata()
        names = set(file.keys())
        cos, sin = rotations(
            file.get_tensor("frequencies"),
            float(about["scaling"]),
            max_length=max_length,
            dtype=dtype,
        )
        return Backbone(
            shape=Shape(**json.loads(about["shape"])),
            embedding=file.get_tensor("embedding"),
            layers=[
                _load_layer(file, names, str(index), dtype, conversions)
                for index in range(int(about["layers"]))
            ],
            final_norm=file.get_tensor("final_norm").to(dtype),
            cos=cos,
            sin=sin,
        )


def _block_tensors(block: Block[Product]) -> list[tuple[str, Tensor]]:
    tensors = [("attention_norm", block.attention_norm), ("mlp_norm", block.mlp_norm)]
    if block.query_key_norm is not None:
        tensors.append(("query_key_norm", block.query_key_norm))
    for name, product in block.products.items():
        quantised = quantise_product(product)
        tensors += [(f"{name}.weight", quantised.weight), (f"{name}.scale", quantised.scale)]
        if quantised.bias is not None:
            tensors.append((f"{name}.bias", quantised.bias))
    return tensors


def _load_layer(
    file: Any, names: set[str], layer: str, dtype: torch.dtype, conversions: Conversions
) -> Layer:
    own = {
        name.removeprefix(f"{layer}."): file.get_tensor(name)
        for name in names
        if name.startswith(f"{layer}.")
    }
    norm = own.get("query_key_norm")
    block: Block[QuantisedProduct] = Block(
        attention_norm=own["attention_norm"].to(dtype),
        query_key_norm=None if norm is None else norm.to(dtype),
        mlp_norm=own["mlp_norm"].to(dtype),
        products={
            name.removesuffix(".weight"): QuantisedProduct(
                tensor,
                own[name.replace(".weight", ".scale")],
                own.get(name.replace(".weight", ".bias")),
            )
            for name, tensor in own.items()
            if name.endswith(".weight")
        },
    )
    return make_layer(block, lambda product: Int8Linear(product, conversions))
