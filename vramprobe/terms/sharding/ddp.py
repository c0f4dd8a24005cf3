"""DDP: the model is whole on every rank, and buckets hold its gradients a second time (no ``gradient_as_bucket_view``).

In: a spec. Out: the moments of any rank, and its Run. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from vramprobe.kernels.chip import Chip
from vramprobe.spec import CellSpec
from vramprobe.terms import Moment, course_of, moments
from vramprobe.terms.cell.loading import Allocator
from vramprobe.terms.step.requests import Run
from vramprobe.terms.tape.graph import Leaf, Value
from vramprobe.terms.tape.tape import Tape
from vramprobe.units import MIB

#: How much DDP and FSDP1 broadcast at once (``broadcast_bucket_size``, ``PARAM_BROADCAST_BUCKET_SIZE``), and DDP's
#: buckets once it knows the order of gradients (``bucket_cap_mb``, ``_DEFAULT_FIRST_BUCKET_BYTES``).
_BROADCAST_BYTES = 250 * MIB
_BUCKET_BYTES, _FIRST_BUCKET_BYTES = 25 * MIB, MIB


def replica_moments(spec: CellSpec, chip: Chip) -> list[Moment]:
    """A single GPU's moments with the buckets, which the reducer makes when it is built: as large as all gradients."""
    buckets = {"gradient_buckets": course_of(spec, chip).at_step["gradients"]}
    return [Moment(one.phase, one.label, one.terms | buckets) for one in moments(spec, chip)]


class DdpLog(Tape):
    """The log of a step, with the bytes of each gradient as it arrives."""

    raises_outputs = True

    def __init__(self) -> None:
        super().__init__()
        self._weights: set[Leaf] = set()

    def constant(self, numel: int, dtype: str, *, trained: bool = False) -> Value:
        """A weight."""
        value = super().constant(numel, dtype, trained=trained)
        if trained:
            self._weights.add(value.node)
        return value

    def _accumulate(self, leaf: Leaf) -> None:
        super()._accumulate(leaf)
        if leaf in self._weights:
            self.log[-1].arrived.append(leaf.gradient.num_bytes)


class DdpRun(Run):
    """One rank under DDP: what it requests of its allocator."""

    def load(self) -> None:
        """The whole model, broadcast from rank 0, and DDP's first bucket, for all gradients."""
        super().load()
        weights = [tensor.num_bytes for _, tensor in self._tensors if not tensor.quantised]
        broadcast(self.allocator, weights)
        self.allocator.allocate(("bucket", 0), sum(tensor.num_bytes for _, tensor in self._tensors if tensor.trained))

    def step(self) -> None:
        """The second step begins with buckets in the order in which gradients arrived (reducer.cpp,
        ``rebuild_buckets``)."""
        if self._num_steps == 1:
            self.allocator.free(("bucket", 0))
            for number, size_bytes in enumerate(self._buckets()):
                self.allocator.allocate(("bucket", number), size_bytes)
        super().step()

    def _buckets(self) -> list[int]:
        found, size_bytes = [], 0
        for one in (one for chunk in self._step_chunks(1) for one in chunk.arrived):
            size_bytes += one
            if size_bytes >= (_BUCKET_BYTES if found else _FIRST_BUCKET_BYTES):
                found.append(size_bytes)
                size_bytes = 0
        return [*found, size_bytes] if size_bytes else found

    def _tape(self, layers: Sequence[int], num_micro_steps: int) -> Tape:
        return DdpLog()


def broadcast(allocator: Allocator, sizes_bytes: Sequence[int]) -> None:
    """Request what a broadcast from rank 0 takes: several weights at a time, two such pieces under way
    (torch/csrc/distributed/c10d/comm.cpp, ``broadcast_coalesced``); a piece of one weight is the weight itself."""
    pieces: list[list[int]] = [[]]
    for size_bytes in sizes_bytes:
        pieces[-1].append(size_bytes)
        if sum(pieces[-1]) >= _BROADCAST_BYTES:
            pieces.append([])
    under_way: list[int] = []
    for number, piece in enumerate(pieces):
        if len(under_way) == 2:
            allocator.free(("sent", under_way.pop(0)))
        allocator.allocate(("sent", number), sum(piece) if len(piece) > 1 else 0)
        under_way.append(number)
    for number in under_way:
        allocator.free(("sent", number))
