"""Host memory: what the ranks of a machine keep there, where FSDP or DeepSpeed offloads to it.

In: a cell with its ranks. Out: bytes by formulas, and the same in words.
"""

from contextlib import suppress

from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.bounds.rank import RankTensors
from vramprobe.errors import VramprobeError
from vramprobe.rules.sharding import SHARD_SIZE, rules_of, sharing_ranks
from vramprobe.spec import CellSpec
from vramprobe.units import format_bytes


def of_rank_bytes(spec: CellSpec) -> int:
    """Tensors of one rank, between two steps. Raises UnsupportedArchitecture where a family is not known."""
    rank = _rank_of(spec)
    if not rules_of(spec.sharding).uses_deepspeed:
        return rank.shares + rank.state + sum(one.num_bytes * one.num_copies for one in rank.stepped)
    stepped = rank.part * (4 + 4 + rank.width) + rank.state  # with an fp32 copy and its gradients
    if rules_of(spec.sharding).divides_weights:
        return stepped + (rank.shares if spec.offload == "params" else 0)
    added = rank.part if spec.sharding == "zero2" and spec.grad_accum > 1 else 0
    return stepped + rank.width * (max(one.numel for one in rank.trained) + added)


def of_machine_bytes(spec: CellSpec) -> int:
    """Bytes of all ranks of a machine, SHARD_SIZE at most: between two steps, or while rank 0 has the whole model."""
    return max(min(sharing_ranks(spec), SHARD_SIZE) * of_rank_bytes(spec), loaded_bytes(spec))


def loaded_bytes(spec: CellSpec) -> int:
    """Bytes of the model that rank 0 holds before FSDP divides it; 0 for DeepSpeed, which loads on the GPUs."""
    rank = _rank_of(spec)
    if rules_of(spec.sharding).module not in ("fsdp1", "fsdp2"):
        return 0
    base = [tensor for tensor in rank.stored if tensor.role != "adapter"]
    return sum(tensor.num_bytes * tensor.num_copies for tensor in base) + rank.buffers


def _rank_of(spec: CellSpec) -> RankTensors:
    return RankTensors(spec, architecture(spec.architecture), sharing_ranks(spec))


class HostTooSmall(VramprobeError):
    """A rank that is not recorded here, as its tensors on the host are more than this machine has free."""


def require_room(spec: CellSpec) -> None:
    """Raise HostTooSmall for a rank that DeepSpeed offloads: a recording has the whole model, and steps on the host."""
    from vramprobe.measure.environment import free_host_bytes

    if spec.offload == "none" or not rules_of(spec.sharding).uses_deepspeed:
        return
    with suppress(UnsupportedArchitecture):
        needed, (free, _) = of_rank_bytes(spec), free_host_bytes()
        if needed > free:
            raise HostTooSmall(
                f"a recording takes {format_bytes(needed)} of this machine's memory, and {format_bytes(free)} are free"
            )


def in_words(spec: CellSpec) -> str:
    """Describe the host's memory for a reader."""
    ranks, loaded, each = min(sharing_ranks(spec), SHARD_SIZE), loaded_bytes(spec), of_rank_bytes(spec)
    of_all = "" if ranks == 1 else f" for each rank, {format_bytes(ranks * each)} for {ranks} of a machine"
    words = (
        f"on the host, by formulas: {format_bytes(each)} of tensors{of_all}; what pinning rounds up and the libraries "
        "(0.45 GiB a process) come on top"
    )
    return words + (f"; rank 0 loads {format_bytes(loaded)} there first" if loaded else "")
