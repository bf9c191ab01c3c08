from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from services.shared.datasets.card import Head, HeadType
from services.shared.model.objective import (
    balanced_weights,
    head_loss,
    labelled_counts,
    supervised_loss,
)

MOOD = Head(name="mood", labels=["bad", "good"])
TAGS = Head(name="tags", type=HeadType.MULTI_LABEL, labels=["x", "y"])
NAN = math.nan


def test_cross_entropy_sums_over_labelled_texts_alone() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [5.0, -5.0], [0.0, 0.0]])
    loss = head_loss(MOOD, logits, torch.tensor([1, -100, 0]))
    # The softmax of [0, ln 3] is [1/4, 3/4]; of [0, 0] it is [1/2, 1/2].
    assert loss.total.item() == pytest.approx(-math.log(0.75) - math.log(0.5))
    assert int(loss.count) == 2


def test_class_weights_scale_each_text() -> None:
    logits = torch.zeros(2, 2)
    loss = head_loss(MOOD, logits, torch.tensor([0, 1]), weights=torch.tensor([3.0, 0.5]))
    assert loss.total.item() == pytest.approx(3.5 * math.log(2))


def test_binary_cross_entropy_skips_texts_without_labels() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [9.0, 9.0]])
    loss = head_loss(TAGS, logits, torch.tensor([[1.0, 1.0], [NAN, NAN]]))
    assert loss.total.item() == pytest.approx((-math.log(0.5) - math.log(0.75)) / 2)
    assert int(loss.count) == 1


@pytest.mark.parametrize(
    ("head", "labels"), [(MOOD, torch.tensor([-100])), (TAGS, torch.tensor([[NAN, NAN]]))]
)
def test_a_batch_without_labels_gives_zero_loss_and_zero_gradient(
    head: Head, labels: torch.Tensor
) -> None:
    logits = torch.randn(1, 2, requires_grad=True)
    loss = head_loss(head, logits, labels)
    torch.autograd.backward(loss.total)
    assert loss.total.item() == 0
    assert logits.grad is not None
    assert logits.grad.abs().sum() == 0


def test_each_head_gets_its_own_sum() -> None:
    logits = {"mood": torch.zeros(2, 2), "tags": torch.zeros(2, 2)}
    labels = {"mood": torch.tensor([0, -100]), "tags": torch.tensor([[1.0, 0.0], [0.0, 0.0]])}
    losses = supervised_loss(logits, labels, [MOOD, TAGS])
    totals = {name: loss.total.item() for name, loss in losses.items()}
    assert totals == pytest.approx({"mood": math.log(2), "tags": 2 * math.log(2)})
    assert {name: int(loss.count) for name, loss in losses.items()} == {"mood": 1, "tags": 2}


def test_balanced_weights_give_each_class_the_same_influence() -> None:
    labels = {
        "mood": np.array([0, 0, 0, 1, -100]),
        "tags": np.array([[1, 0], [0, 0], [0, 1], [0, 1], [NAN, NAN]]),
    }
    weights = balanced_weights([MOOD, TAGS], labels)
    assert weights["mood"].tolist() == pytest.approx([4 / 6, 4 / 2])
    assert weights["tags"].tolist() == pytest.approx([3.0, 1.0])


def test_the_denominators_of_a_step_are_known_without_a_forward_pass() -> None:
    labels = {"mood": np.array([0, -100, 1]), "tags": np.array([[NAN, NAN], [0, 1], [0, 0]])}
    assert labelled_counts([MOOD, TAGS], labels, [0, 1]) == {"mood": 1, "tags": 1}
