"""AdamW whose moments take one byte each: codes into a table, and a scale for every 256 of them.

Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (block size, table, rounding to the
nearest entry); the update itself uses the moments before they are rounded. A second moment above zero
never becomes zero: the next update would divide by it. Plain torch operators
on any device: torchao 0.18, whose optimizer has the same format, compiles a kernel for every shape and
does not import on torch 2.5; bitsandbytes has no build for DCU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import pad

from services.shared.training.optim.chunked_adamw import ChunkedAdamW
from services.shared.training.optim.parameter_groups import ParameterGroup
from services.shared.training.optim.stochastic_rounding import round_into

BLOCK = 256
_DIGITS = 7  # orders of magnitude that the table covers
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # whether it has a sign


class AdamW8Bit(ChunkedAdamW):
    """The update rule. Blocks are counted from the start of each shard."""

    blocks: Mapping[str, int] = MappingProxyType({f"{key}_scale": BLOCK for key in _MOMENTS})
    chunk_elements = 4 * 2**20  # a multiple of BLOCK

    def __init__(self, groups: Sequence[ParameterGroup], *, seed: int, rank: int) -> None:
        super().__init__(groups, seed=seed, rank=rank)
        self._tables = {key: table(signed=signed) for key, signed in _MOMENTS.items()}

    def _update(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        *,
        learning_rate: float,
        decay: float,
        step: int,
        generator: torch.Generator,
    ) -> None:
        one, two = self._betas
        g = gradient.float()
        mean = self._read(state, "exp_avg").lerp_(g, 1 - one)
        self._write(state, "exp_avg", mean)
        square = self._read(state, "exp_avg_sq").mul_(two).addcmul_(g, g, value=1 - two)
        self._write(state, "exp_avg_sq", square)
        denominator = square.div_(1 - two ** (step + 1)).sqrt_().add_(self._epsilon)
        updated = self._master(parameter, state).mul_(1 - learning_rate * decay)
        updated.addcdiv_(mean, denominator, value=-learning_rate / (1 - one ** (step + 1)))
        self._keep(parameter, state, updated, generator)

    def _master(self, parameter: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return one chunk's weights in float32: the parameter itself where it has that dtype."""
        del state
        return parameter.float()

    def _keep(
        self,
        parameter: Tensor,
        state: Mapping[str, Tensor],
        updated: Tensor,
        generator: torch.Generator,
    ) -> None:
        """Write the updated weights back, which `_master` returned."""
        del state
        if parameter.dtype != torch.float32:  # else `updated` is the parameter
            round_into(parameter, updated, generator)

    def _empty(self, like: Tensor) -> dict[str, Tensor]:
        """Return moments of value zero: all scales are 0, whatever the codes."""
        state = {}
        for key in _MOMENTS:
            state[key] = torch.zeros_like(like, dtype=torch.uint8)
            num_blocks = -(-like.numel() // BLOCK)
            state[f"{key}_scale"] = torch.zeros(num_blocks, dtype=torch.float32, device=like.device)
        return state

    def _part(self, state: dict[str, Tensor], part: slice) -> dict[str, Tensor]:
        blocks = slice(part.start // BLOCK, part.stop // BLOCK)
        return {key: value[blocks if key in self.blocks else part] for key, value in state.items()}

    def _read(self, state: Mapping[str, Tensor], key: str) -> Tensor:
        codes, scale = state[key], state[f"{key}_scale"]
        return self._decode(key, codes).mul_(scale_of_each(scale, len(codes)))

    def _decode(self, key: str, codes: Tensor) -> Tensor:
        """Return what codes stand for, float32, in units of their block's scale."""
        return self._table(key, codes.device)[codes.int()]

    def _write(self, state: Mapping[str, Tensor], key: str, values: Tensor) -> None:
        encode_into(state[key], state[f"{key}_scale"], values, self._table(key, values.device))

    def _table(self, key: str, device: torch.device) -> Tensor:
        if self._tables[key].device != device:
            self._tables[key] = self._tables[key].to(device)
        return self._tables[key]

    @torch.no_grad()
    def restore(self, name: str, state: dict[str, Tensor]) -> None:
        """Restore the state of one shard; scales come for each element.

        Where the shard has the range it was saved with, its blocks are restored to the bit; otherwise a
        block may have had several scales, and is encoded again.
        """
        found: dict[str, Tensor] = {}
        for key in _MOMENTS:
            codes, each = state[key], state[f"{key}_scale"]
            scale = each[::BLOCK].contiguous()
            if not torch.equal(scale_of_each(scale, len(each)), each):
                values = self._decode(key, codes).mul_(each)
                self._write({key: codes, f"{key}_scale": scale}, key, values)
            found |= {key: codes, f"{key}_scale": scale}
        self._state[name] = found


def table(*, signed: bool) -> Tensor:
    """Return the 256 values that codes stand for, float32, ascending, between -1 (or 0) and 1.

    Each order of magnitude has twice as many as the one below it, half-way between equal steps; 0
    and 1 are there exactly.
    """
    values = [0.0, 1.0]
    for digit in range(_DIGITS):
        count = 2**digit if signed else 2 ** (digit + 1)
        width = 0.9 / count
        magnitudes = [10 ** (digit - _DIGITS + 1) * (0.1 + (i + 0.5) * width) for i in range(count)]
        values += magnitudes
        values += [-value for value in magnitudes] if signed else []
    return torch.tensor(sorted(values), dtype=torch.float32)


def decode(codes: Tensor, scale: Tensor, entries: Tensor) -> Tensor:
    """Return float32 [n] for codes [n] and the scales of their blocks [ceil(n / 256)]."""
    return entries[codes.int()].mul_(scale_of_each(scale, len(codes)))


def encode_into(codes: Tensor, scale: Tensor, values: Tensor, entries: Tensor) -> None:
    """Write float32 values [n] as codes [n] and scales [ceil(n / 256)], the largest of each block."""
    normal = normalise(values, scale)
    between = (entries[1:] + entries[:-1]) / 2
    if entries[0] == 0:  # unsigned: only zero itself is below the first entry above zero
        between[0] = torch.finfo(torch.float32).tiny
    codes.copy_(torch.bucketize(normal, between, out_int32=True, right=True))


def normalise(values: Tensor, scale: Tensor) -> Tensor:
    """Return float32 values [n] divided by their blocks' largest, which goes into `scale` [ceil(n / 256)]."""
    largest = pad(values.abs(), (0, -len(values) % BLOCK)).view(-1, BLOCK).amax(1)
    # A block of zeros needs a scale, too.
    scale.copy_(largest.clamp_min_(torch.finfo(torch.float32).tiny))
    return values / scale_of_each(scale, len(values))


def scale_of_each(scale: Tensor, count: int) -> Tensor:
    """Return the scale of each element."""
    return scale.repeat_interleave(BLOCK)[:count]
