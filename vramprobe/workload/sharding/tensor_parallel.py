"""One of several ranks that share every layer: transformers' ``tp_plan="auto"``, trained as Trainer trains it.

In: a CellSpec of sharding tp. Out: a Rank whose model transformers itself has divided, by the plan of the model's own
config: each weight of the plan is this rank's part of a DTensor, the others (norms) are whole on every rank. All ranks
have the same batch. accelerate adds autocast and fp32 outputs alone; gradients of what is whole are averaged by
Trainer's own hooks.
"""

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers.initialization import no_init_weights, no_tie_weights

from vramprobe.errors import MissingDependency, VramprobeError
from vramprobe.spec import CellSpec
from vramprobe.workload.model import build_skeleton, materialise
from vramprobe.workload.optimizer import build_optimizer
from vramprobe.workload.sharding.rank import Rank


class TensorParallelRank(Rank):
    """A rank that has a part of every layer of the plan."""

    def load(self) -> nn.Module:
        """The base model, each rank's part made on its card."""
        with no_init_weights():
            model = _divided(self.spec)
            model.tie_weights()
            materialise(self.spec, model, lambda name: f"cuda:{torch.cuda.current_device()}")
        return model.train()

    def divide(self, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Divided since it was loaded; its optimizer is made in the order of Trainer's ``_prepare_for_training``."""
        from transformers import Trainer

        optimizer = _by_mesh(build_optimizer(self.spec, model))
        model = self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        optimizer = self.accelerator.prepare(optimizer)
        Trainer._sync_replicated_trainable_parameters(SimpleNamespace(accelerator=self.accelerator), model)
        return model, optimizer

    def micro_step(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """Gradients of what is whole are averaged in the last one, and no others are reduced."""
        self.accelerator.gradient_state._set_sync_gradients(is_last)
        return nullcontext()

    def accelerator_options(self) -> dict[str, Any]:
        """The mesh, with the sizes that Trainer gives it."""
        from accelerate.utils import ParallelismConfig

        return {"parallelism_config": ParallelismConfig(tp_size=self.spec.num_gpus, dp_shard_size=1)}


def _divided(spec: CellSpec) -> Any:
    """The model without weights, each of them with its place among the ranks, as ``from_pretrained`` divides it."""
    try:
        from transformers.distributed import DistributedConfig
        from transformers.distributed.sharding_utils import _dtensor_from_local_like  # noqa: F401
    except ImportError as error:
        raise MissingDependency(f"sharding tp is divided by transformers 5.17 or later here: {error}") from error
    with no_tie_weights():  # a tied head is divided by itself, and tied to its part as the weights are there
        model = build_skeleton(spec)
    config = DistributedConfig(tp_plan="auto", tp_size=spec.num_gpus)
    config, _, meshes = model.prepare_distribute_model(config)
    model.config.distributed_config = config
    try:
        return model.maybe_distribute_model(model, config, meshes)
    except ValueError as error:
        raise VramprobeError(
            f"transformers does not divide {spec.model} among {spec.num_gpus} ranks: {error}"
        ) from error


def _by_mesh(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Groups that one fused kernel can step, as Trainer makes them: parts of DTensors, and what is whole."""
    (group,) = optimizer.param_groups
    by_mesh = defaultdict(list)
    for parameter in group["params"]:
        by_mesh[getattr(parameter, "device_mesh", None)].append(parameter)
    optimizer.param_groups.clear()
    for parameters in by_mesh.values():
        optimizer.add_param_group({**group, "params": parameters})
    return optimizer


RANK = TensorParallelRank
