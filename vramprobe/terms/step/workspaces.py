"""Workspaces: cuBLAS's bytes on a card, which stand in each moment of a step.

In: a cell, what decides its card's memory, the moments by arithmetic. Out: bytes, moments. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vramprobe.spec import CellSpec
from vramprobe.terms.step.moments import Moment
from vramprobe.units import KIB, MIB

#: cuBLAS's workspace for one thread where no card is named, as on an A100 (catalog.Gpu.blas_workspace_bytes); the
#: forward's thread has one, and the backward's.
BLAS_WORKSPACE_BYTES = 8 * MIB + 128 * KIB


class DecidesMemory(Protocol):
    """A GPU, as far as what it runs decides memory."""

    @property
    def blas_workspace_bytes(self) -> int: ...

    @property
    def capability(self) -> tuple[int, int] | None: ...

    @property
    def num_sms(self) -> int | None: ...


def workspaces_bytes(spec: CellSpec, gpu: DecidesMemory | None) -> int:
    """Bytes of cuBLAS's workspaces for the forward's thread and the backward's, from the first product of each on."""
    if spec.device != "cuda":
        return 0
    return 2 * (BLAS_WORKSPACE_BYTES if gpu is None else gpu.blas_workspace_bytes)


def with_workspaces(found: Sequence[Moment], workspaces: int) -> list[Moment]:
    """Return the moments with cuBLAS's workspaces."""
    if not workspaces:
        return list(found)
    return [Moment(one.phase, one.label, one.terms | {"workspaces": workspaces}) for one in found]


def highest_moment(found: Sequence[Moment]) -> Moment:
    """Return the moment with the most bytes, the first of equal ones."""
    return max(found, key=lambda moment: moment.total_bytes)
