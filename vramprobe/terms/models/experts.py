"""A layer's router and experts on the tape, as transformers' grouped_mm implementation runs them, with peft's adapters.

In: a Model and the layer's normed hidden states. Out: what the experts add to the residual. Experts are parameters of
three dimensions, which bitsandbytes leaves alone; an adapter (peft's ``ParamWrapper``) is folded into a copy of the
whole stack in every forward. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vramprobe.terms.models import operators as op
from vramprobe.terms.models import routing
from vramprobe.terms.models.modules import Model
from vramprobe.terms.tape import layout
from vramprobe.terms.tape.graph import Value


class Routing(NamedTuple):
    """What a router hands on; ``logits`` is only held."""

    logits: Value
    scores: Value  # of the chosen experts, tokens × per_token
    chosen: Value


def mixture(model: Model, prefix: str, hidden: Value) -> Value:
    """Mixtral's and Qwen3's sparse block; ``prefix`` ends in ``mlp.``."""
    return grouped_experts(model, f"{prefix}experts.", hidden, softmax_router(model, f"{prefix}gate", hidden))


def softmax_router(model: Model, name: str, hidden: Value) -> Routing:
    """The softmax of all experts' logits in fp32, then the best of them."""
    experts, num_tokens = model.arch.experts, model.num_tokens
    logits = router_logits(model, name, hidden)
    scores = op.elementwise(op.cast(logits, "fp32"), saves="output")
    scores, chosen = routing.top_k(scores, num_tokens * experts.per_token)
    if experts.renormalised:
        scores = routing.divided_by_row_sums(scores, num_tokens)
    if model.arch.model_type == "qwen3_moe":
        scores = op.cast(scores, logits.dtype)
    return Routing(logits, scores, chosen)


def router_logits(model: Model, name: str, hidden: Value) -> Value:
    """``F.linear`` with the router's weight."""
    weight, _held = router_weight(model, name)
    return model.product(hidden, weight, model.arch.experts.num)


def router_weight(model: Model, name: str) -> tuple[Value, Value | None]:
    """(a router's weight, with its adapter where it has one; the adapter's product, held as long as the router runs).

    ``ParamWrapper`` with ``Linear.get_delta_weight``: B @ A, which autocast does in 16 bits, scaled, in the weight's
    dtype. torch's parametrization adds it once to look at the result, and again for use.
    """
    name = f"{name}.weight"
    if f"{name}.lora_A" not in model.tensors:
        return model.weight(name), None
    weight, first, second = model.weight(name), model.weight(f"{name}.lora_A"), model.weight(f"{name}.lora_B")
    on_cpu_in_16_bit = model.device == "cpu" and first.dtype != "fp32"
    dtype = first.dtype
    if on_cpu_in_16_bit:
        first, second = op.cast(first, "fp32"), op.cast(second, "fp32")
    rank = model.tensors[f"{name}.lora_A"].shape[0]
    first = model.autocasted(first)
    delta = op.scaled(op.linear(model.autocasted(second), first, None, first.numel // rank))
    if on_cpu_in_16_bit:
        delta = op.cast(delta, dtype)
    delta = op.cast(delta, weight.dtype)
    del first, second
    looked_at = op.value_like(delta)
    del looked_at
    return op.add(weight, delta), delta


def adapted_stack(model: Model, name: str) -> Callable[[], Value]:
    """What gives the experts' weight of this name when it is used, its adapter folded in; the same each time.

    ``ParamWrapper.get_delta_factors`` casts the adapter's two parts to the weight's dtype. torch's parametrization
    folds them in once to look at the result, and again for use.
    """
    weight = model.weight(name)
    if f"{name}.lora_A" not in model.tensors:
        return lambda: weight
    left = op.cast(routing.stacked(model.weight(f"{name}.lora_B")), weight.dtype)
    right = op.cast(model.weight(f"{name}.lora_A"), weight.dtype)
    looked_at = routing.stack_like(weight, left)
    del looked_at
    made: list[Value] = []

    def use() -> Value:
        if not made:
            made.append(routing.folded(weight, left, right, scaled=model.setup.scales_adapters))
        return made[0]

    return use


def gated(model: Model, both: Value) -> Value:
    """``act(gate) * up`` of the two halves of one product."""
    gate, up = layout.split(both, 2)
    return op.mul(model.activation(gate), up)


def grouped_experts(model: Model, prefix: str, hidden: Value, routed: Routing) -> Value:
    """``grouped_mm_experts_forward`` (transformers/integrations/moe.py), line by line; ``prefix`` ends in
    ``experts.``."""
    tape, experts = model.tape, model.arch.experts
    num_pairs, width = routed.scores.numel, hidden.numel // model.num_tokens
    down_weight = adapted_stack(model, f"{prefix}down_proj")
    up_weight = adapted_stack(model, f"{prefix}gate_up_proj")
    expert_ids, order = tape.new(num_pairs, "int64"), tape.new(num_pairs, "int64")
    rows = routing.gathered(hidden, tape.new(num_pairs, "int64"), num_pairs * width)
    scores = routing.gathered(routed.scores, order, num_pairs)
    counted, counts = tape.new(num_pairs, "fp32"), tape.new(experts.num, "fp32")
    offsets = tape.new(experts.num, "int32")
    weight = up_weight()
    out = routing.grouped_product(op.cast(rows, weight.dtype), weight, offsets, width, 2 * experts.width)
    out = gated(model, out)
    weight = down_weight()
    out = routing.grouped_product(op.cast(out, weight.dtype), weight, offsets, experts.width, width)
    weighted = op.mul(out, scores, by_row=True)
    back = tape.new(num_pairs, "int64")
    positions = tape.new(num_pairs, "int64")
    del positions
    weighted = routing.gathered(weighted, back, num_pairs * width)
    # CUDA's autocast sums in fp32 (autocast_mode.h); the CPU's does not.
    in_fp32 = model.device == "cuda" and model.setup.autocast != "none"
    summed = routing.summed_groups(weighted, hidden.numel, "fp32" if in_fp32 else weighted.dtype)
    del expert_ids, counted, counts
    return op.cast(summed, hidden.dtype)
