"""One rank under FSDP1: flat parameters -> the course of the rank that holds the most, by arithmetic.

In: a spec and N. Out: a RankCourse, of which ranks.py makes moments; what is counted is said there. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence

from vramprobe.architecture import architecture
from vramprobe.spec import CellSpec
from vramprobe.terms import optimizer, parameters
from vramprobe.terms.flat_tape import flat_walk
from vramprobe.terms.graph import ITEMSIZE_BYTES
from vramprobe.terms.parameters import Tensor
from vramprobe.terms.rank_parts import (
    RankCourse,
    computed_tensors,
    prepared_tensors,
    quantised_parts,
    walked_micro_steps,
)
from vramprobe.terms.rank_tape import Unit, Units, rank_units
from vramprobe.terms.setup import setup_of

#: A tensor in a flat parameter begins at a multiple of so many bytes (_flat_param.py, ``_get_aligned_numel``).
_ALIGNED_BYTES = 16


def flat_course(spec: CellSpec, num_gpus: int, *, reshards: bool, has_flash: bool, on_host: bool = False) -> RankCourse:
    """Units are the layers and, as the root's, all outside them; an adapter is a unit of its own (peft's policy)."""
    arch, stored = architecture(spec.architecture), prepared_tensors(spec, is_flat=True)
    computed = computed_tensors(spec, stored)
    in_layer, outside, held, trained = [], [], 0, []
    for per_layer in (True, False):
        for group in _flat_groups(stored, computed, per_layer=per_layer):
            unit, shard = _flat_unit(spec, group, num_gpus, on_host)
            copies = group[0][0].num_copies if per_layer else 1
            (in_layer if per_layer else outside).append(unit)
            held += shard * copies
            held += sum(quantised_parts(spec, one)[1] for one, _ in group if one.quantised) * copies
            if unit.reduced:
                first = group[0][0]
                width = ITEMSIZE_BYTES[first.dtype]
                trained.append(first._replace(shape=(shard // width,), num_copies=copies))
    units = Units(
        rank_units(in_layer), rank_units(outside), reshards=reshards, on_host=on_host,
        micro_steps=walked_micro_steps(spec),
    )  # fmt: skip
    # peft asks an adapter for its dtype before its unit is gathered, and FSDP casts what comes to the gathered one's.
    raised = "fp32" if spec.autocast != "none" and spec.method != "full" else None
    walk = flat_walk(setup_of(spec, arch, computed, has_flash, raised), units)
    buffers, state = parameters.buffers_bytes(arch, spec.dtype), optimizer.allocated_state_bytes(spec, trained)
    at_step = {"gradients": sum(tensor.num_bytes * tensor.num_copies for tensor in trained),
               "optimizer_temporaries": optimizer.temporaries_bytes(spec, trained)}  # fmt: skip
    if on_host:
        return RankCourse(walk, {"weights": buffers}, {}, {}, {}, 0, held + state + at_step["gradients"])
    return RankCourse(walk, {"weights": buffers + held, "optimizer_state": state}, at_step, {}, {}, 0)


_Pair = tuple[Tensor, Tensor]  # as stored, as computed with


def _flat_groups(stored: Sequence[Tensor], computed: Sequence[Tensor], *, per_layer: bool) -> list[list[_Pair]]:
    """The tensors of each flat parameter: an adapter's alone, all others of a layer or outside the layers together."""
    pairs = [pair for pair in zip(stored, computed, strict=True) if pair[0].per_layer == per_layer]
    has_frozen = any(not one.trained for one in stored)
    together = [pair for pair in pairs if not (has_frozen and pair[0].trained)]
    return [group for group in (together, *([pair] for pair in pairs if pair not in together)) if group]


def _flat_unit(spec: CellSpec, group: Sequence[_Pair], num_gpus: int, on_host: bool) -> tuple[Unit, int]:
    """(what is gathered and reduced, this rank's bytes of it) of one flat parameter."""
    stored_bytes, computed_bytes = ITEMSIZE_BYTES[group[0][0].dtype], ITEMSIZE_BYTES[group[0][1].dtype]
    aligned = _ALIGNED_BYTES // computed_bytes
    elements = 0
    for stored, _ in group:
        numel = stored.numel
        if stored.quantised:
            computed_bytes = stored_bytes = ITEMSIZE_BYTES[spec.dtype]
            numel = -(-quantised_parts(spec, stored)[0] // stored_bytes)
        elements += -(-numel // aligned) * aligned
    share = -(-elements // num_gpus)
    sent, shard = share * computed_bytes, share * stored_bytes
    is_cast = stored_bytes != computed_bytes
    unit = Unit(sent * num_gpus, sent if is_cast else 0, moved=0 if is_cast or not on_host else sent)
    if group[0][0].trained:
        unit = unit._replace(reduced=sent * num_gpus, reduced_share=sent, shard=shard)
    return unit, shard
