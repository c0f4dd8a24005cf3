"""One of several ranks under DeepSpeed's ZeRO, through accelerate: its engine steps, its optimizer keeps the shards.

In: a CellSpec with sharding zero1, zero2 or zero3. Out: a Rank. The configuration is what ``accelerate config`` asks
for, the stage alone: buckets and prefetching are DeepSpeed's defaults. Its attributes are read, never set.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from vramprobe.spec import CellSpec
from vramprobe.workload.ranks import Rank
from vramprobe.workload.storages import Storages, storages_of


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
        masters = [*_tensors(model.optimizer, "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")]
        on_card = [tensor for tensor in (*parts, *masters) if tensor is not None and tensor.is_cuda]
        return super().weights(model.module) | storages_of(on_card)

    def gradients(self, model: Any) -> Storages:
        """What is averaged, or this rank's part of it, and what is still to be."""
        named = ("averaged_gradients", "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition")
        kept = [tensor for tensor in _tensors(model.optimizer, *named) if tensor.is_cuda]
        return super().gradients(model.module) | storages_of(kept)

    def state(self, model: Any, optimizer: torch.optim.Optimizer) -> Storages:
        """That of the optimizer inside DeepSpeed's, on the card."""
        state = model.optimizer.optimizer.state
        return storages_of(tensor for tensor in _in(list(state.values())) if tensor.is_cuda)

    def _accelerator(self, spec: CellSpec) -> Any:
        from accelerate import Accelerator, DeepSpeedPlugin

        precision = "no" if spec.autocast == "none" else spec.autocast
        plugin = DeepSpeedPlugin(hf_ds_config=_configuration(spec))
        return Accelerator(mixed_precision=precision, deepspeed_plugin=plugin)


def _configuration(spec: CellSpec) -> dict[str, Any]:
    return {
        "bf16": {"enabled": spec.autocast == "bf16"},
        "zero_optimization": {"stage": int(spec.sharding[-1])},
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
