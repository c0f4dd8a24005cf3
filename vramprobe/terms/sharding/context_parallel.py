"""Context parallelism: ring attention beside FSDP2, one of the ranks that share each sequence.

In: a spec of whole sequences, how many ranks share the model and how many of them each sequence, the rank's index among
these. Out: Moments as ranks.py has them. Activations are of the rank's own tokens. Its attention holds what torch
2.13's does (torch/distributed/tensor/experimental/_context_parallel/_attention.py: ``_templated_ring_attention``,
``_SDPAMerger``) and is written in the same steps, since what torch's local variables hold is what is alive. Never
imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from vramprobe.architecture import architecture
from vramprobe.kernels.chip import Chip
from vramprobe.spec import CellSpec
from vramprobe.terms import Moment
from vramprobe.terms.cell.setup import Setup, setup_of
from vramprobe.terms.models.families import layer_place
from vramprobe.terms.sharding.fsdp import Units, prepared_tensors
from vramprobe.terms.sharding.fsdp2 import Fsdp2Tape, units_of
from vramprobe.terms.sharding.rank import Division, computed_tensors, moments_of
from vramprobe.terms.sharding.ranks import rank_course
from vramprobe.terms.step.walk import Walk, one_of_each_kind, walk_layers
from vramprobe.terms.tape.graph import ITEMSIZE_BYTES, Value
from vramprobe.terms.tape.tape import Covers


class Ring(NamedTuple):
    """The ranks that share a sequence, and one of them."""

    size: int
    index: int
    gathers: bool  # keys and values of all ranks at once, not one rank's at a time

    @property
    def leaps(self) -> bool:
        """Whether the rank's two parts of the sequence are not adjacent, as they are on the last rank."""
        return self.index < self.size - 1


