"""The parts of a cell that several GPUs do otherwise: load, prepare, and each part of a step; a single GPU's way.

In: a CellSpec. Out: a model, its optimizer, what runs a step's parts, and the tensors that stay between them.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from vramprobe.spec import CellSpec
from vramprobe.workload.adapter import prepare_model
from vramprobe.workload.loss import fuse_head
from vramprobe.workload.model import build_model, counted
from vramprobe.workload.optimizer import build_optimizer
from vramprobe.workload.storages import Storages, gradient_storages, optimizer_storages, weight_storages
from vramprobe.workload.trainer import LossTrainer, trainer_of


class Stepper:
    """A single GPU: the model is called as it is, under autocast, and its own gradients are stepped."""

    autocasts = False  # in the model itself
    host_tensors_bytes = 0  # of the model, its gradients and the optimizer's state in host memory, at most
    host_pinned_bytes: int | None = None  # what torch's allocator of pinned memory took at most; null: not known
    trainer: LossTrainer | None = None  # what computes the loss, of a prepared model; null: the model itself
    modules_by_card: list[list[str]] | None = None  # where one process has several cards

    def __init__(self, spec: CellSpec) -> None:
        self.spec = spec

    def load(self) -> nn.Module:
        """The base model."""
        return build_model(self.spec)

    def prepare(self, base: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        """(the model as it is called, its optimizer)."""
        model = prepare_model(self.spec, base)
        fuse_head(self.spec, model)
        self.trainer = trainer_of(self.spec, model)
        return model, build_optimizer(self.spec, model)

    def micro_step(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward."""
        return nullcontext()

    def inputs(
        self, model: nn.Module, batch: dict[str, torch.Tensor]
    ) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """Give the inputs of the model in a micro-step, until its backward has ended."""
        return nullcontext(batch)

    def backward(self, model: nn.Module, loss: torch.Tensor) -> None:
        """Run the backward of one micro-step."""
        loss.backward()

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's."""
        optimizer.step()

    def counted(self, model: nn.Module) -> dict[str, int]:
        """Parameters of the model as it was before anything was divided (see model.counted)."""
        return counted(model)

    def weights(self, model: nn.Module) -> Storages:
        """On this card, as gradients and state are."""
        return weight_storages(model)

    def gradients(self, model: nn.Module) -> Storages:
        """After the last backward of a step."""
        return gradient_storages(model)

    def kept_gradients(self, model: nn.Module) -> Storages:
        """Storages of the gradients that are left after ``zero_grad``."""
        return Storages()

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Storages:
        """The optimizer's."""
        return optimizer_storages(optimizer)

    def leave(self) -> None:
        """After the last step."""
