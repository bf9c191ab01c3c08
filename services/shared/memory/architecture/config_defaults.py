"""What transformers' config classes take for optional sizes that a config.json leaves out.

From the classes of transformers 5.24.0; a test compares them with those installed.
"""

from __future__ import annotations

from services.shared.memory.architecture.dimensions import Family

# Inner width, and key and value heads; None: as many as attention heads.
_DECODERS: dict[Family, tuple[int, int | None]] = {
    Family.LLAMA: (11008, None),
    Family.MISTRAL: (14336, 8),
    Family.QWEN2: (22016, 32),
    Family.QWEN3: (22016, 32),
    Family.GRANITE: (11008, None),
    Family.GEMMA: (24576, 16),
    Family.GEMMA2: (9216, 4),
    Family.GEMMA3: (9216, 4),
    Family.PHI3: (8192, None),
    Family.GLM: (13696, 2),
    Family.GLM4: (13696, 2),
    Family.MIXTRAL: (14336, 8),
    Family.QWEN3_MOE: (6144, 4),
    Family.DEEPSEEK_V2: (11008, None),
    Family.DEEPSEEK_V3: (18432, 128),
    Family.GPT_OSS: (2880, 8),
}
_POSITIONS = {
    Family.BERT: 512,
    Family.ROBERTA: 512,
    Family.XLM_ROBERTA: 512,
    Family.DISTILBERT: 512,
    Family.GPT2: 1024,
    Family.GPT_BIGCODE: 1024,
    Family.OPT: 2048,
}
_INNER = {
    Family.BERT: 3072,
    Family.ROBERTA: 3072,
    Family.XLM_ROBERTA: 3072,
    Family.DISTILBERT: 3072,
    Family.MODERNBERT: 1152,
    Family.GPT_NEOX: 24576,
    Family.OPT: 3072,
    Family.T5: 2048,
}
_WINDOWS = {Family.MISTRAL: 4096, Family.GEMMA2: 4096, Family.GEMMA3: 4096, Family.GPT_OSS: 128}
_HEAD_DIMS = {
    Family.QWEN3: 128,
    Family.GPT_OSS: 64,
    Family.GEMMA: 256,
    Family.GEMMA2: 256,
    Family.GEMMA3: 256,
    Family.GLM: 128,
    Family.GLM4: 128,
    Family.T5: 64,
}


def inner_width(family: Family, *, hidden_size: int) -> int:
    """Return the default of `intermediate_size`."""
    if family in _DECODERS:
        return _DECODERS[family][0]
    return _INNER.get(family, 4 * hidden_size)


def key_value_heads(family: Family, *, num_heads: int) -> int:
    """Return the default of `num_key_value_heads` of a family that has grouped heads."""
    return _DECODERS[family][1] or num_heads


def positions(family: Family) -> int:
    """Return the default of `max_position_embeddings` of a family that learns an embedding of positions."""
    return _POSITIONS[family]


def head_dim(family: Family, *, hidden_size: int, num_heads: int) -> int:
    """Return the default of `head_dim`."""
    return _HEAD_DIMS.get(family, max(hidden_size // num_heads, 1))


def window(family: Family) -> int | None:
    """Return the default of `sliding_window`, None for families that have none."""
    return _WINDOWS.get(family)
