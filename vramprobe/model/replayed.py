"""Replayed: a cell's requests, by arithmetic, through CUDA's caching allocator: what it would hold in reserve.

In: a spec, and what its card decides. Out: peaks in both tiers. Where two accounts meet that know nothing of each
other: the arithmetic's order of requests (terms/requests.py), the allocator's own rules (simulate/allocator.py). No
torch.
"""

from __future__ import annotations

from typing import NamedTuple

from vramprobe.model.memory_model import BLAS_WORKSPACE_BYTES, DecidesMemory
from vramprobe.simulate.allocator import CachingAllocator
from vramprobe.simulate.allocator_config import parse_alloc_conf
from vramprobe.spec import CellSpec
from vramprobe.terms.requests import Run
from vramprobe.terms.scratch import Chip

_MAX_KEPT = 4096


class Replayed(NamedTuple):
    """The highest of the training steps."""

    allocated_bytes: int
    reserved_bytes: int


_kept: dict[tuple[str, bool, int, Chip | None], Replayed] = {}


def replayed(spec: CellSpec, gpu: DecidesMemory | None = None) -> Replayed:
    """The peaks of ``spec`` on a card that is never full; without ``gpu`` on one as an A100.

    Raises UnsupportedArchitecture for what there is no arithmetic for.
    """
    card: tuple[bool, int, Chip | None] = (True, BLAS_WORKSPACE_BYTES, Chip())
    if gpu is not None:
        card = (gpu.has_flash, gpu.blas_workspace_bytes, chip_of(gpu))
    key = (spec.fingerprint, *card)
    if key not in _kept:
        if len(_kept) >= _MAX_KEPT:
            _kept.clear()
        _kept[key] = _replay(spec, *card)
    return _kept[key]


def chip_of(gpu: DecidesMemory) -> Chip | None:
    """What is known of its kernels; null for one that is not NVIDIA's."""
    if gpu.capability is None or gpu.num_sms is None:
        return None
    return Chip(gpu.capability, gpu.num_sms)


def _replay(spec: CellSpec, has_flash: bool, workspace_bytes: int, chip: Chip | None) -> Replayed:
    allocator = CachingAllocator(parse_alloc_conf(spec.alloc_conf or ""))
    run = Run(spec, allocator, has_flash=has_flash, workspace_bytes=workspace_bytes, chip=chip)
    run.load()
    allocator.empty_cache()
    allocator.ledger.reset_peaks()
    # The first step makes the optimizer's state, and each finds the segments that the one before left.
    for _ in range(max(2, spec.steps)):
        run.step()
    peak = allocator.ledger.peak()
    return Replayed(peak.allocated_bytes, peak.reserved_bytes)
