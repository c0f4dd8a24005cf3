"""Tensor parallelism: a cell under transformers' ``tp_plan="auto"`` -> the moments of its first rank.

In: a spec with its ranks, whose batch is that of all together. Out: Counted. What is counted is said in
terms/sharding/tensor_parallel.py.
"""

from __future__ import annotations

from vramprobe.errors import SpecError
from vramprobe.kernels.chip import chip_like
from vramprobe.predict.one_gpu import Counted, without_flash
from vramprobe.predict.prediction import HasKernels
from vramprobe.rules.sharding import cannot_shard
from vramprobe.spec import CellSpec
from vramprobe.terms.sharding.tensor_parallel import part_of


def count_part(spec: CellSpec, gpu: HasKernels | None) -> Counted:
    """One rank, with its part of every layer. Raises SpecError for what the libraries do not divide."""
    if spec.num_gpus < 2:
        raise SpecError(f"num_gpus {spec.num_gpus} under tp: layers are divided among 2 GPUs or more; give so many")
    require_divided(spec)
    moments = part_of(spec, spec.num_gpus, chip_like(gpu)).moments(spec)
    note = f"one rank of {spec.num_gpus} under tp, all with the same batch, by arithmetic, not measured"
    return Counted(moments, [note, *without_flash(spec, gpu)])


def require_divided(spec: CellSpec) -> None:
    """Raises SpecError for what the libraries do not divide."""
    if reason := cannot_shard(spec):
        raise SpecError(reason)
