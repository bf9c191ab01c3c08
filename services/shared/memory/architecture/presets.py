"""Public dimensions of published models, each as its Hugging Face config.json states them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from functools import cache

from services.shared.memory.architecture.dimensions import Dimensions, Experts, Family, Latent

_F = Family


def _decoder(
    family: Family,
    sizes: tuple[int, int, int, int, int, int, int],
    *,
    tied: bool = False,
    experts: Experts | None = None,
    latent: Latent | None = None,
    window: int | None = None,
) -> Dimensions:
    """Take (hidden, intermediate, layers, heads, key-value heads, head_dim, vocabulary)."""
    h, wide, layers, heads, kv_heads, head_dim, vocab = sizes
    return Dimensions(
        family=family,
        hidden_size=h,
        intermediate_size=wide,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        tied=tied,
        attention_bias=family in (Family.QWEN2, Family.GLM),
        experts=experts,
        latent=latent,
        window=window,
    )


def _plain(
    family: Family,
    sizes: tuple[int, int, int, int, int],
    *,
    positions: int = 0,
    token_types: int = 0,
    kv_heads: int | None = None,
    tied: bool = True,
    bias: bool = True,
    dropout: bool = True,
    parallel_norms: int = 1,
) -> Dimensions:
    """Take (hidden, intermediate, layers, heads, vocabulary) of a model without a gated MLP."""
    h, wide, layers, heads, vocab = sizes
    return Dimensions(
        family=family,
        hidden_size=h,
        intermediate_size=wide,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads or heads,
        head_dim=h // heads,
        vocab_size=vocab,
        tied=tied,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        max_positions=positions,
        token_types=token_types,
        gated=family is Family.MODERNBERT,
        parallel_norms=parallel_norms,
        dropout=dropout,
    )


def _bert(sizes: tuple[int, int, int, int, int]) -> Dimensions:
    return _plain(_F.BERT, sizes, positions=512, token_types=2)


def _roberta(family: Family, sizes: tuple[int, int, int, int, int], positions: int) -> Dimensions:
    return _plain(family, sizes, positions=positions, token_types=1)


def _modernbert(sizes: tuple[int, int, int, int, int]) -> Dimensions:
    return _plain(_F.MODERNBERT, sizes, bias=False, dropout=False)


def _gpt2(h: int, layers: int, heads: int) -> Dimensions:
    return _plain(_F.GPT2, (h, 4 * h, layers, heads, 50257), positions=1024)


def _neox(h: int, layers: int, heads: int, vocab: int) -> Dimensions:
    return _plain(_F.GPT_NEOX, (h, 4 * h, layers, heads, vocab), tied=False, dropout=False)


def _bloom(h: int, layers: int, heads: int) -> Dimensions:
    return _plain(_F.BLOOM, (h, 4 * h, layers, heads, 250880), dropout=False)


def _opt(h: int, layers: int, heads: int) -> Dimensions:
    return _plain(_F.OPT, (h, 4 * h, layers, heads, 50272), positions=2048)


def _t5(sizes: tuple[int, int, int, int, int], *, gated: bool = False) -> Dimensions:
    h, wide, layers, heads, head_dim = sizes
    return Dimensions(
        family=_F.T5,
        hidden_size=h,
        intermediate_size=wide,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        vocab_size=32128,
        tied=not gated,
        decoder_layers=layers,
        gated=gated,
        dropout=True,
    )


def _gpt_oss(layers: int, num_experts: int) -> Dimensions:
    return replace(
        _decoder(
            _F.GPT_OSS,
            (2880, 2880, layers, 64, 8, 64, 201088),
            window=128,
            experts=Experts(num_experts, 2880, 4),
        ),
        attention_bias=True,
        output_bias=True,
    )


PRESETS: dict[str, Dimensions] = {
    "qwen3-0.6b": _decoder(_F.QWEN3, (1024, 3072, 28, 16, 8, 128, 151936), tied=True),
    "qwen3-1.7b": _decoder(_F.QWEN3, (2048, 6144, 28, 16, 8, 128, 151936), tied=True),
    "qwen3-4b": _decoder(_F.QWEN3, (2560, 9728, 36, 32, 8, 128, 151936), tied=True),
    "qwen3-8b": _decoder(_F.QWEN3, (4096, 12288, 36, 32, 8, 128, 151936)),
    "qwen3-14b": _decoder(_F.QWEN3, (5120, 17408, 40, 40, 8, 128, 151936)),
    "qwen3-32b": _decoder(_F.QWEN3, (5120, 25600, 64, 64, 8, 128, 151936)),
    "qwen3-30b-a3b": _decoder(
        _F.QWEN3_MOE,
        (2048, 6144, 48, 32, 4, 128, 151936),
        experts=Experts(128, 768, 8, normalised=True),
    ),
    "qwen3-235b-a22b": _decoder(
        _F.QWEN3_MOE,
        (4096, 12288, 94, 64, 4, 128, 151936),
        experts=Experts(128, 1536, 8, normalised=True),
    ),
    "qwen3-embedding-0.6b": _decoder(_F.QWEN3, (1024, 3072, 28, 16, 8, 128, 151669), tied=True),
    "qwen3-embedding-4b": _decoder(_F.QWEN3, (2560, 9728, 36, 32, 8, 128, 151665), tied=True),
    "qwen3-embedding-8b": _decoder(_F.QWEN3, (4096, 12288, 36, 32, 8, 128, 151665)),
    "qwen3-reranker-4b": _decoder(_F.QWEN3, (2560, 9728, 36, 32, 8, 128, 151669), tied=True),
    "qwen3-reranker-8b": _decoder(_F.QWEN3, (4096, 12288, 36, 32, 8, 128, 151669)),
    "qwen2.5-0.5b": _decoder(_F.QWEN2, (896, 4864, 24, 14, 2, 64, 151936), tied=True),
    "qwen2.5-1.5b": _decoder(_F.QWEN2, (1536, 8960, 28, 12, 2, 128, 151936), tied=True),
    "qwen2.5-3b": _decoder(_F.QWEN2, (2048, 11008, 36, 16, 2, 128, 151936), tied=True),
    "qwen2.5-7b": _decoder(_F.QWEN2, (3584, 18944, 28, 28, 4, 128, 152064)),
    "qwen2.5-14b": _decoder(_F.QWEN2, (5120, 13824, 48, 40, 8, 128, 152064)),
    "qwen2.5-32b": _decoder(_F.QWEN2, (5120, 27648, 64, 40, 8, 128, 152064)),
    "qwen2.5-72b": _decoder(_F.QWEN2, (8192, 29568, 80, 64, 8, 128, 152064)),
    "qwen1.5-0.5b": _decoder(_F.QWEN2, (1024, 2816, 24, 16, 16, 64, 151936), tied=True),
    "qwen1.5-1.8b": _decoder(_F.QWEN2, (2048, 5504, 24, 16, 16, 128, 151936)),
    "qwen1.5-4b": _decoder(_F.QWEN2, (2560, 6912, 40, 20, 20, 128, 151936)),
    "qwen1.5-7b": _decoder(_F.QWEN2, (4096, 11008, 32, 32, 32, 128, 151936)),
    "qwen1.5-14b": _decoder(_F.QWEN2, (5120, 13696, 40, 40, 40, 128, 152064)),
    "qwen1.5-32b": _decoder(_F.QWEN2, (5120, 27392, 64, 40, 8, 128, 152064)),
    "qwen1.5-72b": _decoder(_F.QWEN2, (8192, 24576, 80, 64, 64, 128, 152064)),
    "llama-7b": _decoder(_F.LLAMA, (4096, 11008, 32, 32, 32, 128, 32000)),
    "llama-13b": _decoder(_F.LLAMA, (5120, 13824, 40, 40, 40, 128, 32000)),
    "llama-30b": _decoder(_F.LLAMA, (6656, 17920, 60, 52, 52, 128, 32000)),
    "llama-65b": _decoder(_F.LLAMA, (8192, 22016, 80, 64, 64, 128, 32000)),
    "llama-2-7b": _decoder(_F.LLAMA, (4096, 11008, 32, 32, 32, 128, 32000)),
    "llama-2-13b": _decoder(_F.LLAMA, (5120, 13824, 40, 40, 40, 128, 32000)),
    "llama-2-70b": _decoder(_F.LLAMA, (8192, 28672, 80, 64, 8, 128, 32000)),
    "llama-3-8b": _decoder(_F.LLAMA, (4096, 14336, 32, 32, 8, 128, 128256)),
    "llama-3-70b": _decoder(_F.LLAMA, (8192, 28672, 80, 64, 8, 128, 128256)),
    "llama-3.1-405b": _decoder(_F.LLAMA, (16384, 53248, 126, 128, 8, 128, 128256)),
    "llama-3.2-1b": _decoder(_F.LLAMA, (2048, 8192, 16, 32, 8, 64, 128256), tied=True),
    "llama-3.2-3b": _decoder(_F.LLAMA, (3072, 8192, 28, 24, 8, 128, 128256), tied=True),
    "codellama-34b": _decoder(_F.LLAMA, (8192, 22016, 48, 64, 8, 128, 32000)),
    "tinyllama-1.1b": _decoder(_F.LLAMA, (2048, 5632, 22, 32, 4, 64, 32000)),
    "deepseek-llm-7b": _decoder(_F.LLAMA, (4096, 11008, 30, 32, 32, 128, 102400)),
    "yi-6b": _decoder(_F.LLAMA, (4096, 11008, 32, 32, 4, 128, 64000)),
    "yi-34b": _decoder(_F.LLAMA, (7168, 20480, 60, 56, 8, 128, 64000)),
    "granite-3-8b": _decoder(_F.GRANITE, (4096, 12800, 40, 32, 8, 128, 49155), tied=True),
    "mistral-7b": _decoder(_F.MISTRAL, (4096, 14336, 32, 32, 8, 128, 32000), window=4096),
    "mistral-7b-v0.3": _decoder(_F.MISTRAL, (4096, 14336, 32, 32, 8, 128, 32768)),
    "mistral-nemo-12b": _decoder(_F.MISTRAL, (5120, 14336, 40, 32, 8, 128, 131072)),
    "mistral-small-24b": _decoder(_F.MISTRAL, (5120, 32768, 40, 32, 8, 128, 131072)),
    "mixtral-8x7b": _decoder(
        _F.MIXTRAL,
        (4096, 14336, 32, 32, 8, 128, 32000),
        experts=Experts(8, 14336, 2, normalised=True),
    ),
    "mixtral-8x22b": _decoder(
        _F.MIXTRAL,
        (6144, 16384, 56, 48, 8, 128, 32768),
        experts=Experts(8, 16384, 2, normalised=True),
    ),
    "gemma-2b": _decoder(_F.GEMMA, (2048, 16384, 18, 8, 1, 256, 256000), tied=True),
    "gemma-7b": _decoder(_F.GEMMA, (3072, 24576, 28, 16, 16, 256, 256000), tied=True),
    "gemma-2-2b": _decoder(_F.GEMMA2, (2304, 9216, 26, 8, 4, 256, 256000), tied=True, window=4096),
    "gemma-2-9b": _decoder(
        _F.GEMMA2, (3584, 14336, 42, 16, 8, 256, 256000), tied=True, window=4096
    ),
    "gemma-2-27b": _decoder(
        _F.GEMMA2, (4608, 36864, 46, 32, 16, 128, 256000), tied=True, window=4096
    ),
    "gemma-3-1b": _decoder(_F.GEMMA3, (1152, 6912, 26, 4, 1, 256, 262144), tied=True, window=512),
    "gemma-3-4b": _decoder(_F.GEMMA3, (2560, 10240, 34, 8, 4, 256, 262208), tied=True, window=1024),
    "gemma-3-12b": _decoder(
        _F.GEMMA3, (3840, 15360, 48, 16, 8, 256, 262208), tied=True, window=1024
    ),
    "gemma-3-27b": _decoder(
        _F.GEMMA3, (5376, 21504, 62, 32, 16, 128, 262208), tied=True, window=1024
    ),
    "phi-3-mini": _decoder(_F.PHI3, (3072, 8192, 32, 32, 32, 96, 32064)),
    "phi-4-14b": _decoder(_F.PHI3, (5120, 17920, 40, 40, 10, 128, 100352)),
    "glm-4-9b": _decoder(_F.GLM, (4096, 13696, 40, 32, 2, 128, 151552)),
    "chatglm3-6b": _decoder(_F.GLM, (4096, 13696, 28, 32, 2, 128, 65024)),
    "glm-4-9b-0414": _decoder(_F.GLM4, (4096, 13696, 40, 32, 2, 128, 151552)),
    "glm-4-32b-0414": _decoder(_F.GLM4, (6144, 23040, 61, 48, 2, 128, 151552)),
    "deepseek-v2-lite": _decoder(
        _F.DEEPSEEK_V2,
        (2048, 10944, 27, 16, 16, 128, 102400),
        experts=Experts(64, 1408, 6, shared_experts=2, dense_layers=1),
        latent=Latent(None, 512, rope_dim=64, nope_dim=128, value_dim=128),
    ),
    "moonlight-16b-a3b": _decoder(
        _F.DEEPSEEK_V3,
        (2048, 11264, 27, 16, 16, 128, 163840),
        experts=Experts(64, 1408, 6, normalised=True, shared_experts=2, dense_layers=1),
        latent=Latent(None, 512, rope_dim=64, nope_dim=128, value_dim=128),
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "deepseek-v3": _decoder(
        _F.DEEPSEEK_V3,
        (7168, 18432, 61, 128, 128, 128, 129280),
        experts=Experts(256, 2048, 8, normalised=True, groups=8, shared_experts=1, dense_layers=3),
        latent=Latent(1536, 512, rope_dim=64, nope_dim=128, value_dim=128),
    ),
    "bert-base-uncased": _bert((768, 3072, 12, 12, 30522)),
    "bert-base-cased": _bert((768, 3072, 12, 12, 28996)),
    "bert-base-chinese": _bert((768, 3072, 12, 12, 21128)),
    "bert-base-multilingual-cased": _bert((768, 3072, 12, 12, 119547)),
    "bert-large-uncased": _bert((1024, 4096, 24, 16, 30522)),
    "chinese-roberta-wwm-ext-large": _bert((1024, 4096, 24, 16, 21128)),
    "roberta-base": _roberta(_F.ROBERTA, (768, 3072, 12, 12, 50265), 514),
    "roberta-large": _roberta(_F.ROBERTA, (1024, 4096, 24, 16, 50265), 514),
    "xlm-roberta-base": _roberta(_F.XLM_ROBERTA, (768, 3072, 12, 12, 250002), 514),
    "xlm-roberta-large": _roberta(_F.XLM_ROBERTA, (1024, 4096, 24, 16, 250002), 514),
    "bge-m3": _roberta(_F.XLM_ROBERTA, (1024, 4096, 24, 16, 250002), 8194),
    "bge-small-en": _bert((384, 1536, 12, 12, 30522)),
    "bge-small-zh": _bert((512, 2048, 4, 8, 21128)),
    "all-minilm-l6": _bert((384, 1536, 6, 12, 30522)),
    "multilingual-e5-small": _bert((384, 1536, 12, 12, 250037)),
    "distilbert-base-uncased": _plain(_F.DISTILBERT, (768, 3072, 6, 12, 30522), positions=512),
    "modernbert-base": _modernbert((768, 1152, 22, 12, 50368)),
    "modernbert-large": _modernbert((1024, 2624, 28, 16, 50368)),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "pythia-160m": _neox(768, 12, 12, 50304),
    "pythia-410m": _neox(1024, 24, 16, 50304),
    "pythia-1.4b": _neox(2048, 24, 16, 50304),
    "pythia-2.8b": _neox(2560, 32, 32, 50304),
    "pythia-6.9b": _neox(4096, 32, 32, 50432),
    "pythia-12b": _neox(5120, 36, 40, 50688),
    "gpt-neox-20b": _neox(6144, 44, 64, 50432),
    "starcoder-15b": _plain(
        _F.GPT_BIGCODE, (6144, 24576, 40, 48, 49152), positions=8192, kv_heads=1
    ),
    "santacoder-1.1b": _plain(
        _F.GPT_BIGCODE, (2048, 8192, 24, 16, 49280), positions=2048, kv_heads=1
    ),
    "falcon-7b": _plain(
        _F.FALCON, (4544, 18176, 32, 71, 65024), kv_heads=1, bias=False, dropout=False
    ),
    "falcon-40b": _plain(
        _F.FALCON,
        (8192, 32768, 60, 128, 65024),
        kv_heads=8,
        bias=False,
        dropout=False,
        parallel_norms=2,
    ),
    "bloom-560m": _bloom(1024, 24, 16),
    "bloom-1b1": _bloom(1536, 24, 16),
    "bloom-1b7": _bloom(2048, 24, 16),
    "bloom-3b": _bloom(2560, 30, 32),
    "bloom-7b1": _bloom(4096, 30, 32),
    "bloom-176b": _bloom(14336, 70, 112),
    "opt-125m": _opt(768, 12, 12),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-2.7b": _opt(2560, 32, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "opt-30b": _opt(7168, 48, 56),
    "opt-66b": _opt(9216, 64, 72),
    "t5-small": _t5((512, 2048, 6, 8, 64)),
    "t5-base": _t5((768, 3072, 12, 12, 64)),
    "t5-large": _t5((1024, 4096, 24, 16, 64)),
    "t5-3b": _t5((1024, 16384, 24, 32, 128)),
    "t5-11b": _t5((1024, 65536, 24, 128, 128)),
    "flan-t5-xl": _t5((2048, 5120, 24, 32, 64), gated=True),
    "flan-t5-xxl": _t5((4096, 10240, 24, 64, 64), gated=True),
}

# Other published models of exactly these dimensions, and other spellings.
_ALSO_KNOWN_AS = {
    "qwen2-0.5b": "qwen2.5-0.5b",
    "qwen2-1.5b": "qwen2.5-1.5b",
    "qwen2-7b": "qwen2.5-7b",
    "qwen2-72b": "qwen2.5-72b",
    "deepseek-r1-distill-qwen-1.5b": "qwen2.5-1.5b",
    "deepseek-r1-distill-qwen-7b": "qwen2.5-7b",
    "deepseek-r1-distill-qwen-14b": "qwen2.5-14b",
    "deepseek-r1-distill-qwen-32b": "qwen2.5-32b",
    "deepseek-r1-distill-llama-8b": "llama-3-8b",
    "deepseek-r1-distill-llama-70b": "llama-3-70b",
    "deepseek-prover-7b": "deepseek-llm-7b",
    "deepseek-r1": "deepseek-v3",
    "deepseek-v3-16b": "deepseek-v2-lite",
    "qwen3-vl-30b-a3b": "qwen3-30b-a3b",
    "qwen3-coder-30b-a3b": "qwen3-30b-a3b",
    "qwen3-vl-2b": "qwen3-1.7b",
    "qwen3-vl-4b": "qwen3-4b",
    "qwen3-vl-8b": "qwen3-8b",
    "qwen3-vl-32b": "qwen3-32b",
    "qwen2.5-vl-3b": "qwen2.5-3b",
    "qwen2.5-vl-7b": "qwen2.5-7b",
    "qwen2.5-vl-32b": "qwen2.5-32b",
    "qwen2.5-vl-72b": "qwen2.5-72b",
    "qwen2-vl-2b": "qwen2.5-1.5b",
    "qwen2-vl-7b": "qwen2.5-7b",
    "qwen2-vl-72b": "qwen2.5-72b",
    "qwen3-reranker-0.6b": "qwen3-embedding-0.6b",
    "llama-33b": "llama-30b",
    "llama-3.1-8b": "llama-3-8b",
    "llama-3.1-70b": "llama-3-70b",
    "llama-3.3-70b": "llama-3-70b",
    "vicuna-7b": "llama-7b",
    "vicuna-13b": "llama-13b",
    "vicuna-33b": "llama-30b",
    "alpaca-7b": "llama-7b",
    "codellama-70b": "llama-2-70b",
    "granite-8b": "granite-3-8b",
    "mistral-7b-instruct-v0.3": "mistral-7b-v0.3",
    "mistral-small": "mistral-small-24b",
    "mistral-nemo": "mistral-nemo-12b",
    "phi-3-mini-4k": "phi-3-mini",
    "phi-4": "phi-4-14b",
    "starcoder": "starcoder-15b",
    "starcoderbase": "starcoder-15b",
    "santacoder": "santacoder-1.1b",
    "gpt-neox": "gpt-neox-20b",
    "bloom": "bloom-176b",
    "bert-base": "bert-base-uncased",
    "bert-large": "bert-large-uncased",
    "distilbert": "distilbert-base-uncased",
    "bge-reranker-v2-m3": "bge-m3",
    "bge-reranker-base": "xlm-roberta-base",
    "bge-reranker-large": "xlm-roberta-large",
    "bge-base-en": "bert-base-uncased",
    "bge-large-en": "bert-large-uncased",
    "bge-base-zh": "bert-base-chinese",
    "bge-large-zh": "chinese-roberta-wwm-ext-large",
    "e5-small": "bge-small-en",
    "e5-base": "bert-base-uncased",
    "e5-large": "bert-large-uncased",
    "multilingual-e5-base": "xlm-roberta-base",
    "multilingual-e5-large": "xlm-roberta-large",
    "all-minilm-l12": "bge-small-en",
    "paraphrase-multilingual-minilm-l12": "multilingual-e5-small",
    "ms-marco-minilm-l6": "all-minilm-l6",
    "ms-marco-minilm-l12": "bge-small-en",
}

_LONGEST_NAME = (
    200  # of a model; beyond it the search for suffixes, which is quadratic, would matter
)

# What publishers append to a name without changing a dimension.
_SUFFIX = re.compile(
    r"([-_ ](instruct|chat|base|hf|it|pt|bf16|fp16|v\d{1,4}(\.\d{1,4})?|\d{4}|\dk|gptq|awq|int[48]"
    r"|gptq-int[48]|distill|preview))+$"
)


def find_exact(name: str) -> tuple[str, Dimensions] | None:
    """Return the preset called `name`, ignoring case, owner, separators and usual suffixes."""
    bare = name.strip().lower().rsplit("/", 1)[-1]
    if len(bare) > _LONGEST_NAME:
        return None
    for candidate in (bare, _SUFFIX.sub("", bare)):
        found = _by_spelling().get(_normalise(candidate.removeprefix("meta-")))
        if found:
            return found, PRESETS[found]
    return None


def nearest(name: str, *, count: int = 5) -> tuple[str, ...]:
    """Return the known names that are most like `name`, the nearest first; empty without any."""
    bare = name[:_LONGEST_NAME].strip().lower().rsplit("/", 1)[-1]
    return tuple(get_close_matches(bare, (*PRESETS, *_ALSO_KNOWN_AS), n=count, cutoff=0.5))


def find_in_text(text: str) -> tuple[str, Dimensions] | None:
    """Return the preset that free text names, the longest spelling first, or None."""
    whole = find_exact(text)
    if whole:
        return whole
    squeezed = _normalise(text)
    for spelling, found in _spellings_longest_first():
        if len(spelling) > 4 and spelling in squeezed:
            return found, PRESETS[found]
    return None


@cache
def _by_spelling() -> dict[str, str]:
    return dict(_spellings())


@cache
def _spellings_longest_first() -> tuple[tuple[str, str], ...]:
    return tuple(sorted(_by_spelling().items(), key=lambda item: -len(item[0])))


def _spellings() -> Iterator[tuple[str, str]]:
    for name in PRESETS:
        yield _normalise(name), name
    for alias, name in _ALSO_KNOWN_AS.items():
        yield _normalise(alias), name


def _normalise(text: str) -> str:
    # The dot stays: without it OPT-1.3B and OPT-13B would be one name.
    return re.sub(r"[^a-z0-9.]", "", text.lower())
