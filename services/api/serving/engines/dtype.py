"""The device and the number format that a student is served in."""

from __future__ import annotations

import torch

from services.api.serving.settings import ServingDtype
from services.shared.jobs.planning.auto_choices import bf16_is_faster


def choose_device(name: str) -> torch.device:
    """Return the named device; `auto` is the accelerator if there is one, else the CPU."""
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_dtype(choice: ServingDtype, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in; `auto` is bfloat16 where the device multiplies it faster."""
    if choice is not ServingDtype.AUTO:
        return torch.float32 if choice is ServingDtype.FLOAT32 else torch.bfloat16
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if bf16_is_faster() else torch.float32
