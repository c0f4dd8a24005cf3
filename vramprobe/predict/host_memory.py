"""Host memory: what the ranks of a machine keep there, where FSDP or DeepSpeed offloads to it.

In: a cell with its ranks. Out: bytes, and the same in words.
"""

from __future__ import annotations

from vramprobe.architecture import architecture
from vramprobe.rules.sharding import SHARD_SIZE, rules_of, sharing_ranks
from vramprobe.spec import CellSpec
from vramprobe.terms.cell import parameters
from vramprobe.terms.sharding.rank import stored_tensors
from vramprobe.terms.sharding.ranks import host_bytes
from vramprobe.units import format_bytes


def of_rank_bytes(spec: CellSpec) -> int:
    """Tensors of one rank, between two steps."""
    within = rules_of(spec.sharding).within or spec.sharding
    return host_bytes(spec, sharing_ranks(spec), within, spec.offload)


def of_machine_bytes(spec: CellSpec) -> int:
    """Bytes of all ranks of a machine, SHARD_SIZE at most: between two steps, or while rank 0 has the whole model."""
    return max(min(sharing_ranks(spec), SHARD_SIZE) * of_rank_bytes(spec), loaded_bytes(spec))


def loaded_bytes(spec: CellSpec) -> int:
    """Bytes of the model that rank 0 holds before FSDP divides it; 0 for DeepSpeed, which loads on the GPUs."""
    if rules_of(spec.sharding).module not in ("fsdp1", "fsdp2"):
        return 0
    base = [tensor for tensor in stored_tensors(spec) if tensor.role != "adapter"]
    whole = sum(tensor.num_bytes * tensor.num_copies for tensor in base)
    return whole + parameters.buffers_bytes(architecture(spec.architecture), spec.dtype)


def in_words(spec: CellSpec) -> str:
    """Describe the host's memory for a reader."""
    ranks, loaded, each = min(sharing_ranks(spec), SHARD_SIZE), loaded_bytes(spec), of_rank_bytes(spec)
    words = (
        f"on the host: {format_bytes(each)} of tensors for each rank, {format_bytes(ranks * each)} for {ranks} of a "
        "machine; what pinning rounds up and the libraries (0.45 GiB a process) come on top"
    )
    return words + (f"; rank 0 loads {format_bytes(loaded)} there first" if loaded else "")
