from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from services.distiller.losses import (
    binary_divergence,
    categorical_divergence,
    head_weights,
    hidden_loss,
    match_layers,
    scheduled_weight,
    soft_loss,
)
from services.shared.datasets.card import Head, HeadType
from services.shared.jobs.spec import Distillation, Divergence

MOOD = Head(name="mood", labels=["bad", "good"])
TAGS = Head(name="tags", type=HeadType.MULTI_LABEL, labels=["x", "y"])
LN3 = math.log(3.0)
# softmax([0, ln 3]) = [1/4, 3/4]; softmax([0, 0]) = [1/2, 1/2]
SKEWED, EVEN = torch.tensor([[0.0, LN3]]), torch.tensor([[0.0, 0.0]])
# KL([1/4, 3/4] || [1/2, 1/2]) and the other way round, by hand
SKEWED_TO_EVEN = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
EVEN_TO_SKEWED = 0.5 * math.log(2.0) + 0.5 * math.log(2 / 3)
# both against their middle [3/8, 5/8]
MIDDLE = (
    0.25 * math.log(0.25 / 0.375)
    + 0.75 * math.log(0.75 / 0.625)
    + 0.5 * math.log(0.5 / 0.375)
    + 0.5 * math.log(0.5 / 0.625)
) / 2


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        (Divergence.FORWARD_KL, SKEWED_TO_EVEN),
        (Divergence.REVERSE_KL, EVEN_TO_SKEWED),
        (Divergence.JENSEN_SHANNON, MIDDLE),
    ],
)
def test_divergences_are_those_computed_by_hand(divergence: Divergence, expected: float) -> None:
    found = categorical_divergence(EVEN, SKEWED, divergence=divergence)
    assert found.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("divergence", list(Divergence))
@pytest.mark.parametrize("head", [MOOD, TAGS], ids=["single", "multi"])
def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient(
    divergence: Divergence, head: Head
) -> None:
    student = torch.tensor([[1.5, -0.5], [30.0, -30.0]], requires_grad=True)
    loss = soft_loss(
        head,
        student,
        student.detach().clone(),
        torch.ones(2),
        divergence=divergence,
        temperature=2.0,
    )
    torch.autograd.backward(loss)
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert gradient(student).abs().max() < 1e-5


def test_the_temperature_softens_both_sides_and_its_square_scales_the_loss() -> None:
    loss = soft_loss(
        MOOD,
        2 * EVEN,
        2 * SKEWED,
        torch.ones(1),
        divergence=Divergence.FORWARD_KL,
        temperature=2.0,
    )
    assert loss.item() == pytest.approx(4 * SKEWED_TO_EVEN, abs=1e-6)


def test_the_gradient_keeps_its_size_as_the_temperature_grows() -> None:
    def gradient_norm(temperature: float) -> float:
        student = torch.tensor([[0.2, 0.0]], requires_grad=True)
        loss = soft_loss(
            MOOD,
            student,
            torch.tensor([[0.0, 0.1]]),
            torch.ones(1),
            divergence=Divergence.FORWARD_KL,
            temperature=temperature,
        )
        torch.autograd.backward(loss)
        return float(gradient(student).norm())

    assert gradient_norm(50.0) == pytest.approx(gradient_norm(1.0), rel=0.01)


def test_a_dummy_text_adds_nothing() -> None:
    student = torch.cat([EVEN, EVEN + 5])
    teacher = torch.cat([SKEWED, -SKEWED])
    loss = soft_loss(
        MOOD,
        student,
        teacher,
        torch.tensor([1.0, 0.0]),
        divergence=Divergence.FORWARD_KL,
        temperature=1.0,
    )
    assert loss.item() == pytest.approx(SKEWED_TO_EVEN, abs=1e-6)


def test_the_binary_divergence_is_the_mean_over_classes_by_hand() -> None:
    # sigmoid(ln 3) = 3/4 against sigmoid(0) = 1/2 in the first class; the second agrees.
    found = binary_divergence(
        torch.tensor([[0.0, 1.0]]), torch.tensor([[LN3, 1.0]]), divergence=Divergence.FORWARD_KL
    )
    assert found.item() == pytest.approx(SKEWED_TO_EVEN / 2, abs=1e-6)


def test_the_binary_divergence_has_the_gradient_of_soft_binary_cross_entropy() -> None:
    torch.manual_seed(0)
    teacher = torch.randn(3, 4)
    ours, theirs = (torch.linspace(-2, 2, 12).view(3, 4).requires_grad_() for _ in range(2))
    divergence = binary_divergence(ours, teacher, divergence=Divergence.FORWARD_KL).sum()
    torch.autograd.backward(divergence)
    soft = F.binary_cross_entropy_with_logits(theirs, teacher.sigmoid(), reduction="none")
    torch.autograd.backward(soft.mean(dim=1).sum())
    torch.testing.assert_close(gradient(ours), gradient(theirs))


@pytest.mark.parametrize("divergence", list(Divergence))
def test_extreme_logits_stay_finite(divergence: Divergence) -> None:
    student = torch.tensor([[300.0, -300.0]], requires_grad=True)
    for measure in (categorical_divergence, binary_divergence):
        loss = measure(student, -student.detach(), divergence=divergence).sum()
        torch.autograd.backward(loss)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient(student)).all()


def test_the_cosine_loss_by_hand() -> None:
    projected = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
    teacher = torch.tensor([[[0.0, 3.0], [0.0, 1.0]]])
    # 1 - 0 for the first layer, 1 - 1 for the second.
    found = hidden_loss(projected, teacher, torch.ones(1), kind="cosine")
    assert found.item() == pytest.approx(0.5)


def test_the_mse_loss_by_hand() -> None:
    projected, teacher = torch.tensor([[[1.0, 2.0]], [[9.0, 9.0]]]), torch.zeros(2, 1, 2)
    found = hidden_loss(projected, teacher, torch.tensor([1.0, 0.0]), kind="mse")
    assert found.item() == pytest.approx((1 + 4) / 2)


def test_layers_are_matched_evenly_or_at_the_end_alone() -> None:
    assert match_layers(student_layers=3, teacher_layers=12, spread=False) == [(3, 12)]
    assert match_layers(student_layers=3, teacher_layers=12, spread=True) == [
        (1, 4),
        (2, 8),
        (3, 12),
    ]


def test_a_weight_is_interpolated_linearly() -> None:
    assert scheduled_weight(0.3, None, done=0.7) == 0.3
    assert scheduled_weight(1.0, 0.0, done=0.25) == 0.75


def test_a_weight_for_an_unknown_head_is_refused() -> None:
    wanted = Distillation(head_weights={"mood": 2.0, "moood": 1.0})
    with pytest.raises(ValueError, match="names moood; the heads are mood, tags"):
        head_weights(wanted, ["mood", "tags"])
    assert head_weights(Distillation(head_weights={"mood": 2.0}), ["mood", "tags"]) == {
        "mood": 2.0,
        "tags": 1.0,
    }
