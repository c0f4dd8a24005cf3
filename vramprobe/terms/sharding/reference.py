"""A reference model beside the trained one on a rank of FSDP2: divided as one unit, as TRL's ``prepare_fsdp`` does.

In: a spec and its Division. Out: the unit, a rank's bytes of it, what bringing it requests. Its weights have the dtype
that they are loaded in, and are gathered whole for its forward, in that of the computation; where layers are kept
after forward, so is all of it, since it has no backward (``reshard_after_forward`` is the root's, too). Never imports
torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from vramprobe.architecture import architecture
from vramprobe.spec import CellSpec
from vramprobe.terms.cell import parameters
from vramprobe.terms.cell.loading import Allocator
from vramprobe.terms.cell.parameters import Tensor
from vramprobe.terms.sharding.fsdp import Unit, joined, reshards
from vramprobe.terms.sharding.rank import SENDING, Division, computed_tensors, share_of, stored_tensors
from vramprobe.terms.tape.graph import ITEMSIZE_BYTES


def unit_of(spec: CellSpec, division: Division) -> Unit:
    """What is gathered for its forward; empty where there is none, or where it stays whole."""
    return joined(_units(spec, division)) if reshards(division) else Unit()


def parts_of(spec: CellSpec, division: Division) -> list[int]:
    """Bytes of each weight that is copied out of the all-gather."""
    return [unit.gathered for unit in _units(spec, division)]


def held_bytes(spec: CellSpec, division: Division) -> int:
    """A rank's part of it, its buffers, and all of it where it stays whole."""
    if spec.num_models == 1:
        return 0
    shares = sum(
        share_of(spec, tensor, division.num_gpus, by_rows=True).weights * tensor.num_copies
        for tensor in stored_tensors(spec)
    )
    whole = 0 if reshards(division) else sum(parts_of(spec, division))
    return shares + whole + parameters.buffers_bytes(architecture(spec.architecture), spec.dtype)


def bring(spec: CellSpec, division: Division, tensors: Sequence[tuple[str, Tensor]], allocator: Allocator) -> None:
    """Request all of it whole, then each shard: ``fully_shard`` lets go of the whole ones as it returns.

    ``tensors``: each copy of each stored tensor with a name of its own.
    """
    for name, tensor in tensors:
        allocator.allocate(("second", name), tensor.num_bytes)
    for number, size_bytes in enumerate(parameters.buffer_parts(architecture(spec.architecture), spec.dtype)):
        allocator.allocate(("second buffer", number), size_bytes)
    for name, tensor in tensors:
        share = share_of(spec, tensor, division.num_gpus, by_rows=True)
        allocator.allocate(("second share", name), share.weights)
    for name, _ in tensors:
        allocator.free(("second", name))
    if reshards(division):
        return
    whole = joined(_units(spec, division))
    allocator.allocate("second cast", whole.cast, SENDING)
    allocator.allocate("second sent", whole.gathered, SENDING)
    allocator.free("second cast")
    for number, size_bytes in enumerate(parts_of(spec, division)):
        allocator.allocate(("second whole", number), size_bytes)
    allocator.free("second sent")


def _units(spec: CellSpec, division: Division) -> list[Unit]:
    """Each copy of each tensor."""
    if spec.num_models == 1:
        return []
    found: list[Unit] = []
    stored = stored_tensors(spec)
    for tensor, computed in zip(stored, computed_tensors(spec, stored), strict=True):
        share = share_of(spec, tensor, division.num_gpus, by_rows=True)
        sent = share.elements * ITEMSIZE_BYTES[computed.dtype]
        cast = sent if tensor.dtype != computed.dtype else 0
        found += [Unit(sent * division.num_gpus, cast)] * tensor.num_copies
    return found
