"""Settings of serving, read once by the API from `STILLHOUSE_SERVING_*`."""

from __future__ import annotations

import os
from enum import Enum

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class EngineChoice(str, Enum):
    """Which engine runs a student."""

    AUTO = "auto"  # int8 where its gate passed, else packed where it supports the backbone
    PACKED = "packed"
    PACKED_INT8 = "packed-int8"
    TRANSFORMERS = "transformers"

    __str__ = str.__str__


class ServingDtype(str, Enum):
    """The number format that the packed and the padded engine compute in."""

    AUTO = "auto"  # bfloat16 where the processor or accelerator multiplies it faster than float32
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    __str__ = str.__str__


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ServingSettings(BaseSettings):
    """Queue limits, batch sizes and thread counts, and when models are loaded and quantized."""

    model_config = SettingsConfigDict(env_prefix="STILLHOUSE_SERVING_", frozen=True)

    batch_tokens: int = Field(
        512,
        ge=1,
        description="Tokens per batch. 256 favours latency; above 1024 the CPU caches overflow "
        "(measured on Zen 4 with Qwen3-0.6B shapes).",
    )
    queue_tokens: int = Field(
        65_536, ge=1, description="Tokens that may be queued; beyond that, 429."
    )
    deadline_seconds: float = Field(30.0, gt=0, description="Maximum time a text is queued.")
    lanes: int = Field(
        default_factory=lambda: max(1, _num_cores() // 4),
        ge=1,
        description="Thread groups sharing one copy of the weights: one batch per lane or per thread.",
    )
    threads: int = Field(
        default_factory=lambda: min(4, _num_cores()), ge=1, description="Threads per lane."
    )
    engine: EngineChoice = EngineChoice.AUTO
    dtype: ServingDtype = ServingDtype.AUTO
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    compile: bool = Field(
        True,
        description="Compile the elementwise functions between 8-bit matrix products if g++ is installed: "
        "a tenth faster, seconds longer to load. In bf16 they take too little time to matter.",
    )
    prepare_int8_from_bytes: int = Field(
        200 * 1024**2,
        ge=0,
        description="Students of at least this size are quantized to 8 bits once they serve; "
        "smaller ones would gain nothing.",
    )
    poll_seconds: float = Field(
        1.0, gt=0, description="Interval between checks for new promotions."
    )
    memory_reserve_bytes: int = Field(
        512 * 1024**2, ge=0, description="Memory that must stay free while a student loads."
    )
    shadow_alias: str = Field("challenger", description="The alias that receives shadow traffic.")
    shadow_share: float = Field(
        0.0, ge=0, le=1, description="Share of requests that the shadow alias also answers."
    )

    @property
    def total_threads(self) -> int:
        """Return the number of threads of all lanes together."""
        return self.lanes * self.threads
