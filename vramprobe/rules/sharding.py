"""Kinds of sharding: one row of rules for each.

In: a sharding's name, or a cell with its ranks. Out: its row, the ranks that share a model. A new kind of sharding is a
row here and a module of its name in workload/sharding/; searches know it once predict/shares.py does. What no library
runs so is told by not_sharded.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vramprobe.optimizers import OPTIMIZERS
from vramprobe.rules import Cell

if TYPE_CHECKING:
    from vramprobe.choices import Sharding

#: Ranks of one group under a hybrid by default: the GPUs of a machine.
SHARD_SIZE = 8
#: Those that accelerate hands DeepSpeed's CPUAdam for, with the same arithmetic; for most others it does so, too.
CPU_ADAM = tuple(name for name, row in OPTIMIZERS.items() if row.has_cpu_adam)
#: The optimizers that stepped on fully_shard's DTensors here.
DTENSOR_OPTIMIZERS = tuple(name for name, row in OPTIMIZERS.items() if row.takes_dtensors)


@dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """Properties of one kind of sharding, and what it can be combined with."""

    module: str  # in workload/sharding/
    uses_deepspeed: bool = False
    within: str | None = None  # a hybrid: how the ranks of each group share one model
    groups_are_machines: bool = False  # a hybrid: of as many GPUs as each process sees
    has_ranks: bool = True  # false: one process has all GPUs
    shares_batch: bool = False  # all ranks have the same batch; otherwise each has its own
    divides_weights: bool = False  # 4-bit weights are then stored as floats, which the libraries can divide
    divides_state: bool = True  # gradients or the optimizer's state, at least
    answers_min_gpus: bool = False  # more GPUs make it fit, and it is asked about where nobody names a sharding
    recommended_for: tuple[str, ...] = ()  # methods that recommend tries it for, unless a sharding is given
    num_gathers: int = 0  # of all weights in a micro-step
    optimizers: tuple[str, ...] = ()  # that step its parameters; empty: all do
    quants: tuple[str, ...] = ("nf4", "nf4-single", "fp4", "int8")
    no_quant: str = ""  # why others are not run, and what to do
    offloads: tuple[str, ...] = ()
    no_offload: str = ""  # why others are not run, and what to do
    offload_optimizers: tuple[str, ...] = ()  # that step on the host; empty: all but paged ones
    runs_trl: bool = True  # its trainers and its head


_4_BIT = ("nf4", "nf4-single", "fp4")
_NO_INT8 = (
    "FSDP takes away what bitsandbytes keeps on an int8 weight, and the first forward fails; use quant nf4, or "
    "sharding ddp, zero1 or zero2, which leave frozen weights whole"
)
_FSDP1 = ShardingRules(
    module="fsdp1",
    divides_weights=True,
    num_gathers=2,
    quants=_4_BIT,
    no_quant=_NO_INT8,
    offloads=("params",),
    no_offload="FSDP keeps parameters, gradients and state on the host, or none of them; use offload params",
)
_FSDP2 = replace(_FSDP1, module="fsdp2", answers_min_gpus=True, optimizers=DTENSOR_OPTIMIZERS)
_ZERO = ShardingRules(
    module="zero",
    uses_deepspeed=True,
    answers_min_gpus=True,
    offloads=("optimizer",),
    no_offload="DeepSpeed keeps parameters on the host under zero3 alone; use zero3, or offload optimizer",
    offload_optimizers=CPU_ADAM,
)
#: choices.Sharding → its rules.
SHARDINGS: dict[Sharding, ShardingRules] = {
    "ddp": ShardingRules(
        module="ddp",
        divides_state=False,
        recommended_for=("full", "lora", "qlora"),
        no_offload="DistributedDataParallel keeps all on the GPU; use sharding fsdp, fsdp1, zero2 or zero3",
    ),
    "zero1": _ZERO,
    "zero2": replace(_ZERO, recommended_for=("full",)),  # adapters' state is small: dividing it alone saves nothing
    "zero3": replace(
        _ZERO, module="zero3", divides_weights=True, num_gathers=2, offloads=("optimizer", "params"), no_offload=""
    ),
    "fsdp": replace(_FSDP2, recommended_for=("full", "lora", "qlora")),
    "fsdp-shard-grad-op": replace(_FSDP2, num_gathers=1),
    "fsdp-hybrid": replace(_FSDP2, within="fsdp", answers_min_gpus=False),
    "fsdp1": _FSDP1,
    "fsdp1-shard-grad-op": replace(
        _FSDP1,
        num_gathers=1,
        quants=(),
        no_quant="torch ends it in the first backward (FSDP does not support changing the parameters between forward "
        "and backward); use sharding fsdp1, or fsdp-shard-grad-op",
    ),
    "fsdp1-hybrid": replace(_FSDP1, within="fsdp1", groups_are_machines=True),
    "tp": ShardingRules(
        module="tensor_parallel",
        shares_batch=True,
        runs_trl=False,
        optimizers=DTENSOR_OPTIMIZERS,
        quants=(),
        no_quant="transformers makes DTensors of the parts, and peft asks them what only bitsandbytes' own weights "
        "have ('DTensor' object has no attribute 'compress_statistics'); use method lora, or sharding fsdp",
        no_offload="a rank keeps its part of every layer on its GPU; use more of them, or sharding fsdp",
    ),
    "device-map": ShardingRules(
        module="device_map",
        has_ranks=False,
        shares_batch=True,
        runs_trl=False,
        no_offload="what no GPU can hold is not put in host memory here; use more GPUs, or sharding fsdp",
    ),
}
#: The rules of what is not sharded.
ONE_GPU = ShardingRules(module="", divides_state=False)
HYBRID = tuple(kind for kind, rules in SHARDINGS.items() if rules.within is not None)
FSDP2 = tuple(kind for kind, rules in SHARDINGS.items() if rules.module == "fsdp2")
#: Those whose ranks make one group, each with a batch of its own.
ONE_GROUP = tuple(kind for kind, rules in SHARDINGS.items() if rules.within is None and not rules.shares_batch)


def rules_of(sharding: Sharding | None) -> ShardingRules:
    """The row of a kind of sharding; ONE_GPU for None."""
    return ONE_GPU if sharding is None else SHARDINGS[sharding]


def sharing_ranks(spec: Cell) -> int:
    """The ranks that have one model among them: all, or those of one group."""
    return spec.num_gpus if spec.shard_size is None else spec.shard_size


def with_group_size(spec: Any) -> Any:
    """``spec`` with the usual size of a group where a hybrid has none."""
    if spec.shard_size is not None or spec.sharding not in HYBRID:
        return spec
    return spec.model_copy(update={"shard_size": SHARD_SIZE})
