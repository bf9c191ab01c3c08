"""Compares a model directory, as transformers loads it, with known outputs given as JSON on standard input.

Run as a module: `python -m services.shared.model.known_outputs DIRECTORY < golden.json`; exit code 1 and one line
say what differs.

Legend: N texts, S tokens, H hidden size.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def cosines(directory: Path, texts: Sequence[str]) -> Tensor:
    """Return the cosines [N, N] of the texts' mean hidden states."""
    factory: Any = AutoModel
    model = factory.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False, use_safetensors=True
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False
    )
    batch = tokenizer(list(texts), padding=True, return_tensors="pt")
    states = model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)  # [N, S, 1]
    means = (states * mask).sum(dim=1) / mask.sum(dim=1)  # [N, H]
    means = torch.nn.functional.normalize(means)
    return means @ means.T


@torch.no_grad()
def next_token(directory: Path, prompt: str) -> str:
    """Return the most likely token after the prompt."""
    factory: Any = AutoModelForCausalLM
    model = factory.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False, use_safetensors=True
    ).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False
    )
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    return str(tokenizer.decode([int(model(ids).logits[0, -1].argmax())]))


def differences(directory: Path, golden: dict[str, Any]) -> list[str]:
    """Return what differs from the known outputs, one sentence each."""
    found = []
    if golden.get("texts"):
        actual = cosines(directory, golden["texts"])
        worst = float((actual - torch.tensor(golden["cosines"])).abs().max())
        if not worst <= golden["tolerance"]:
            found.append(
                f"{directory}: cosines of known texts differ by {worst:.4f}, more than {golden['tolerance']}"
            )
    for prompt, expected in golden.get("next_tokens", {}).items():
        token = next_token(directory, prompt)
        if token != expected:
            found.append(f"{directory}: {prompt!r} continues with {token!r}, not {expected!r}")
    return found


if __name__ == "__main__":
    problems = differences(Path(sys.argv[1]), json.load(sys.stdin))
    print("\n".join(problems))
    sys.exit(1 if problems else 0)
