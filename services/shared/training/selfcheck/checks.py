"""The doctor's checks that need torch: `python -m services.shared.training.selfcheck.checks cpu|accelerator`.

Prints one JSON object per line: {"begins": name} before each check, then {"name", "status", "detail",
"remedy"}, and {"measured": {...}}. A check that kills the process is identified by its first line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from services.shared.datasets.card import Head
from services.shared.model.classifier import build_classifier, build_config
from services.shared.training.optim.adamw_8bit import AdamW8Bit
from services.shared.training.optim.parameter_groups import ParameterGroup
from services.shared.training.selfcheck.rank_checks import Measurements, Result, check_ranks
from services.shared.training.sharding.shard import LocalShard

_OK, _WARNING, _FAILED, _NOT_APPLICABLE = "ok", "warning", "failed", "not_applicable"


def main() -> None:
    """Run every check on the device named on the command line."""
    on_cpu = sys.argv[1:] == ["cpu"]
    checks: dict[str, Callable[[], Result]] = {
        "torch runtime": lambda: _runtime(on_cpu),
        "torch and numpy": _numpy,
    }
    for name, check in checks.items():
        _report(name, check)
    usable = not on_cpu and torch.cuda.is_available()
    if not on_cpu and not usable:
        return  # the runtime check has reported why
    device = torch.device("cuda", 0) if usable else torch.device("cpu")
    if usable:
        _emit({"begins": "context"})
        _emit({"measured": _context(device)})
    for name, check in {
        "devices": lambda: _devices(device),
        "bf16 matmul": lambda: _matmul(device),
        "attention": lambda: _attention(device),
        "attention back-ends": lambda: _backends(device),
        "activation checkpointing": lambda: _checkpointing(device),
        "8-bit optimizer step": lambda: _eight_bit(device),
    }.items():
        _report(name, check)
    if usable:
        _emit({"begins": "speed"})
        _emit({"measured": _speed(device) | _expandable_segments(device)})
    _emit({"begins": "collectives"})
    findings, measured = check_ranks(device)
    for name, result in findings.items():
        _emit(_finding(name, result))
    _emit({"measured": measured})


def _report(name: str, check: Callable[[], Result]) -> None:
    """Run one check; an exception is reported as a failed check."""
    _emit({"begins": name})
    try:
        result = check()
    except Exception as error:  # noqa: BLE001  (a broken runtime may raise anything)
        text = str(error).strip().splitlines() or [""]
        result = (_FAILED, f"{type(error).__name__}: {text[0]}", _remedy(name, str(error)))
    _emit(_finding(name, result))


def _finding(name: str, result: Result) -> dict[str, str]:
    status, detail, remedy = result
    return {"name": name, "status": status, "detail": detail, "remedy": remedy}


def _emit(message: Mapping[str, str | Measurements]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _remedy(name: str, error: str) -> str:
    if "flash_attn" in error or "No matching libraries" in error:
        return (
            "Install the DAS flash_attn wheel of this torch, or run with recipe.attention=eager; "
            "torch.backends.cuda.enable_flash_sdp(False) costs O(S^2) memory."
        )
    return f"The check {name!r} raised; run `python -m services.shared.training.selfcheck.checks` to see where."


def _runtime(on_cpu: bool) -> Result:
    build = "CPU build"
    if torch.version.hip:
        build = f"HIP {torch.version.hip}"
    elif torch.version.cuda:
        build = f"CUDA {torch.version.cuda}"
    detail = f"torch {torch.__version__}, {build}"
    if on_cpu:
        return _OK, detail, ""
    if Path("/opt/dtk").exists() and torch.version.hip is None:
        return (
            _FAILED,
            f"{detail}: the vendor's torch was overwritten",
            "Reinstall the DAS wheel with --no-deps, so that pip does not resolve torch.",
        )
    if not torch.cuda.is_available():
        return (
            _FAILED,
            f"{detail}: torch sees no device although there are device files",
            "Check device selection, groups and the driver's mount above.",
        )
    return _OK, f"{detail}, {torch.cuda.device_count()} devices", ""


def _numpy() -> Result:
    values = torch.arange(6, dtype=torch.float32)
    back = torch.from_numpy(values.numpy().copy())
    if not torch.equal(values, back):
        return _FAILED, "a round trip through numpy changes values", 'pip install "numpy<2"'
    return _OK, "a round trip keeps values", ""


def _devices(device: torch.device) -> Result:
    if device.type == "cpu":
        return _NOT_APPLICABLE, "does not apply here: ranks share the CPU", ""
    shown = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        arch = getattr(found, "gcnArchName", f"sm_{found.major}{found.minor}")
        shown.append(f"{found.name} ({arch}, {found.total_memory / 2**30:.2f} GiB)")
    return _OK, "; ".join(shown), ""


def _matmul(device: torch.device) -> Result:
    """Check bf16 by a multiplication: a HIP build reports support for it on every card."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = a @ b
    got = (a.to(device, torch.bfloat16) @ b.to(device, torch.bfloat16)).float().cpu()
    error = float((got - exact).norm() / exact.norm())
    # bfloat16 has 8 bits of significand: each factor is rounded by up to 0.4 %.
    if not error < 0.01:
        return (
            _FAILED,
            f"relative error {error:.3g}",
            'Use recipe.compute="float32": this device or build computes bfloat16 wrongly.',
        )
    return _OK, f"relative error {error:.2g}", ""


