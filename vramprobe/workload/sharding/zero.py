"""One of several ranks under DeepSpeed's ZeRO, through accelerate: its engine steps, its optimizer keeps the shards.

In: a CellSpec with sharding zero1, zero2 or zero3. Out: a Rank. The configuration is what ``accelerate config`` asks
for, the stage and what is offloaded: buckets and prefetching are DeepSpeed's defaults. Its attributes are read, never
set.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from vramprobe.spec import CellSpec
from vramprobe.workload.sharding.rank import Rank
from vramprobe.workload.storages import Storages, gradient_tensors, state_tensors, weight_tensors

#: DeepSpeed's names: the fp32 copies that are stepped; beside them, where they are stepped on the host, what goes back
#: to the card; averaged gradients, and the buffers in which they wait for a step on the host.
_MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
_STEPPED_ON_HOST = ("param_buffer_of_bit16_for_cpu_offload_groups", "param_groups_fp16_flat_cpu_memory")
_GRADIENTS = (
    "averaged_gradients",
    "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
    "accumulated_grads_in_cpu",
    "temp_grad_buffer_for_cpu_offload",
    "temp_grad_buffer_for_gpu_offload",
)


class ZeroRank(Rank):
    """A rank whose model is a DeepSpeed engine."""

    def micro_step(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """The engine is told which micro-step is the last, as accelerate tells it."""
        self._is_last = is_last
        return nullcontext()

    def backward(self, model: Any, loss: torch.Tensor) -> None:
        """accelerate's DeepSpeedEngineWrapper.backward, but for the step, which is a phase of its own here."""
        model.set_gradient_accumulation_boundary(is_boundary=self._is_last)
        model.backward(loss)

    def step(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Clipping, the optimizer's step, and setting gradients to none."""
        model.step()

    def weights(self, model: Any) -> Storages:
        """The module's, or this rank's part of them, and the copy in fp32 that the optimizer steps."""
        parts = [getattr(parameter, "ds_tensor", None) for parameter in model.module.parameters()]
        found = [*weight_tensors(model.module), *_tensors(model.optimizer, *_MASTERS, *_STEPPED_ON_HOST)]
        return self._on_card("weights", [*found, *[part for part in parts if part is not None]])

    def gradients(self, model: Any) -> Storages:
        """Storages of the gradients on the card: those not averaged yet, and this rank's averaged ones."""
        stepped = [master.grad for master in _tensors(model.optimizer, *_MASTERS) if master.grad is not None]
        kept = [*_tensors(model.optimizer, *_GRADIENTS), *stepped]
        return self._on_card("gradients", [*gradient_tensors(model.module), *kept])

    def state(self, model: Any, optimizer: torch.optim.Optimizer) -> Storages:
        """That of the optimizer inside DeepSpeed's."""
        return self._on_card("optimizer_state", state_tensors(model.optimizer.optimizer))

    def accelerator_options(self) -> dict[str, Any]:
        """The plugin, whose configuration has the stage."""
        from accelerate import DeepSpeedPlugin

        return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=_configuration(self.spec))}


def _configuration(spec: CellSpec) -> dict[str, Any]:
    parts = {"none": (), "optimizer": ("optimizer",), "params": ("optimizer", "param")}[spec.offload]
    offloaded = {f"offload_{part}": {"device": "cpu"} for part in parts}
    return {
        "bf16": {"enabled": spec.autocast == "bf16"},
        "zero_optimization": {"stage": int(spec.sharding[-1])} | offloaded,
        "zero_allow_untested_optimizer": True,  # as Trainer sets it
        "train_micro_batch_size_per_gpu": spec.batch_size,
        "gradient_accumulation_steps": spec.grad_accum,
    }


def _tensors(owner: Any, *names: str) -> Iterator[torch.Tensor]:
    for name in names:
        yield from _in(getattr(owner, name, None))


def _in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _in(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _in(one)


RANK = ZeroRank
