"""How the serving room uses the machine: read from `STILLHOUSE_SERVING_*`, once, by the API."""

from __future__ import annotations

import os
from enum import Enum

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class EngineChoice(str, Enum):
    """Which engine runs a student."""

    AUTO = "auto"  # int8 where it passed its gate, else packed where the backbone has the shape
    PACKED = "packed"
    PACKED_INT8 = "packed-int8"
    TRANSFORMERS = "transformers"

    __str__ = str.__str__


class ServingDtype(str, Enum):
    """The type that the packed and the transformers engine compute in."""

    AUTO = "auto"  # bfloat16 where the processor or accelerator multiplies it faster
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    __str__ = str.__str__


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ServingSettings(BaseSettings):
    """Limits of the queue, and how batches and threads are laid out."""

    model_config = SettingsConfigDict(env_prefix="STILLHOUSE_SERVING_", frozen=True)

    batch_tokens: int = Field(
        512,
        ge=1,
        description="Tokens of one batch. 256 favours latency; above 1024 caches overflow "
        "(measured on a Zen 4 with Qwen3-0.6B shapes).",
    )
    queue_tokens: int = Field(65_536, ge=1, description="Tokens that may wait; more get a 429.")
    deadline_seconds: float = Field(30.0, gt=0, description="A text waits no longer than this.")
    lanes: int = Field(
        default_factory=lambda: max(1, _cores() // 4),
        ge=1,
        description="Groups of threads over one copy of the weights: one batch each, or one a thread.",
    )
    threads: int = Field(
        default_factory=lambda: min(4, _cores()), ge=1, description="Threads of one lane."
    )
    engine: EngineChoice = EngineChoice.AUTO
    dtype: ServingDtype = ServingDtype.AUTO
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    compile: bool = Field(
        True,
        description="Compile the small functions between 8-bit products where g++ is installed: "
        "a tenth faster, seconds more to load. In bf16 they take too little time to matter.",
    )
    prepare_int8_from_bytes: int = Field(
        200 * 1024**2,
        ge=0,
        description="Students of so many bytes are prepared for 8-bit serving once they serve; "
        "small ones would gain nothing.",
    )
    poll_seconds: float = Field(1.0, gt=0, description="How often promotions are looked at.")
    memory_reserve_bytes: int = Field(
        512 * 1024**2, ge=0, description="Memory that loading a student must leave free."
    )
    shadow_alias: str = Field("challenger", description="The alias that shadow traffic goes to.")
    shadow_share: float = Field(
        0.0, ge=0, le=1, description="Share of requests that the shadow alias answers too."
    )

    @property
    def all_threads(self) -> int:
        """Return the threads of all lanes together."""
        return self.lanes * self.threads
