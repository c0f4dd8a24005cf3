"""One of several ranks that share each sequence: torch's context parallelism beside FSDP2, as Trainer asks for it.

In: a CellSpec with a cp_size. Out: a Rank whose micro-batches are this rank's part of each sequence, one from its front
and one from its back, and whose SDPA is ring attention while forward and backward run. Labels are shifted before they
are divided, positions are given, by Trainer's own code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from vramprobe.errors import MissingDependency, VramprobeError
from vramprobe.spec import CellSpec
from vramprobe.workload.sharding.fsdp2 import Fsdp2Rank

Batch = dict[str, torch.Tensor]


class ContextParallelRank(Fsdp2Rank):
    """A rank with a part of every sequence of its batch."""

    def __init__(self, spec: CellSpec, **words: Any) -> None:
        super().__init__(spec, **words)
        self._whole: Batch = {}  # on the host
        self._inputs: Batch = {}  # of the last micro-step, alive as long as Trainer has them

    def prepare(self, base: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        """(the model as it is called, its optimizer)."""
        if not getattr(base, "supports_context_parallel", True):
            raise VramprobeError(
                f"transformers does not run {self.spec.model} by context parallelism (cp_size {self.spec.cp_size}): "
                "not all of its layers have full causal attention; leave cp_size out"
            )
        if not any(name.endswith("self_attn") for name, _ in base.named_modules()):
            raise VramprobeError(
                f"{self.spec.model} has no modules named self_attn, from which accelerate would take the mask that "
                f"ring attention (cp_size {self.spec.cp_size}) has no place for; leave cp_size out"
            )
        return super().prepare(base)

    @contextmanager
    def inputs(self, model: nn.Module, batch: Batch) -> Iterator[Batch]:
        """This rank's part of the batch, while keys and values go around in attention.

        The parts lie where the whole was, as in Trainer, which is sent a batch anew in each step.
        """
        self._whole = self._whole or {name: tensor.cpu() for name, tensor in batch.items()}
        for name, whole in self._whole.items():
            batch[name].resize_(whole.shape).copy_(whole)
        self._inputs.clear()
        self._inputs |= batch
        share, inputs = _trainers_way()(SimpleNamespace(accelerator=self.accelerator), model, self._inputs)
        with share():
            yield inputs


def _trainers_way() -> Any:
    from transformers import Trainer

    try:
        return Trainer._prepare_context_parallel_inputs
    except AttributeError as error:
        raise MissingDependency(
            f"cp_size is run by transformers 5 here, whose Trainer divides sequences: {error}"
        ) from error


RANK = ContextParallelRank