def _attention(device: torch.device) -> Result:
    """Check attention with and without a mask, forward and backward, with fewer key than query heads."""
    tokens = 256
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    for explicit in (None, mask):
        query, key, value = _qkv(device, tokens)
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=explicit, is_causal=explicit is None, enable_gqa=True
        )
        torch.autograd.backward(out.float().sum())
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.grad is None or not bool(tensor.grad.isfinite().all()):
                kind = "without" if explicit is None else "with"
                return (
                    _FAILED,
                    f"{kind} a mask, the gradient of {name} is not finite",
                    "Run with recipe.attention=eager.",
                )
    return _OK, "with and without a mask, forward and backward, grouped queries", ""


def _qkv(device: torch.device, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    def draw(heads: int) -> Tensor:
        return torch.randn(1, heads, tokens, 64, device=device, dtype=dtype, requires_grad=True)

    return draw(4), draw(2), draw(2)


def _backends(device: torch.device) -> Result:
    """List the attention back-ends that run; math alone takes O(S^2) memory, which plans do not assume."""
    ran = []
    for backend in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.MATH,
    ):
        query, key, value = (tensor.detach() for tensor in _qkv(device, 128))
        key, value = (tensor.repeat_interleave(2, dim=1) for tensor in (key, value))
        try:
            with sdpa_kernel(backend):
                scaled_dot_product_attention(query, key, value, is_causal=True)
        except RuntimeError:
            continue
        ran.append(backend.name.lower())
    if ran == ["math"]:
        return (
            _WARNING,
            "only math runs: the memory of attention grows with the square of the sequence length",
            "Plan with --attention math, or install the flash_attn wheel of this torch.",
        )
    return _OK, ", ".join(ran), ""


def _checkpointing(device: torch.device) -> Result:
    """Check that the switch takes effect: a wrapper that does not forward it runs out of memory."""
    shape = {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    config = build_config(shape, vocab_size=64, pad_token_id=0)
    head = Head(name="check", labels=["a", "b"])
    saved = []
    for enabled in (False, True):
        torch.manual_seed(0)
        classifier = build_classifier(config, [head]).to(device).train()
        if enabled:
            classifier.gradient_checkpointing_enable()
        saved.append(_bytes_saved_for_backward(classifier, device))
    if not saved[1] < saved[0]:
        return (
            _FAILED,
            f"it saves no memory ({saved[0]} bytes without, {saved[1]} with)",
            "This version of transformers has renamed the switch; report it.",
        )
    return _OK, f"{saved[1]} bytes kept for the backward pass instead of {saved[0]}", ""


def _bytes_saved_for_backward(classifier: torch.nn.Module, device: torch.device) -> int:
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = classifier(torch.ones(2, 32, dtype=torch.long, device=device))
    torch.autograd.backward(logits["check"].sum())
    return total


def _eight_bit(device: torch.device) -> Result:
    """Check one step: AdamW's first depends on the gradient's sign only, not on how moments are stored."""
    parameter = torch.nn.Parameter(torch.ones(64 * 256, device=device))
    weight = parameter.detach()
    parameter.grad = torch.ones_like(weight)
    shard = LocalShard("weight", tuple(weight.shape), 0, len(weight), 0, parameter, weight)
    rule = AdamW8Bit([ParameterGroup([shard], weight_decay=0.0)], seed=0, rank=0)
    rule.apply([shard], 0.1, 0)
    moved = float((1 - weight).mean())
    if not 0.099 < moved < 0.101:
        return (
            _FAILED,
            f"a step of 0.1 changed parameters by {moved:.3g}",
            "Use adamw_bf16 or adafactor instead of adamw_8bit.",
        )
    return _OK, "the first step of adamw_8bit has the expected size", ""


def _context(device: torch.device) -> Measurements:
    """Return the size of the runtime's context: memory in use outside torch's allocator, in bytes."""
    torch.zeros(1, device=device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return {"device_total_bytes": total, "context_bytes": total - free - reserved}


def _speed(device: torch.device) -> Measurements:
    """Return the throughput of copies and of bf16 multiplications, by the wall clock."""
    size = 2**28
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = _seconds(lambda: target.copy_(source))
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    product = _seconds(lambda: a @ a)
    return {
        "copy_bytes_per_second": round(2 * size / copy),
        "bf16_flops_per_second": round(2 * 4096**3 / product),
    }


def _expandable_segments(device: torch.device) -> Measurements:
    """Return whether this build honours the setting that out-of-memory messages recommend."""
    torch.cuda.empty_cache()
    try:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        held = torch.empty(2**26, dtype=torch.uint8, device=device)
        segments: Any = torch.cuda.memory._snapshot()["segments"]
        honoured = any(segment.get("is_expandable") for segment in segments)
        del held
    except (RuntimeError, AttributeError):
        honoured = False
    return {"expandable_segments": honoured}


def _seconds(work: Callable[[], Any], *, repeats: int = 10) -> float:
    work()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats


if __name__ == "__main__":
    main()
