"""The memory of one layer, from its tape: what it keeps for backward, and its peaks while it runs."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from services.shared.memory.architecture.dimensions import (
    BERT_LIKE,
    EAGER_ONLY,
    Dimensions,
    Family,
)
from services.shared.memory.planning.allocation_tape import Moment, Tape, Value, rounded
from services.shared.memory.planning.layers import play_final_norm, play_layer
from services.shared.memory.planning.operations import Tokens
from services.shared.memory.recipe import Attention, Recipe


class LayerCost(NamedTuple):
    """One layer in bytes over what was alive when it began; moments are the successive maxima.

    The caller counts the input; `backward` counts the gradient of the output, but not what forward
    saved. `saved_bytes` stay from forward to backward where nothing is recomputed,
    the input among them where `saves_input`: that of a layer whose norm comes last. `returned_bytes`
    are attention weights that the model holds, though nothing reads them, until the next layer returns.
    """

    input_bytes: int
    saved_bytes: int
    saves_input: bool
    returned_bytes: int
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
def layer_cost(
    dims: Dimensions, tokens: Tokens, *, checkpointed: bool, adding: bool = False
) -> LayerCost:
    """Return the cost of one layer of `dims` for `tokens`; `adding` as in `Tape`."""
    dims = replace(dims, num_layers=1, vocab_size=1)
    size = tokens.total * dims.hidden_size * tokens.value_bytes
    plain = _forward(dims, tokens, size, saving=False)
    saving = _forward(dims, tokens, size, saving=True)
    inference = _forward(dims, tokens._replace(training=False), size, saving=False)
    return LayerCost(
        input_bytes=rounded(size),
        saved_bytes=saving.saved_bytes,
        saves_input=saving.saves_input,
        returned_bytes=plain.saved_bytes,
        forward=plain.moments if checkpointed else saving.moments,
        backward=_backward(dims, tokens, size, checkpointed=checkpointed, adding=adding),
        inference=inference.moments,
    )


@lru_cache(maxsize=512)
def final_cost(dims: Dimensions, tokens: Tokens, *, saving: bool) -> FinalCost:
    """Return the cost of what follows the last layer."""
    size = tokens.total * dims.hidden_size * tokens.value_bytes
    tape = Tape(saving=saving)
    x = tape.external(size, "last hidden state")
    holders = x.holders
    out = play_final_norm(tape, dims, tokens, x)
    if dims.mean_pooling and _is_padded(dims, tokens):
        tape.during("mean pooling", [size])
    forward = tuple(tape.records)
    # A LayerNorm saves its input. Without a final norm the heads save it themselves: the one pooled token
    # is a view; a mean is not.
    kept = rounded(size) if x.holders > holders or (out is x and not dims.mean_pooling) else 0
    saved = kept if out is x else kept + tape.live_bytes
    tape.drop(out)  # the heads release it before its gradient is allocated
    if dims.mean_pooling and out is not x:
        saved = kept + tape.live_bytes
    tape.reset_records()
    if saving and (out is not x or dims.mean_pooling):
        gradient = _pooled_gradient(tape, dims, tokens, size)
        if out is x:
            tape.drop(gradient)  # counted by the last layer, whose incoming gradient it is
        else:
            tape.play_backward(out, gradient)
    backward = tuple(m._replace(live_bytes=m.live_bytes + kept) for m in tape.records)
    return FinalCost(forward, saved, backward)


def _pooled_gradient(tape: Tape, dims: Dimensions, tokens: Tokens, size: int) -> Value:
    """Return the gradient of all states from that of the pooled one."""
    what = "pooling backward"
    if not dims.mean_pooling or tokens.value_bytes == 4:
        # That of the one pooled token is a whole tensor of zeros but for its row.
        return tape.op(what, size)
    # The mean is taken in float32: its gradient is cast, and set to 0 where a text is padded.
    padded = _is_padded(dims, tokens)
    wide = tape.op(what, size if padded else size // tokens.value_bytes * 4)
    gradient = tape.op(what, size)
    tape.drop(wide)
    return gradient


def _is_padded(dims: Dimensions, tokens: Tokens) -> bool:
    """Return whether texts differ in length. A decoder needs no mask for its layers even then."""
    is_encoder = dims.family in _EMBEDDING_NORM
    return tokens.mask if is_encoder else tokens.batch > 1


def embedding_saved_bytes(dims: Dimensions, tokens: Tokens) -> int:
    """Return the bytes that the embedding keeps for its backward pass."""
    width = rounded(tokens.total * dims.hidden_size * tokens.value_bytes)
    kept = 0
    if dims.family in _EMBEDDING_NORM:
        kept += width + 2 * rounded(4 * tokens.total)
    if dims.dropout and tokens.training and dims.family in _EMBEDDING_DROPOUT:
        kept += width // (1 if tokens.cpu_kernels else tokens.value_bytes)
    return kept


_EMBEDDING_NORM = BERT_LIKE | {Family.MODERNBERT, Family.BLOOM}
_EMBEDDING_DROPOUT = BERT_LIKE | {Family.GPT2, Family.GPT_BIGCODE}


def mask_bytes(dims: Dimensions, tokens: Tokens) -> int:
    """Return the bytes of the attention masks that layers share: one, or two where only some layers
    have a sliding window."""
    eager = tokens.attention is Attention.EAGER or dims.family in EAGER_ONLY
    if not (tokens.mask or dims.family in EAGER_ONLY):
        # Falcon always makes one, of boolean values, for all texts of the batch.
        return rounded(tokens.sequence_length**2) if dims.family is Family.FALCON else 0
    value = tokens.value_bytes if eager else 1
    mask = rounded(tokens.batch * tokens.sequence_length**2 * value)
    mixed = dims.family in _MIXED_WINDOWS or (dims.family in _OPTIONAL_WINDOWS and dims.window)
    return 2 * mask if mixed else mask


def shared_input_bytes(dims: Dimensions, tokens: Tokens) -> int:
    """Return the bytes that all layers share: the attention mask, rotary tables and the batch."""
    length, c = tokens.sequence_length, tokens.value_bytes
    rotary = 0
    if dims.family not in _WITHOUT_ROTARY:
        tables = (
            4 if dims.family is Family.GEMMA3 else 2
        )  # Gemma 3: one for global, one for local layers
        rotary = tables * rounded(
            c * length * (dims.latent.rope_dim if dims.latent else dims.head_dim)
        )
    return mask_bytes(dims, tokens) + rotary + 2 * rounded(8 * tokens.total)


# transformers builds both masks for these, whether or not a text is longer than the window.
_MIXED_WINDOWS = {Family.GEMMA2, Family.GEMMA3, Family.MODERNBERT, Family.GPT_OSS}
_OPTIONAL_WINDOWS = {Family.QWEN2, Family.QWEN3}
_WITHOUT_ROTARY = BERT_LIKE | {Family.GPT2, Family.GPT_BIGCODE, Family.OPT, Family.BLOOM}


class _Forward(NamedTuple):
    moments: tuple[Moment, ...]
    saved_bytes: int
    saves_input: bool


def _forward(dims: Dimensions, tokens: Tokens, size: int, *, saving: bool) -> _Forward:
    tape = Tape(saving=saving)
    x = tape.external(size, "layer input")
    holders = x.holders
    out = play_layer(tape, dims, tokens, x, recompute=False)
    if dims.family is not Family.BLOOM:  # whose model holds all that a layer returns until the next
        tape.release_held()
    saves_input = x.holders > holders
    saved = tape.live_bytes - out.size_bytes + (x.size_bytes if saves_input else 0)
    return _Forward(tuple(tape.records), saved, saves_input)


def _backward(
    dims: Dimensions, tokens: Tokens, size: int, *, checkpointed: bool, adding: bool
) -> tuple[Moment, ...]:
    """Play a layer backward: recomputed first when checkpointed, else over what forward saved."""
    tape = Tape(saving=True, adding=adding, recomputed=checkpointed)
    x = tape.external(size, "layer input")
    if checkpointed:
        gradient = tape.op("incoming gradient", size)
        out = play_layer(tape, dims, tokens, x, recompute=True)
        tape.release_held()
        tape.drop(out)
        tape.play_backward(out, gradient)
        return tuple(tape.records)
    out = play_layer(tape, dims, tokens, x, recompute=False)
    tape.release_held()
    tape.drop(out)
    saved = tape.live_bytes
    tape.reset_records()
    tape.play_backward(out, tape.op("incoming gradient", size))
    records = [m._replace(live_bytes=m.live_bytes - saved) for m in tape.records]
    return tuple(moment for moment in records if moment.live_bytes > 0)
