"""CellSpec → the optimizer that transformers' Trainer would make for the same name.

Class and arguments stand in its row (optimizers.py) and follow ``transformers.trainer_optimizer``; the learning rate is
tiny because only memory matters.
"""

from importlib import import_module

import torch
from torch import nn

from vramprobe.optimizers import OPTIMIZERS
from vramprobe.spec import CellSpec

_LEARNING_RATE = 1e-6


def build_optimizer(spec: CellSpec, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over the trained parameters; its state does not exist before the first step."""
    row = OPTIMIZERS[spec.optim]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    module, _, kind = row.made_by.rpartition(".")
    if row.state == "8bit":
        _keep_embeddings_in_32_bits(model)
    return getattr(import_module(module), kind)(trained, lr=_LEARNING_RATE, **(row.options or {}))


def _keep_embeddings_in_32_bits(model: nn.Module) -> None:
    """Trained embeddings keep 32-bit state under an 8-bit optimizer, as under ``Trainer.create_optimizer``."""
    import bitsandbytes as bnb

    manager = bnb.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight.requires_grad:
            manager.register_module_override(module, "weight", {"optim_bits": 32})
