"""TRL's trainers on a cell's own model and batch: the loss is computed by the trainer's own method, with its reference.

In: a prepared model. Out: the same model with TRL's head, and what computes the loss of a batch. No dataset, tokenizer
or loop: the trainer is made without its ``__init__`` and given what the loss reads, as ``__init__`` sets it. TRL's
Triton kernels need a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from vramprobe.spec import CellSpec
from vramprobe.trainers import TRAINERS
from vramprobe.workload.loss import base_of, load_trl
from vramprobe.workload.model import build_model
from vramprobe.workload.storages import Storages, weight_storages

if TYPE_CHECKING:
    from accelerate import Accelerator

_PRECISION = {"none": "no", "bf16": "bf16", "fp16": "fp16"}


class Trainer(Protocol):
    """What computes a cell's loss in place of its model."""

    reference: nn.Module | None  # a second model; null where the trained one stands for it, or none is needed

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of a micro-batch."""


def trainer_of(spec: CellSpec, model: nn.Module) -> Trainer | None:
    """The cell's trainer; None where the model computes its own loss."""
    if not TRAINERS[spec.trainer].trl:
        return None
    load_trl(spec)
    return _MADE[spec.trainer](spec, model)


def reference_storages(trainer: Trainer | None) -> Storages:
    """The weights of the second model."""
    return Storages() if trainer is None or trainer.reference is None else weight_storages(trainer.reference)


class Dpo:
    """``DPOTrainer`` with its own defaults; the reference is the model without its adapters, else a second model."""

    def __init__(self, spec: CellSpec, model: nn.Module) -> None:
        from trl import DPOTrainer
        from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

        accelerator = _accelerator(spec)
        self.reference = build_model(spec).eval() if spec.method == "full" else None
        for one in (model, self.reference):
            if one is not None:
                disable_dropout_in_model(one)
        add_fused_lm_head(base_of(model), outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
        if self.reference is not None:
            add_fused_lm_head(self.reference)
            accelerator.prepare_model(self.reference, device_placement=False, evaluation_mode=True)
        self._model = accelerator.prepare_model(model, device_placement=False)
        text_config = model.config.get_text_config()  # of a mixture, whose router adds to the loss
        has_router = hasattr(text_config, "output_router_logits")
        router_coef = getattr(text_config, "router_aux_loss_coef", 0.0) if has_router else 0.0
        self._trainer = DPOTrainer.__new__(DPOTrainer)
        vars(self._trainer).update(
            model=model,
            ref_model=self.reference,
            accelerator=accelerator,
            args=SimpleNamespace(gradient_checkpointing_kwargs={"use_reentrant": False}),
            beta=0.1,
            precompute_ref_logps=False,
            loss_types=["sigmoid"],
            loss_weights=[1.0],
            ld_alpha=None,
            f_divergence_type="reverse_kl",
            label_smoothing=0.0,
            use_weighting=False,
            aux_loss_enabled=bool(router_coef),
            router_aux_loss_coef=router_coef,
            _metrics=defaultdict(lambda: defaultdict(list)),
            _total_train_tokens=0,
            _tp_size=1,
        )

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._trainer.compute_loss(self._model, batch)


_MADE: dict[str, Any] = {"dpo": Dpo}


def _accelerator(spec: CellSpec) -> Accelerator:
    """transformers' Trainer has one, which puts each model's forward under autocast."""
    from accelerate import Accelerator

    return Accelerator(mixed_precision=_PRECISION[spec.autocast])
