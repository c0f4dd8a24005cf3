"""TRL's trainers on a cell's own model and batch: the loss is computed by the trainer's own method, with its reference.

In: a prepared model. Out: the same model with TRL's head, and what computes the loss of a batch. No dataset, tokenizer
or loop: the trainer is made without its ``__init__`` and given what the loss reads, as ``__init__`` sets it. TRL's
Triton kernels need a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import nn

from vramprobe.spec import CellSpec
from vramprobe.trainers import TRAINERS
from vramprobe.workload.loss import base_of, load_trl, trainer_class
from vramprobe.workload.model import build_model
from vramprobe.workload.storages import Storages, weight_storages

if TYPE_CHECKING:
    from accelerate import Accelerator


class LossTrainer(Protocol):
    """Interface of an object that computes a cell's loss in place of its model."""

    reference: nn.Module | None  # a second model; null where the trained one stands for it, or none is needed

    def take(self, model: nn.Module) -> None:
        """The trained model as it is called from now on: wrapped or divided."""

    def score(self, batch: dict[str, torch.Tensor]) -> None:
        """Compute what the loss of a micro-batch compares with, where the trainer's row says so (scores_first)."""

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Compute the loss of a micro-batch."""


def trainer_of(spec: CellSpec, model: nn.Module, accelerator: Accelerator | None = None) -> LossTrainer | None:
    """The cell's trainer, made before anything wraps or divides the model; None where the model computes its own loss.

    ``accelerator``: a rank's, which prepares the model afterwards; on one GPU there is none yet, and the model is
    called as a new one prepares it.
    """
    if not TRAINERS[spec.trainer].trl:
        return None
    load_trl(spec)
    if accelerator is not None:
        return _MADE[spec.trainer](spec, model, accelerator)
    alone = accelerator_of(spec)
    trainer: LossTrainer = _MADE[spec.trainer](spec, model, alone)
    trainer.take(alone.prepare_model(model, device_placement=False))
    return trainer


def reference_storages(trainer: LossTrainer | None) -> Storages:
    """The weights of the second model."""
    return Storages() if trainer is None or trainer.reference is None else weight_storages(trainer.reference)


class _OfTrl:
    """TRL's own trainer, made without its ``__init__`` and given what its loss reads."""

    reference: nn.Module | None = None

    def __init__(self, spec: CellSpec, model: nn.Module, accelerator: Accelerator, **reads: Any) -> None:
        kind = trainer_class(spec)
        self._trainer = kind.__new__(kind)
        vars(self._trainer).update(model=model, accelerator=accelerator, **reads)

    def take(self, model: nn.Module) -> None:
        self._model = model
        if self._trainer.accelerator.distributed_type == "FSDP":  # as transformers' Trainer hands it on
            self._trainer.model = model

    def score(self, batch: dict[str, torch.Tensor]) -> None:
        """Nothing, but for a trainer that says so."""

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._trainer.compute_loss(self._model, dict(batch))


class _Preference(_OfTrl):
    """A trainer with its own defaults; the reference is the model without its adapters, else a second model."""

    outputs: ClassVar[tuple[str, ...]]  # that the fused head computes for the trainer's metrics
    settings: ClassVar[dict[str, Any]]  # of its configuration, as the loss reads them

    def __init__(self, spec: CellSpec, model: nn.Module, accelerator: Accelerator) -> None:
        from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

        disable_dropout_in_model(model)
        add_fused_lm_head(base_of(model), outputs=self.outputs)
        self.reference = _reference(spec, accelerator) if spec.method == "full" else None
        text_config = model.config.get_text_config()  # of a mixture, whose router adds to the loss
        has_router = hasattr(text_config, "output_router_logits")
        router_coef = getattr(text_config, "router_aux_loss_coef", 0.0) if has_router else 0.0
        super().__init__(
            spec,
            model,
            accelerator,
            ref_model=self.reference,
            args=SimpleNamespace(gradient_checkpointing_kwargs={"use_reentrant": False}),
            beta=0.1,
            precompute_ref_logps=False,
            aux_loss_enabled=bool(router_coef),
            router_aux_loss_coef=router_coef,
            _metrics=defaultdict(lambda: defaultdict(list)),
            _total_train_tokens=0,
            _tp_size=1,
            **self.settings,
        )


class Dpo(_Preference):
    """``DPOTrainer``."""

    outputs = ("log_probs", "entropy", "mean_logits", "is_top1")
    settings: ClassVar[dict[str, Any]] = {
        "loss_types": ["sigmoid"],
        "loss_weights": [1.0],
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "label_smoothing": 0.0,
        "use_weighting": False,
    }


class Kto(_Preference):
    """``KTOTrainer``; of every two completions one is desirable."""

    outputs = ("log_probs", "entropy", "mean_logits")
    settings: ClassVar[dict[str, Any]] = {
        "loss_type": "kto",
        "calculate_KL": True,
        "desirable_weight": 1.0,
        "undesirable_weight": 1.0,
    }

    def __init__(self, spec: CellSpec, model: nn.Module, accelerator: Accelerator) -> None:
        super().__init__(spec, model, accelerator)
        self._label = torch.tensor([row % 2 == 0 for row in range(spec.num_rows)], device=spec.device)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().loss(batch | {"label": self._label})


