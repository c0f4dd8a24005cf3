"""Replayed: a cell's requests, by arithmetic, through CUDA's caching allocator: what it would hold in reserve.

In: a spec, and what its card decides. Out: peaks in both tiers, and whether a card of a given size runs out. Where two
accounts meet that know nothing of each other: the arithmetic's order of requests (terms/step/requests.py), the
allocator's own rules (allocator/allocator.py). No torch.
"""

from __future__ import annotations

from typing import NamedTuple

from vramprobe.allocator.allocator import CachingAllocator
from vramprobe.allocator.compiled import counting_allocator
from vramprobe.allocator.config import parse_alloc_conf
from vramprobe.allocator.ledger import Device, OutOfMemory
from vramprobe.kernels.chip import A100, Chip
from vramprobe.spec import CellSpec
from vramprobe.terms.step.requests import Run
from vramprobe.terms.step.workspaces import BLAS_WORKSPACE_BYTES, DecidesMemory

_MAX_KEPT = 4096


class Replayed(NamedTuple):
    """The highest of the training steps, and what the load before them has allocated at most."""

    allocated_bytes: int
    reserved_bytes: int
    load_bytes: int


#: What decides which kernels run, and what they take beside tensors: cuBLAS's workspace, the chip.
_Card = tuple[int, Chip | None]
_kept: dict[tuple[str, int, Chip | None], Replayed] = {}


def replayed(spec: CellSpec, gpu: DecidesMemory | None = None) -> Replayed:
    """The peaks of ``spec``, or of the first of its ranks, on a card that is never full; without ``gpu`` on an A100.

    Raises UnsupportedArchitecture for what there is no arithmetic for.
    """
    card = card_of(gpu)
    key = (spec.fingerprint, *card)
    if key not in _kept:
        if len(_kept) >= _MAX_KEPT:
            _kept.clear()
        allocator, load_bytes = _play(spec, card, Device())
        peak = allocator.ledger.peak()
        _kept[key] = Replayed(peak.allocated_bytes, peak.reserved_bytes, load_bytes)
    return _kept[key]


def num_alloc_retries(spec: CellSpec, gpu: DecidesMemory, limit_bytes: int) -> int | None:
    """Number of times that the allocator gives its cached blocks back where segments may take ``limit_bytes`` together;
    null where that is not enough, and the run ends out of memory.

    Raises UnsupportedArchitecture for what there is no arithmetic for.
    """
    try:
        allocator, _ = _play(spec, card_of(gpu), Device(segment_bytes=limit_bytes))
    except OutOfMemory:
        return None
    return allocator.ledger.num_alloc_retries


def chip_of(gpu: DecidesMemory) -> Chip | None:
    """Return the card's facts that choose its kernels; null for one that is not NVIDIA's."""
    if gpu.capability is None or gpu.num_sms is None:
        return None
    return Chip(gpu.capability, gpu.num_sms)


def card_of(gpu: DecidesMemory | None) -> _Card:
    """Return the card's facts that decide the requests of a cell; without ``gpu``, an A100's."""
    if gpu is None:
        return BLAS_WORKSPACE_BYTES, A100
    return gpu.blas_workspace_bytes, chip_of(gpu)


def _play(spec: CellSpec, card: _Card, device: Device) -> tuple[CachingAllocator, int]:
    """The allocator after the load and the training steps, its peaks those of the steps; what the load has allocated at
    most. Raises OutOfMemory.
    """
    allocator = counting_allocator(parse_alloc_conf(spec.alloc_conf or ""), device)
    return allocator, play(_run_of(spec, allocator, card), allocator)


def _run_of(spec: CellSpec, allocator: CachingAllocator, card: _Card) -> Run:
    workspace_bytes, chip = card
    return Run(spec, allocator, workspace_bytes=workspace_bytes, chip=chip)


def play(run: Run, allocator: CachingAllocator) -> int:
    """The load and the training steps through the allocator that the run asks, whose peaks are those of the steps;
    returned is what the load has allocated at most.

    Raises OutOfMemory.
    """
    run.load()
    load_bytes = allocator.ledger.peak().allocated_bytes
    allocator.empty_cache()
    allocator.ledger.reset_peaks()
    # The first step makes the optimizer's state, and each finds the segments that the one before left.
    for _ in range(max(2, run.spec.steps)):
        run.step()
    return load_bytes
