"""A mixture of experts as transformers runs it: a router, and all experts in two grouped products.

Taken from dry runs of transformers 5.24 (`experts_implementation="grouped_mm"`, its default) on torch 2.13: every
pair of a token and one of its experts becomes a row, so that sizes do not depend on the routing. Its loop
over experts, the default before version 5, holds the same rows, each expert's for itself.

Sizes: T = tokens of the micro-batch on one rank, E = experts, k = experts of a token, h = hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

from services.shared.memory.architecture.dimensions import Experts, Family
from services.shared.memory.planning.allocation_tape import Gradient, Value
from services.shared.memory.planning.operations import Operations

_INDEX_BYTES = 8  # of an int64


class Route(NamedTuple):
    """The router's logits [T, E], which are held to the end of the layer; weights and indices [T, k]."""

    logits: Value
    weights: Value
    indices: Value


class ExpertOperations(Operations):
    """The operations of a layer whose MLP is a mixture of experts."""

    def routed_mlp(self, x: Value, output_bytes: int) -> Value:
        """The weighted sum of each token's experts [T, h]; shared experts are not part of it."""
        route = self.route(x)
        out = self.run_experts(x, route.weights, output_bytes)
        self.tape.drop(*route)
        return out

    @property
    def _experts(self) -> Experts:
        assert self.dims.experts is not None
        return self.dims.experts

    def route(self, x: Value) -> Route:
        """Run the router: a linear layer, a softmax in float32, the best experts."""
        if self.dims.family is Family.GPT_OSS:
            return self._route_by_logits(x)
        tape, experts, width = self.tape, self._experts, self.value_bytes
        scores_bytes = 4 * self.count * experts.num_experts
        chosen_bytes = 4 * self.count * experts.per_token
        if self.dims.latent:
            logits = self._float32_logits(x, scores_bytes)
            upcast = self.upcast(logits, scores_bytes, "router")
        else:
            logits = self.linear(x, scores_bytes * width // 4, "router")
            upcast = self.upcast(logits, scores_bytes, "router")
        scores = tape.op("router", scores_bytes, [Gradient(upcast, scores_bytes)], saves_out=True)
        tape.drop(upcast)
        if experts.groups > 1:
            # Scores by group, a mask, the scores left: none of them is saved.
            tape.during("router", [scores_bytes] * 3)
        indices = tape.op("router", self.count * experts.per_token * _INDEX_BYTES)
        chosen = tape.op(
            "router",
            chosen_bytes,
            [Gradient(scores, scores_bytes, (scores_bytes,))],
            saves=[indices],
        )
        tape.drop(scores)
        if experts.normalised:
            # Divided in place by their sum: autograd keeps a copy of what they were.
            chosen = self._divide_by_sum(chosen)
        if self.dims.latent:
            weights = tape.op("router", chosen_bytes, [Gradient(chosen, chosen_bytes)])
        elif self.dims.family is Family.QWEN3_MOE:
            weights = self.downcast(chosen, chosen_bytes * width // 4, "router")
        else:
            return Route(logits, chosen, indices)
        tape.drop(chosen)
        return Route(logits, weights, indices)

    def _route_by_logits(self, x: Value) -> Route:
        """GPT-OSS: the best logits, and a softmax over those alone."""
        tape, experts = self.tape, self._experts
        scores_bytes = self.count * experts.num_experts * self.value_bytes
        chosen_bytes = self.count * experts.per_token * self.value_bytes
        logits = self.linear(x, scores_bytes, "router", bias=True)
        indices = tape.op("router", self.count * experts.per_token * _INDEX_BYTES)
        gradient = Gradient(logits, scores_bytes, (scores_bytes,))
        chosen = tape.op("router", chosen_bytes, [gradient], saves=[indices])
        weights = tape.op("router", chosen_bytes, [Gradient(chosen, chosen_bytes)], saves_out=True)
        tape.drop(chosen)
        return Route(logits, weights, indices)

    def _float32_logits(self, x: Value, scores_bytes: int) -> Value:
        """DeepSeek's router multiplies in float32: its weight [E, h] is cast up as its input is."""
        tape, weight = self.tape, self._experts.num_experts * self.dims.hidden_size
        upcast = self.upcast(x, x.size_bytes * 4 // self.value_bytes, "router")
        logits = tape.op(
            "router",
            scores_bytes,
            [Gradient(upcast, upcast.size_bytes)],
            saves=[upcast],
            also_saves=[4 * weight] if self.value_bytes < 4 else (),
            weight_bytes=[weight * self.value_bytes],
        )
        tape.drop(upcast)
        return logits

    def _divide_by_sum(self, chosen: Value) -> Value:
        tape, size, row = self.tape, chosen.size_bytes, 4 * self.count
        summed = tape.op("router", row, [Gradient(chosen, alias=True)])
        divided = tape.op(
            "router",
            size,
            [Gradient(chosen, size), Gradient(summed, row, (size, size, size))],
            saves=[chosen, summed],
        )
        tape.drop(chosen, summed)
        return divided

    def run_experts(self, x: Value, weights: Value, output_bytes: int) -> Value:
        """Sort the rows by expert, run all experts, weigh the rows and sum each token's."""
        tape, experts, h = self.tape, self._experts, self.dims.hidden_size
        rows, width = self.count * experts.per_token, self.value_bytes
        row_bytes, weight_bytes = rows * h * width, weights.size_bytes
        weighted_bytes = rows * h * (weight_bytes // rows)
        order = [tape.op("expert order", rows * _INDEX_BYTES) for _ in range(2)]
        inputs = tape.op(
            "expert inputs",
            row_bytes,
            [Gradient(x, x.size_bytes, (x.size_bytes,))],
            also_saves=[rows * _INDEX_BYTES],
        )
        row_weights = tape.op(
            "expert weights", weight_bytes, [Gradient(weights, weight_bytes)], saves=order[1:]
        )
        histogram = tape.op("expert order", 4 * rows)
        outputs, biases = self._expert_mlp(inputs, rows)
        weighted = tape.op(
            "weighted expert outputs",
            weighted_bytes,
            self._weighing_gradients(outputs, row_weights, weighted_bytes),
            saves=[outputs, row_weights],
        )
        inverse = tape.op("expert order", rows * _INDEX_BYTES)
        tape.during("expert order", [rows * _INDEX_BYTES])
        ordered = tape.op(
            "weighted expert outputs",
            weighted_bytes if output_bytes else 0,
            [Gradient(weighted, weighted_bytes, (weighted_bytes,))],
            saves=[inverse],
        )
        tape.drop(weighted)
        summed_bytes = output_bytes * weighted_bytes // row_bytes
        summed = tape.op("expert output", summed_bytes, [Gradient(ordered, weighted_bytes)])
        out = self.downcast(summed, output_bytes, "expert output")
        tape.drop(summed, ordered, inverse, outputs, biases, histogram, row_weights, inputs, *order)
        return out

    def _weighing_gradients(
        self, outputs: Value, row_weights: Value, weighted_bytes: int
    ) -> list[Gradient]:
        """Each factor's gradient is a whole product, of which the weights' is summed over h."""
        size = outputs.size_bytes
        if weighted_bytes == size:
            extra = (size,)
            return [Gradient(outputs, size), Gradient(row_weights, row_weights.size_bytes, extra)]
        # With weights in float32 both products are, before the outputs' is cast down.
        extra = (weighted_bytes,)
        return [
            Gradient(outputs, size, extra, wide_bytes=weighted_bytes),
            Gradient(row_weights, row_weights.size_bytes),
        ]

    def _expert_mlp(self, inputs: Value, rows: int) -> tuple[Value, Value]:
        """down(act(gate) * up) of all rows, gate and up in one grouped product.

        Also return the rows' biases, which are named until all is done; empty without any.
        """
        tape, experts, h, c = self.tape, self._experts, self.dims.hidden_size, self.value_bytes
        inner = rows * experts.intermediate_size * c
        weight = experts.num_experts * experts.intermediate_size * h * c
        biased = self.dims.family is Family.GPT_OSS
        up_bias = tape.op("expert biases", 2 * inner if biased else 0)
        both = tape.op(
            "expert gate and up",
            2 * inner,
            [Gradient(inputs, inputs.size_bytes)],
            saves=[inputs],
            weight_bytes=[2 * weight, *([2 * weight // h] if biased else ())],
        )
        product = self._clamped_gate(both, inner) if biased else self._gate(both, inner)
        tape.drop(both)
        down_bias = tape.op("expert biases", inputs.size_bytes if biased else 0)
        tape.drop(up_bias)
        down = tape.op(
            "expert down",
            inputs.size_bytes,
            [Gradient(product, inner)],
            saves=[product],
            weight_bytes=[weight, *([experts.num_experts * h * c] if biased else ())],
        )
        tape.drop(product)
        return down, down_bias

    def _gate(self, both: Value, inner: int) -> Value:
        tape = self.tape
        gate, up = tape.split("expert gate and up", both, (inner, inner))
        active = self.unary(gate, "activation")
        gradients = [Gradient(active, inner), Gradient(up, inner)]
        product = tape.op("expert product", inner, gradients, saves=[active, up])
        tape.drop(active, gate, up)
        return product

    def _clamped_gate(self, both: Value, inner: int) -> Value:
        """GPT-OSS: (clamp(up) + 1) * g * sigmoid(alpha g), g = clamp(gate), both every second value."""
        tape, mask = self.tape, inner // self.value_bytes
        # Slices are views, the gradient of each a whole tensor.
        slices = [tape.op("expert gate", 0, [Gradient(both, both.size_bytes)]) for _ in range(2)]
        gate, up = (
            tape.op("expert gate", inner, [Gradient(x, inner, (mask,) * masks)], saves=[both])
            for x, masks in zip(slices, (1, 2), strict=True)
        )
        scaled = tape.op("expert gate", inner, [Gradient(gate, inner)])
        sigmoid = tape.op("activation", inner, [Gradient(scaled, inner)], saves_out=True)
        tape.drop(scaled)
        gradients = [Gradient(gate, inner), Gradient(sigmoid, inner)]
        active = tape.op("activation", inner, gradients, saves=[gate, sigmoid])
        tape.drop(sigmoid)
        shifted = tape.op("expert product", inner, [Gradient(up, alias=True)])
        gradients = [Gradient(shifted, inner), Gradient(active, inner)]
        product = tape.op("expert product", inner, gradients, saves=[shifted, active])
        tape.drop(shifted, active, gate, up, *slices)
        return product
