"""One of several ranks: its model loaded, divided and stepped by accelerate, in the order of transformers' Trainer.

In: a CellSpec with a sharding, in a process whose environment says which rank it is. Out: a model, its optimizer and a
Stepper for training.py. Has what all kinds of sharding share; each kind has a module of its own beside this one. No
library is patched: what divides the model are accelerate's own options.
"""

import os
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vramprobe.spec import CellSpec
from vramprobe.workload.adapter import prepare_model
from vramprobe.workload.loss import fuse_head
from vramprobe.workload.model import counted
from vramprobe.workload.optimizer import build_optimizer
from vramprobe.workload.stepper import Stepper
from vramprobe.workload.storages import Storages, gradient_tensors, state_tensors, storages_on, weight_tensors
from vramprobe.workload.trainer import accelerator_of, trainer_of

#: How long a collective waits for the other ranks, which may have failed or be slow.
_PATIENCE = timedelta(minutes=10)


class Rank(Stepper):
    """This process's rank, and how its step goes; made once, before anything is on the card.

    ``host_is_filled``: whether what rank 0 loads into host memory is written, as it would be from a checkpoint.
    """

    autocasts = True  # accelerate's own, or none: the gathered weights are cast

    def __init__(self, spec: CellSpec, *, meeting_place: str, host_is_filled: bool) -> None:
        super().__init__(spec)
        self.index, self._host_is_filled = int(os.environ["RANK"]), host_is_filled
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(
            "nccl", init_method=f"file://{meeting_place}", rank=self.index, world_size=spec.num_gpus, timeout=_PATIENCE
        )
        self.accelerator = accelerator_of(spec, **self.accelerator_options())
        self._counted: dict[str, int] = {}
        self._on_host: dict[str, Storages] = {}

    def accelerator_options(self) -> dict[str, Any]:
        """The plugin or the mesh that tells accelerate how to divide the model."""
        raise NotImplementedError

    def prepare(self, base: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        """(the model as it is called, its optimizer)."""
        model = prepare_model(self.spec, base)
        self._counted = counted(model)
        self._on_host.clear()  # what was loaded there has been divided by the time that the next is noted
        fuse_head(self.spec, model)
        self.trainer = trainer_of(self.spec, model, self.accelerator)
        model, optimizer = self.divide(model)
        if self.trainer is not None:
            self.trainer.take(model)
        return model, optimizer

    def divide(self, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model divided among the ranks, and its optimizer."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # weights were raised to fp32: the record's reader knows
            return self.accelerator.prepare(model, build_optimizer(self.spec, model))

    def counted(self, model: nn.Module) -> dict[str, int]:
        """As it was before it was divided."""
        return self._counted

    def micro_step(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward: gradients are reduced in the last micro-step alone."""
        return nullcontext() if is_last else self.accelerator.no_sync(model)

    def backward(self, model: nn.Module, loss: torch.Tensor) -> None:
        """As Trainer calls it."""
        self.accelerator.backward(loss)

    def weights(self, model: nn.Module) -> Storages:
        """On this card; what is on the host is noted beside, as it is of gradients and state."""
        return self._on_card("weights", weight_tensors(model))

    def gradients(self, model: nn.Module) -> Storages:
        """Each parameter's."""
        return self._on_card("gradients", gradient_tensors(model))

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Storages:
        """The optimizer's."""
        return self._on_card("optimizer_state", state_tensors(optimizer))

    def _on_card(self, cause: str, tensors: Iterable[torch.Tensor]) -> Storages:
        """Those on the card; those on the host are noted as what of this cause is there from now on."""
        tensors = list(tensors)
        self._on_host[cause] = storages_on("cpu", tensors)
        there = {address: size for storages in self._on_host.values() for address, size in storages.items()}
        self.host_tensors_bytes = max(self.host_tensors_bytes, sum(there.values()))
        return storages_on("cuda", tensors)

    def leave(self) -> None:
        """End the world, once every rank has come here."""
        if hasattr(torch.cuda, "host_memory_stats"):
            self.host_pinned_bytes = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
        dist.barrier()
        dist.destroy_process_group()
