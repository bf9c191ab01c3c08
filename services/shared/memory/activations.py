"""What one layer costs while it runs, from its tape: kept for backward, needed for a moment."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from services.shared.memory.dimensions import BERT_LIKE, Dimensions, Family
from services.shared.memory.layers import Tokens, play_final_norm, play_layer
from services.shared.memory.recipe import Attention, Recipe
from services.shared.memory.tape import Moment, Tape, rounded


class LayerCost(NamedTuple):
    """One layer in bytes over what was alive when it began; moments are the rising maxima.

    The input is the caller's to count; the gradient of the output is counted in `backward`, and what
    forward saved is not. `saved_bytes` stay from forward to backward where nothing is recomputed.
    """

    input_bytes: int
    saved_bytes: int
    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]
    inference: tuple[Moment, ...]

    @property
    def forward_bytes(self) -> int:
        """The most that the forward pass adds."""
        return self.forward[-1].live_bytes

    @property
    def backward_bytes(self) -> int:
        """The most that the backward pass adds."""
        return self.backward[-1].live_bytes


class FinalCost(NamedTuple):
    """What follows the last layer: the final norm, pooling, heads and loss."""

    forward: tuple[Moment, ...]
    saved_bytes: int
    backward: tuple[Moment, ...]


def tokens_of(recipe: Recipe, *, training: bool, cpu_kernels: bool) -> Tokens:
    """Return one micro-batch of `recipe`."""
    return Tokens(
        batch=recipe.micro_batch,
        sequence_length=recipe.sequence_length,
        value_bytes=recipe.compute.size_bytes,
        attention=recipe.attention,
        mask=recipe.attention_mask,
        training=training,
        cpu_kernels=cpu_kernels,
    )


@lru_cache(maxsize=512)
def layer_cost(dims: Dimensions, tokens: Tokens, *, checkpointed: bool) -> LayerCost:
    """Return the cost of one layer of `dims` for `tokens`."""
    dims = replace(dims, num_layers=1, vocab_size=1)
    size = tokens.total * dims.hidden_size * tokens.value_bytes
    plain, _ = _forward(dims, tokens, size, saving=False)
    saving, saved = _forward(dims, tokens, size, saving=True)
    evaluated = tokens._replace(training=False)
    inference, _ = _forward(dims, evaluated, size, saving=False)
    return LayerCost(
        input_bytes=rounded(size),
        saved_bytes=saved,
        forward=plain if checkpointed else saving,
        backward=_backward(dims, tokens, size, checkpointed=checkpointed),
        inference=inference,
    )


@lru_cache(maxsize=512)
def final_cost(dims: Dimensions, tokens: Tokens, *, saving: bool) -> FinalCost:
    """Return the cost of what follows the last layer."""
    size = tokens.total * dims.hidden_size * tokens.value_bytes
    tape = Tape(saving=saving)
    x = tape.given(size, "last hidden state")
    out = play_final_norm(tape, dims, tokens, x)
    forward, saved = tuple(tape.records), tape.live_bytes
    tape.restart()
    if saving and out is not x:
        # The gradient of the one pooled token is a whole tensor of zeros but for its row.
        tape.play_backward(out, tape.op("pooling backward", size))
    return FinalCost(forward, saved, tuple(tape.records))


def mask_bytes(dims: Dimensions, tokens: Tokens) -> int:
    """Return the attention mask that all layers share: one, or two where some slide a window."""
    if not tokens.mask:
        return 0
    value = tokens.value_bytes if tokens.attention is Attention.EAGER else 1
    mask = rounded(tokens.batch * tokens.sequence_length**2 * value)
    return 2 * mask if dims.window and dims.window < tokens.sequence_length else mask


def tables_bytes(dims: Dimensions, tokens: Tokens) -> int:
    """Return what all layers share: the attention mask, rotary tables and the batch itself."""
    length, c = tokens.sequence_length, tokens.value_bytes
    rotary = 0
    if dims.family not in _WITHOUT_ROTARY:
        rotary = 2 * rounded(c * length * dims.head_dim)
    return mask_bytes(dims, tokens) + rotary + 2 * rounded(8 * tokens.total)


_WITHOUT_ROTARY = BERT_LIKE | {Family.GPT2, Family.GPT_BIGCODE, Family.BLOOM, Family.OPT}


def _forward(
    dims: Dimensions, tokens: Tokens, size: int, *, saving: bool
) -> tuple[tuple[Moment, ...], int]:
    tape = Tape(saving=saving)
    x = tape.given(size, "layer input")
    out = play_layer(tape, dims, tokens, x, recompute=False)
    return tuple(tape.records), tape.live_bytes - out.size_bytes


def _backward(
    dims: Dimensions, tokens: Tokens, size: int, *, checkpointed: bool
) -> tuple[Moment, ...]:
    """Play a layer backward: recomputed first when checkpointed, else over what forward saved."""
    tape = Tape(saving=True)
    x = tape.given(size, "layer input")
    if checkpointed:
        gradient = tape.op("incoming gradient", size)
        out = play_layer(tape, dims, tokens, x, recompute=True)
        tape.drop(out)
        tape.play_backward(out, gradient)
        return tuple(tape.records)
    out = play_layer(tape, dims, tokens, x, recompute=False)
    tape.drop(out)
    saved = tape.live_bytes
    tape.restart()
    tape.play_backward(out, tape.op("incoming gradient", size))
    records = [m._replace(live_bytes=m.live_bytes - saved) for m in tape.records]
    return tuple(moment for moment in records if moment.live_bytes > 0)
