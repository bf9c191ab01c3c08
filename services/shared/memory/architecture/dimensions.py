"""The numbers that determine a transformer's parameter tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple


class Family(str, Enum):
    """An architecture, named by the `model_type` of its Hugging Face config."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    GRANITE = "granite"
    GEMMA = "gemma"
    GEMMA2 = "gemma2"
    GEMMA3 = "gemma3_text"
    PHI3 = "phi3"
    GLM = "glm"
    GLM4 = "glm4"
    MIXTRAL = "mixtral"
    QWEN3_MOE = "qwen3_moe"
    DEEPSEEK_V2 = "deepseek_v2"
    DEEPSEEK_V3 = "deepseek_v3"
    GPT_OSS = "gpt_oss"
    BERT = "bert"
    ROBERTA = "roberta"
    XLM_ROBERTA = "xlm-roberta"
    DISTILBERT = "distilbert"
    MODERNBERT = "modernbert"
    GPT2 = "gpt2"
    GPT_NEOX = "gpt_neox"
    GPT_BIGCODE = "gpt_bigcode"
    FALCON = "falcon"
    BLOOM = "bloom"
    OPT = "opt"
    T5 = "t5"

    __str__ = str.__str__


# Decoders of RMS norms and a gated MLP around q, k, v, o projections: one operation sequence.
LLAMA_LIKE = frozenset(
    {
        Family.LLAMA,
        Family.MISTRAL,
        Family.QWEN2,
        Family.QWEN3,
        Family.GRANITE,
        Family.GEMMA,
        Family.GEMMA2,
        Family.GEMMA3,
    }
)
# The same around a fused q, k, v or gate and up projection, or heads rotated in part.
PHI_LIKE = frozenset({Family.PHI3, Family.GLM, Family.GLM4})
BERT_LIKE = frozenset({Family.BERT, Family.ROBERTA, Family.XLM_ROBERTA, Family.DISTILBERT})
EXPERT_FAMILIES = frozenset(
    {Family.MIXTRAL, Family.QWEN3_MOE, Family.DEEPSEEK_V2, Family.DEEPSEEK_V3, Family.GPT_OSS}
)
# transformers has no other kernel for their attention: one with ALiBi, one with sinks.
EAGER_ONLY = frozenset({Family.BLOOM, Family.GPT_OSS})


class Latent(NamedTuple):
    """The low-rank projections of multi-head latent attention (DeepSeek V2 and V3)."""

    query_rank: int | None
    key_value_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


class Experts(NamedTuple):
    """A mixture of experts, `per_token` of which process each token.

    The first `dense_layers` layers keep an ordinary MLP. `normalised`: the weights of a token's experts
    are divided by their sum. With `groups`, experts are chosen within the best groups of them.
    """

    num_experts: int
    intermediate_size: int
    per_token: int
    normalised: bool = False
    groups: int = 1
    shared_experts: int = 0
    dense_layers: int = 0


@dataclass(frozen=True)
class Dimensions:
    """The sizes of a model, in elements, as its config.json has them."""

    family: Family
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    max_positions: int = 0
    token_types: int = 0
    decoder_layers: int = 0
    gated: bool = True
    parallel_norms: int = 1
    dropout: bool = False
    window: int | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    mean_pooling: bool = False  # heads read the mean over all tokens, not one token

    @property
    def query_size(self) -> int:
        """Width of all query heads together; not the hidden size where head_dim is set apart from it."""
        return self.num_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together; that of the value heads is the same."""
        return self.num_kv_heads * self.head_dim

    def of_layer(self, index: int) -> Dimensions:
        """Return the dimensions of one layer: without experts where the layer keeps an ordinary MLP."""
        if self.experts is None or index >= self.experts.dense_layers:
            return self
        return replace(self, experts=None)

    @property
    def query_head_dim(self) -> int:
        """Width of one query or key head, of which latent attention rotates a part."""
        return self.latent.nope_dim + self.latent.rope_dim if self.latent else self.head_dim

    @property
    def value_head_dim(self) -> int:
        """Width of one value head, which only latent attention sets apart from that of a query head."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys have a norm of their own."""
        return self.family in (Family.QWEN3, Family.GEMMA3, Family.QWEN3_MOE)
