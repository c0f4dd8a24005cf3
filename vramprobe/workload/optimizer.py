"""CellSpec → the optimizer that transformers' Trainer would make for the same name.

Class and arguments follow ``transformers.trainer_optimizer``; the learning rate is tiny because only memory matters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vramprobe.spec import CellSpec

_LEARNING_RATE = 1e-6


def build_optimizer(spec: CellSpec, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over the trained parameters; its state does not exist before the first step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    match spec.optim:
        case "adamw_torch":
            return torch.optim.AdamW(trained, lr=_LEARNING_RATE)
        case "adamw_torch_fused":
            return torch.optim.AdamW(trained, lr=_LEARNING_RATE, fused=True)
        case "adafactor":
            from transformers import Adafactor

            return Adafactor(trained, lr=_LEARNING_RATE, scale_parameter=False, relative_step=False)
        case "sgd":
            return torch.optim.SGD(trained, lr=_LEARNING_RATE)
        case "adagrad":
            return torch.optim.Adagrad(trained, lr=_LEARNING_RATE)
        case "rmsprop":
            return torch.optim.RMSprop(trained, lr=_LEARNING_RATE)
        case name:
            return _bitsandbytes(name, trained, model)


def _bitsandbytes(name: str, trained: list[nn.Parameter], model: nn.Module) -> torch.optim.Optimizer:
    import bitsandbytes as bnb

    kind = bnb.optim.Lion if name.startswith("lion") else bnb.optim.AdamW
    options: dict[str, Any] = {"optim_bits": 8 if name.endswith("8bit") else 32, "is_paged": name.startswith("paged_")}
    if options["optim_bits"] == 8:
        # Trainer.create_optimizer does the same: trained embeddings keep 32-bit state under an 8-bit optimizer.
        manager = bnb.optim.GlobalOptimManager.get_instance()
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.weight.requires_grad:
                manager.register_module_override(module, "weight", {"optim_bits": 32})
    return kind(trained, lr=_LEARNING_RATE, **options)
