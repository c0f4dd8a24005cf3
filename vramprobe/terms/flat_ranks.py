"""One rank under FSDP1: flat parameters -> the course of the rank that holds the most, by arithmetic.

In: a spec and N. Out: a RankCourse, of which ranks.py makes moments; what is counted is said there. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
    stored_tensors,
    walked_micro_steps,
)
from vramprobe.terms.rank_tape import Unit, Units, rank_units
from vramprobe.terms.setup import Setup, setup_of

#: A tensor in a flat parameter begins at a multiple of so many bytes (_flat_param.py, ``_get_aligned_numel``).
_ALIGNED_BYTES = 16


class FlatPart(NamedTuple):
    """One flat parameter: its weights by name, this rank's part of it."""

    names: list[str]
    per_layer: bool
    trained: bool
    is_adapter: bool  # of a layer, beside frozen weights
    unit: Unit
    loaded_bytes: int  # this rank's part, before what is trained is raised to fp32
    share_bytes: int
    share_elements: int
    aligned: int  # elements that each weight begins at a multiple of
    num_copies: int
    beside_bytes: int  # quantisation state, which is not divided
    as_state: Tensor | None  # what the optimizer steps, where it is trained


def flat_parts(spec: CellSpec, num_gpus: int, on_host: bool = False) -> list[FlatPart]:
    """The layers' and, as the root's, all outside them; an adapter is a unit of its own (peft's policy)."""
    stored = prepared_tensors(spec, is_flat=True)
    computed = computed_tensors(spec, stored)
    return [_flat_part(spec, group, num_gpus, on_host)
            for per_layer in (True, False)
            for group in _flat_groups(stored, computed, per_layer=per_layer)]  # fmt: skip


def flat_units(spec: CellSpec, num_gpus: int, *, reshards: bool, on_host: bool = False) -> Units:
    """What a rank gathers and reduces at a time, of so many that share the model."""
    parts = flat_parts(spec, num_gpus, on_host)
    layer, root = (rank_units([part.unit for part in parts if part.per_layer == yes]) for yes in (True, False))
    return Units(layer, root, reshards=reshards, on_host=on_host, micro_steps=walked_micro_steps(spec))


def flat_setup(spec: CellSpec, computed: Sequence[Tensor], has_flash: bool) -> Setup:
    """peft asks an adapter for its dtype before it is gathered, and FSDP casts what comes to the gathered one's."""
    raised = "fp32" if spec.autocast != "none" and spec.method != "full" else None
    return setup_of(spec, architecture(spec.architecture), computed, has_flash, raised)


def flat_course(spec: CellSpec, num_gpus: int, *, reshards: bool, has_flash: bool, on_host: bool = False) -> RankCourse:
    """Of the rank with the first part of each flat parameter."""
    arch, parts = architecture(spec.architecture), flat_parts(spec, num_gpus, on_host)
    held = sum((part.share_bytes + part.beside_bytes) * part.num_copies for part in parts)
    trained = [part.as_state for part in parts if part.as_state is not None]
    computed = computed_tensors(spec, prepared_tensors(spec, is_flat=True))
    units = flat_units(spec, num_gpus, reshards=reshards, on_host=on_host)
    walk = flat_walk(flat_setup(spec, computed, has_flash), units)
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


def _flat_part(spec: CellSpec, group: Sequence[_Pair], num_gpus: int, on_host: bool) -> FlatPart:
    first, computed = group[0]
    stored_bytes, computed_bytes = ITEMSIZE_BYTES[first.dtype], ITEMSIZE_BYTES[computed.dtype]
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
    loaded = shard
    if first.trained and not first.quantised:
        loaded = share * ITEMSIZE_BYTES[next(one.dtype for one in stored_tensors(spec) if one.name == first.name)]
    copies = first.num_copies if first.per_layer else 1
    as_state = None
    if first.trained:
        unit = unit._replace(reduced=sent * num_gpus, reduced_share=sent, shard=shard)
        as_state = first._replace(shape=(shard // ITEMSIZE_BYTES[first.dtype],), num_copies=copies)
    beside = sum(quantised_parts(spec, one)[1] for one, _ in group if one.quantised)
    return FlatPart(
        names=[stored.name for stored, _ in group], per_layer=first.per_layer, trained=first.trained, unit=unit,
        is_adapter=first.role == "adapter" and first.per_layer, loaded_bytes=loaded, share_bytes=shard,
        share_elements=share, aligned=aligned, num_copies=copies, beside_bytes=beside, as_state=as_state,
    )  # fmt: skip