class Orpo(_OfTrl):
    """``ORPOTrainer``, from all logits and without a reference."""

    def __init__(self, spec: CellSpec, model: nn.Module, accelerator: Accelerator) -> None:
        from trl.trainer.utils import disable_dropout_in_model

        disable_dropout_in_model(model)
        self._num_pairs = spec.batch_size
        super().__init__(
            spec,
            model,
            accelerator,
            args=SimpleNamespace(device=accelerator.device),
            beta=0.1,
            is_encoder_decoder=False,
            padding_value=0,
            aux_loss_enabled=getattr(model.config, "output_router_logits", False),
            aux_loss_coef=getattr(model.config, "router_aux_loss_coef", 0.0),
            _peft_has_been_casted_to_bf16=spec.quant != "none" and spec.autocast == "bf16",
            _stored_metrics=defaultdict(lambda: defaultdict(list)),
        )

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        halves = {"chosen": slice(self._num_pairs), "rejected": slice(self._num_pairs, None)}
        return super().loss(
            {f"{kind}_{name}": its[rows] for kind, rows in halves.items() for name, its in batch.items()}
        )


class Reward(_OfTrl):
    """``RewardTrainer``: a head of one output, and no reference."""

    def __init__(self, spec: CellSpec, model: nn.Module, accelerator: Accelerator) -> None:
        from trl.trainer.utils import disable_dropout_in_model

        disable_dropout_in_model(model)
        model.config.get_text_config().pad_token_id = 0  # the last token that is another is scored
        super().__init__(
            spec,
            model,
            accelerator,
            args=SimpleNamespace(center_rewards_coefficient=None),
            _metrics=defaultdict(lambda: defaultdict(list)),
            _total_train_tokens=0,
            _tp_size=1,
        )


class GroupRelative(_OfTrl):
    """``GRPOTrainer`` beside vLLM, with its own defaults and no reference: log-probabilities of the completions by the
    model as it generated them, then the loss. A row's first token is its prompt, all others are the completion."""

    def __init__(self, spec: CellSpec, model: nn.Module, accelerator: Accelerator) -> None:
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(base_of(model), outputs=("log_probs", "entropy"))
        super().__init__(
            spec,
            model,
            accelerator,
            args=SimpleNamespace(delta=None, steps_per_generation=spec.grad_accum),
            beta=0.0,
            loss_type="dapo",
            importance_sampling_level="token",
            epsilon_low=0.2,
            epsilon_high=0.2,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            current_gradient_accumulation_steps=spec.grad_accum,
            aux_loss_enabled=False,
            _entropy_bonus_enabled=False,
            _metrics={"train": defaultdict(list)},
        )
        self._old: torch.Tensor | None = None
        self._advantages = torch.ones(spec.num_rows, device=spec.device)

    def score(self, batch: dict[str, torch.Tensor]) -> None:
        ids, mask, length = batch["input_ids"], batch["attention_mask"], batch["input_ids"].shape[1] - 1
        with torch.no_grad():
            self._old, *_ = self._trainer._get_per_token_logps_and_entropies(self._model, ids, mask, length, len(ids))

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ids, mask, old, self._old = batch["input_ids"], batch["attention_mask"], self._old, None
        assert old is not None
        return super().loss(
            {
                "prompt_ids": ids[:, :1],
                "prompt_mask": mask[:, :1],
                "completion_ids": ids[:, 1:],
                "completion_mask": batch["completion_mask"][:, 1:],
                "advantages": self._advantages,
                "old_per_token_logps": old,
                "importance_sampling_ratio": torch.ones_like(old),
                "num_items_in_batch": batch["completion_mask"].sum(),
            }
        )


def _reference(spec: CellSpec, accelerator: Accelerator) -> nn.Module:
    """A second model, as DPOTrainer and KTOTrainer load and prepare it: under FSDP divided as one unit, under ZeRO-3
    divided, and else whole on each rank."""
    from trl.models import prepare_deepspeed, prepare_fsdp
    from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

    kind = accelerator.distributed_type
    model = build_model(spec, on_host=None if kind == "NO" else "empty").eval()
    disable_dropout_in_model(model)
    add_fused_lm_head(model)
    if kind == "DEEPSPEED":
        return prepare_deepspeed(model, accelerator)
    if kind == "FSDP":
        return prepare_fsdp(model, accelerator)
    return accelerator.prepare_model(model, device_placement=kind != "NO", evaluation_mode=True)


_MADE: dict[str, Any] = {"dpo": Dpo, "kto": Kto, "orpo": Orpo, "reward": Reward, "grpo": GroupRelative}


def accelerator_of(spec: CellSpec, **options: Any) -> Accelerator:
    """transformers' Trainer has one, which puts each model's forward under autocast."""
    from accelerate import Accelerator

    return Accelerator(mixed_precision="no" if spec.autocast == "none" else spec.autocast, **options)
