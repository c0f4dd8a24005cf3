"""Host: what the ranks of a machine keep in its memory, where FSDP or DeepSpeed offloads to it.

In: a spec (its batch is one rank's), the ranks that share a model, the kind of sharding, what is offloaded. Out: bytes,
and the same in words. No torch here.
"""

from __future__ import annotations

from vramprobe.architecture import architecture
from vramprobe.choices import SHARD_SIZE
from vramprobe.spec import CellSpec
from vramprobe.terms import parameters
from vramprobe.terms.rank_parts import stored_tensors
from vramprobe.terms.ranks import Sharding, host_bytes
from vramprobe.units import format_bytes


def of_machine_bytes(spec: CellSpec, num_gpus: int, within: Sharding, offload: str) -> int:
    """Of all ranks of a machine, SHARD_SIZE at most: between two steps, or while rank 0 has the whole model."""
    held = min(num_gpus, SHARD_SIZE) * host_bytes(spec, num_gpus, within, offload)
    return max(held, loaded_bytes(spec, within))


def loaded_bytes(spec: CellSpec, within: Sharding) -> int:
    """What rank 0 has of the model before FSDP divides it; DeepSpeed loads on the cards."""
    if not within.startswith("fsdp"):
        return 0
    base = [tensor for tensor in stored_tensors(spec) if tensor.role != "adapter"]
    whole = sum(tensor.num_bytes * tensor.num_copies for tensor in base)
    return whole + parameters.buffers_bytes(architecture(spec.architecture), spec.dtype)


def in_words(spec: CellSpec, num_gpus: int, within: Sharding, offload: str) -> str:
    """The same for a reader."""
    ranks, loaded = min(num_gpus, SHARD_SIZE), loaded_bytes(spec, within)
    each = host_bytes(spec, num_gpus, within, offload)
    words = (
        f"on the host: {format_bytes(each)} of tensors for each rank, {format_bytes(ranks * each)} for {ranks} of a "
        "machine; what pinning rounds up and the libraries (0.45 GiB a process) come on top"
    )
    return words + (f"; rank 0 loads {format_bytes(loaded)} there first" if loaded else "")