def ring_moments(
    spec: CellSpec,
    num_sharing: int,
    ring: Ring,
    *,
    reshards: bool,
    is_replicated: bool,
    all_buffers: bool,
    chip: Chip,
) -> list[Moment]:
    """The moments of a step of one rank, in the order of the step; ``spec`` has the whole length."""
    own = spec.model_copy(update={"seq_len": spec.seq_len // ring.size})
    division = Division("fsdp" if reshards else "fsdp-shard-grad-op", num_sharing, all_buffers, is_replicated)
    course = rank_course(own, division, chip)
    computed = computed_tensors(spec, prepared_tensors(spec))
    setup = setup_of(own, architecture(spec.architecture), computed, chip)
    walk = ring_walk(setup, units_of(spec, division), ring)
    whole, part = 8 * spec.num_tokens, 8 * own.num_tokens
    # Ids, labels and shifted ones, whose parts lie where the wholes did, of a single row the padded ones; positions.
    batch = 3 * whole + (8 if spec.batch_size == 1 else 0) + max(8 * spec.seq_len, part)
    # Until backward has ended torch's context has in its own variables a part of each of the four, and a copy of one.
    held = {"forward": 5 * part, "backward": 5 * part}
    return [
        Moment(one.phase, one.label, one.terms | {"batch": batch + held.get(one.phase, 0)})
        for one in moments_of(replace(course, walk=walk), own)
    ]


def ring_walk(setup: Setup, units: Units, ring: Ring) -> Walk:
    """The Walk of one rank, whose length is that of its own tokens."""
    layers = one_of_each_kind(setup.arch)
    places = [layer_place(setup.arch, layer) for layer in layers]
    return walk_layers(setup, layers, RingTape(setup.sizes.covers, units, places, ring), units.micro_steps)


class RingTape(Fsdp2Tape):
    """An Fsdp2Tape whose attention is shared with the other ranks of a sequence."""

    has_parts = True

    def __init__(self, covers: Covers, units: Units, layers: Sequence[str], ring: Ring) -> None:
        super().__init__(covers, units, layers)
        self.ring = ring

    @property
    def leaps(self) -> bool:
        return self.ring.leaps

    def shared_attention(self, query: Value, key: Value, value: Value, num_out: int, num_stats: int) -> Value:
        """``scaled_dot_product_attention`` while torch's context is open."""
        out, stats, seeds = _Forward(self, self.ring, query, num_out, num_stats).run(key, value)
        out.contiguous = query.contiguous and not self.ring.leaps  # cat's results are laid out by heads

        def backward(grads: list[Value]) -> list[Value | None]:
            return _backward(self, self.ring, (query_like, key_like, value_like), grads[0].dtype, num_stats)

        query_like, key_like, value_like = (_Like(one) for one in (query, key, value))
        self.record([query, key, value], [out], [query, key, value, out, stats, *seeds], backward)
        return out


class _Like:
    """A saved tensor's size and layout."""

    def __init__(self, value: Value) -> None:
        self.numel, self.dtype, self.by_tokens = value.numel, value.dtype, value.contiguous


class _Forward:
    """One layer's ring attention."""

    def __init__(self, tape: RingTape, ring: Ring, query: Value, num_out: int, num_stats: int) -> None:
        self.tape, self.ring, self.dtype = tape, ring, query.dtype
        self.num_out, self.num_stats = num_out, num_stats
        self.merged: Value | None = None
        self.merged_stats: Value | None = None

    def run(self, key: Value, value: Value) -> tuple[Value, Value, list[Value]]:
        """(output, log-sum-exps, the random generator's seeds)."""
        tape, ring, num_sent = self.tape, self.ring, key.numel + value.numel
        names: dict[str, Any] = {"kv": [_by_heads(tape, one.numel, one.dtype, one.contiguous) for one in (key, value)]}
        for step in range(ring.size):
            names["sent"] = None  # waited for
            current = names.get("received")
            if step < ring.size - 1:
                sent = tape.new(num_sent, self.dtype)
                if not ring.gathers:
                    names |= {"received": tape.new(num_sent, self.dtype), "sent": sent}
                elif step == 0:
                    names |= {"received": tape.new(num_sent * ring.size, self.dtype), "sent": sent}
                del sent
            if step > 0:
                names["kv"] = current
            current, is_half = None, step > ring.index
            made = [tape.new(1, "int64"), tape.new(1, "int64")]
            made += [_half(tape, self.num_out, self.dtype, is_half), _half(tape, self.num_stats, "fp32", is_half)]
            names["made"] = made
            *seeds, _, stats = made
            self._merge(stats, is_half)
            del stats
        result = tape.new(self.num_out, self.dtype)
        assert self.merged_stats is not None
        return result, self.merged_stats, seeds

    def _merge(self, stats: Value, is_half: bool) -> None:
        """``_SDPAMerger.step``; a block of 32 bits is not cast."""
        tape, num_out = self.tape, self.num_out
        block = None if self.dtype == "fp32" else _half(tape, num_out, "fp32", is_half)
        if self.merged is None:
            self.merged, self.merged_stats = block or tape.new(num_out, "fp32"), stats
            return
        difference = _half(tape, self.num_stats, "fp32", is_half)
        weight = _half(tape, self.num_stats, "fp32", is_half)
        del difference
        difference = _half(tape, num_out, "fp32", is_half)
        product = _half(tape, num_out, "fp32", is_half)
        del difference, weight
        merged = _half(tape, num_out, "fp32", is_half)
        del product
        difference = _half(tape, self.num_stats, "fp32", is_half)
        weight = _half(tape, self.num_stats, "fp32", is_half)
        del difference
        merged_stats = _half(tape, self.num_stats, "fp32", is_half)
        del weight
        if not is_half:
            self.merged, self.merged_stats = merged, merged_stats
            return
        self.merged_stats = tape.new(self.num_stats, "fp32")
        self.merged = tape.new(num_out, "fp32")


def _backward(
    tape: RingTape, ring: Ring, likes: tuple[_Like, _Like, _Like], dtype: str, num_stats: int
) -> list[Value | None]:
    """``_templated_ring_attention_backward``: gradients in fp32, those of keys and values handed on around the ring."""
    query, key, value = likes
    num_sent = key.numel + value.numel
    names: dict[str, Any] = {
        "grad_query": tape.new(query.numel, "fp32"),
        "grad_kv": [tape.new(key.numel, "fp32"), tape.new(value.numel, "fp32")],
        "kv": [_by_heads(tape, one.numel, one.dtype, one.by_tokens) for one in (key, value)],
    }
    for step in range(ring.size):
        current = names.get("received")
        is_half, before_half = step > ring.index, 0 < step <= ring.index
        if step < ring.size - 1:
            names["sent"] = tape.new(num_sent, dtype)
            if not ring.gathers or step == 0:
                names["received"] = tape.new(num_sent * (ring.size if ring.gathers else 1), dtype)
        if step > 0:
            names["kv"] = current
        current = None
        if is_half:
            names["stats"] = _half(tape, num_stats, "fp32", True)
        made = [
            _half(tape, query.numel, dtype, is_half),
            _half(tape, key.numel, dtype, before_half),
            _half(tape, value.numel, dtype, before_half),
        ]
        scratch = _half(tape, query.numel + num_stats, "fp32", is_half)  # flash's own: the query's gradient, row sums
        names["made"] = made
        del scratch, made
        if step > 0:
            names["sent_grads"] = names["grad_kv"] = names["received_grads"]
        if before_half:
            names["grad_kv"] = [tape.new(key.numel, "fp32"), tape.new(value.numel, "fp32")]
        is_copied = step == 0 and key.by_tokens
        flat = [tape.new(key.numel, "fp32"), tape.new(value.numel, "fp32")] if is_copied else []
        names["sent_grads"] = tape.new(num_sent, "fp32")
        del flat
        names["received_grads"] = tape.new(num_sent, "fp32")
        if is_half:
            names["grad_query"] = tape.new(query.numel, "fp32")
    result = tape.new(query.numel, dtype)
    result.contiguous = query.by_tokens and not ring.leaps
    del names["grad_query"]
    both = tape.new(num_sent, dtype)
    made = [result, tape.view(both, key.numel), tape.view(both, value.numel)]
    for grad in made[1:]:
        grad.contiguous = False
    return made


def _by_heads(tape: RingTape, numel: int, dtype: str, by_tokens: bool) -> Value | None:
    """``contiguous()`` of heads: a copy of what is laid out by tokens."""
    return tape.new(numel, dtype) if by_tokens else None


def _half(tape: RingTape, numel: int, dtype: str, is_half: bool) -> Value:
    """As many elements, or half as many: in bytes, which divide where elements in open sizes may not."""
    return tape.new(numel * ITEMSIZE_BYTES[dtype] // 2, "int8") if is_half else tape.new(numel, dtype)
