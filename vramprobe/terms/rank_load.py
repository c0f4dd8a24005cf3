"""What the loads of all ranks have in common: which weight stands on the card under which name, and what comes last.

In: a spec, an allocator that has been asked for the weights. Out: a name of its allocations, or more of them.
"""

from __future__ import annotations

from collections.abc import Hashable

from vramprobe.architecture import Architecture
from vramprobe.spec import CellSpec
from vramprobe.terms import parameters
from vramprobe.terms.graph import ITEMSIZE_BYTES
from vramprobe.terms.loading import BATCH, Allocator, packed_number


def standing(spec: CellSpec, allocator: Allocator, name: str) -> Hashable:
    """By which name a weight that loading.py has loaded stands: raised, as it came, or packed."""
    numbered = ("weight", name, packed_number(spec.quant))
    return next(key for key in (("cast", name), ("weight", name), numbered) if allocator.has(key))


def add_buffers(spec: CellSpec, arch: Architecture, allocator: Allocator) -> None:
    """Of a model that no card has loaded whole."""
    for number, size_bytes in enumerate(parameters.buffer_parts(arch, spec.dtype)):
        allocator.allocate(("buffer", number), size_bytes)


def add_batch(spec: CellSpec, allocator: Allocator) -> None:
    """The ids and the labels of one rank's."""
    for name in BATCH:
        allocator.allocate(name, ITEMSIZE_BYTES["int64"] * spec.num_tokens)
