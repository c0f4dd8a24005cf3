"""A rank under FSDP2 (``fully_shard``, ``fsdp_version 2``), as ``accelerate config`` has it.

In: a CellSpec of sharding fsdp, fsdp-shard-grad-op (no resharding after forward) or fsdp-hybrid. Out: a Rank. A hybrid
is a ``ParallelismConfig`` of ``dp_replicate_size`` groups of ``dp_shard_size`` ranks, a mesh of two dimensions. With a
cp_size, ``dp_shard_size`` × ``cp_size`` ranks share the model, and ``cp_size`` each sequence (context_parallel.py).
Mixed precision is the gathered weights' dtype.
"""

from typing import Any

from vramprobe.spec import CellSpec
from vramprobe.workload.sharding.fsdp import FsdpRank


class Fsdp2Rank(FsdpRank):
    """A rank whose parameters are DTensors."""

    def accelerator_options(self) -> dict[str, Any]:
        """The plugin and, for a hybrid or context parallelism, the mesh."""
        keeps = str(self.spec.sharding).endswith("shard-grad-op")
        plugin = self.plugin(fsdp_version=2, reshard_after_forward=not keeps)
        return {"fsdp_plugin": plugin} | _mesh(self.spec)


def _mesh(spec: CellSpec) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    if spec.shard_size is not None:
        sizes = {"dp_replicate_size": spec.num_gpus // spec.shard_size, "dp_shard_size": spec.shard_size}
    if spec.cp_size > 1:
        from accelerate.utils import TorchContextParallelConfig

        sharing = spec.shard_size or spec.num_gpus
        rotation = TorchContextParallelConfig(cp_comm_strategy=spec.cp_rotation)
        sizes |= {"dp_shard_size": sharing // spec.cp_size, "cp_size": spec.cp_size, "cp_handler": rotation}
    if not sizes:
        return {}
    from accelerate.utils import ParallelismConfig

    return {"parallelism_config": ParallelismConfig(**sizes)}


RANK = Fsdp2Rank
