"""Distillation losses: pure functions of tensors.

Legend: B texts, C classes of a head, K matched layers, H hidden size of the teacher. `weight` [B] is 1
for a text and 0 for a dummy that pads the micro-batches of a rank. Every loss is a sum over the texts of
a micro-batch; the caller divides by the texts of the whole step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from services.shared.datasets.card import Head, HeadType
from services.shared.jobs.spec import Distillation, Divergence


def soft_loss(
    head: Head,
    student: Tensor,
    teacher: Tensor,
    weight: Tensor,
    *,
    divergence: Divergence,
    temperature: float,
) -> Tensor:
    """Return the divergence of one head's logits [B, C] from the teacher's, a scalar sum.

    Scaled by temperature squared, so that its gradient keeps its size as the temperature grows
    (Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network", section 2).
    """
    measure = binary_divergence if head.type is HeadType.MULTI_LABEL else categorical_divergence
    each = measure(student / temperature, teacher / temperature, divergence=divergence)
    return (each * weight).sum() * temperature**2


def categorical_divergence(student: Tensor, teacher: Tensor, *, divergence: Divergence) -> Tensor:
    """Return the divergence of softmax(student) from softmax(teacher) over the last axis.

    Shapes [..., C] -> [...], in nats, 0 where they are equal. Forward KL(teacher || student): Hinton et al.
    2015; reverse KL(student || teacher): Gu et al. 2023, "MiniLLM"; Jensen-Shannon with equal parts,
    at most ln 2: Agarwal et al. 2023, "On-Policy Distillation of Language Models".
    """
    log_q, log_p = F.log_softmax(student, dim=-1), F.log_softmax(teacher, dim=-1)
    if divergence is Divergence.FORWARD_KL:
        return _kl(log_p, log_q)
    if divergence is Divergence.REVERSE_KL:
        return _kl(log_q, log_p)
    log_middle = torch.logaddexp(log_p, log_q) - math.log(2)
    return (_kl(log_p, log_middle) + _kl(log_q, log_middle)) / 2


def binary_divergence(student: Tensor, teacher: Tensor, *, divergence: Divergence) -> Tensor:
    """Return the divergence of sigmoid(student) from sigmoid(teacher), mean over classes: [B, C] -> [B].

    Each class is a binary choice, softmax([z, 0]) = [sigmoid(z), 1 - sigmoid(z)]. In the forward
    direction this is binary cross-entropy with the teacher's probabilities as soft targets, less the
    teacher's entropy, which does not depend on the student: same gradient, but 0 where they are equal.
    """
    pairs = [torch.stack([z, torch.zeros_like(z)], dim=-1) for z in (student, teacher)]
    return categorical_divergence(*pairs, divergence=divergence).mean(dim=-1)


def hidden_loss(projected: Tensor, teacher: Tensor, weight: Tensor, *, kind: str) -> Tensor:
    """Return the distance of projected student states [B, K, H] from the teacher's, a scalar sum.

    "cosine": 1 - cosine, as in Sanh et al. 2019 (DistilBERT); "mse": mean squared error per element
    through a learned projection, as in Romero et al. 2014 (FitNets) and Jiao et al. 2019 (TinyBERT).
    Mean over the K matched layers.
    """
    if kind == "cosine":
        each = 1 - F.cosine_similarity(projected, teacher, dim=-1)
    else:
        each = (projected - teacher).square().mean(dim=-1)
    return (each.mean(dim=1) * weight).sum()


def match_layers(
    *, student_layers: int, teacher_layers: int, spread: bool
) -> list[tuple[int, int]]:
    """Return (student layer, teacher layer) pairs; layer n is the state after n layers.

    The last pair matches the final states. Spread over all layers, student layer i is matched with teacher
    layer i * teacher_layers / student_layers (the uniform map of Jiao et al. 2019).
    """
    if not spread:
        return [(student_layers, teacher_layers)]
    return [(i, round(i * teacher_layers / student_layers)) for i in range(1, student_layers + 1)]


def scheduled_weight(first: float, final: float | None, *, done: float) -> float:
    """Return a loss weight after a share `done` in [0, 1] of the steps, by linear interpolation."""
    return first if final is None else first + (final - first) * done


def head_weights(distillation: Distillation, names: list[str]) -> dict[str, float]:
    """Return each head's weight, 1 by default. Raises ValueError for unknown heads."""
    unknown = sorted(set(distillation.head_weights) - set(names))
    if unknown:
        raise ValueError(
            f"distillation.head_weights names {', '.join(unknown)}; the heads are {', '.join(names)}"
        )
    return {name: distillation.head_weights.get(name, 1.0) for name in names}


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)
