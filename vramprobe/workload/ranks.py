"""One of several ranks: its model loaded, divided and stepped by accelerate, as transformers' Trainer goes about it.

In: a CellSpec with a sharding, in a process whose environment says which rank it is. Out: a model, its optimizer and a
Stepper for training.py. Nothing of the libraries is changed; what is asked of them are accelerate's own answers:

* ddp: the whole model on each card, ``DistributedDataParallel`` with its defaults.
* fsdp1, fsdp1-shard-grad-op: ``fsdp_version 1`` as ``accelerate config`` writes it (units of transformer layers, with
  adapters in units of their own as Trainer asks, original parameters, ``BACKWARD_PRE``), loaded from rank 0's host.
* fsdp, fsdp-shard-grad-op: ``fsdp_version 2``, the same, with and without resharding after forward.
* zero1 … zero3: DeepSpeed's engine (deepspeed_engine.py).

Mixed precision is accelerate's: autocast in forward for ddp and FSDP1, the gathered weights' dtype under FSDP.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vramprobe.choices import FSDP1, FSDP2
from vramprobe.spec import CellSpec
from vramprobe.workload.adapter import prepare_model
from vramprobe.workload.model import build_model, counted, quantization_config
from vramprobe.workload.optimizer import build_optimizer
from vramprobe.workload.stepper import Stepper
from vramprobe.workload.storages import Storages, host_storages, storages_of

#: Of a collective that the others do not come to: they have failed, or are slow.
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
            "nccl", init_method=f"file://{meeting_place}", rank=self.index, world_size=spec.num_gpus,
            timeout=_PATIENCE,
        )  # fmt: skip
        self.accelerator = self._accelerator(spec)
        self._counted: dict[str, int] = {}

    def load(self) -> nn.Module:
        """The base model where the libraries load it: on the host of rank 0 under FSDP, else on each card."""
        spec = self.spec
        if spec.sharding not in (*FSDP1, *FSDP2) or spec.quant != "none":
            return build_model(spec)
        if self.index != 0:
            return build_model(spec, on_host="empty")
        model = build_model(spec, on_host="filled" if self._host_is_filled else "empty")
        self._note_host([*model.parameters(), *model.buffers()])
        return model

    def prepare(self, base: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        """(the model as it is called, its optimizer)."""
        spec, model = self.spec, prepare_model(self.spec, base)
        self._counted = counted(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that FSDP1 retires, that weights were raised: the record's reader knows
            if spec.sharding not in FSDP1:
                return self.accelerator.prepare(model, build_optimizer(spec, model))
            if spec.method != "full":
                _divide_adapters_apart(spec, model, self.accelerator)
            model = self.accelerator.prepare(model)
            return model, self.accelerator.prepare(build_optimizer(spec, model))

    def counted(self, model: nn.Module) -> dict[str, int]:
        """As it was before it was divided."""
        return self._counted

    def micro_step(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward: gradients are reduced in the last micro-step alone."""
        return nullcontext() if is_last else self.accelerator.no_sync(model)

    def backward(self, model: nn.Module, loss: torch.Tensor) -> None:
        """As Trainer calls it."""
        self.accelerator.backward(loss)

    def kept_gradients(self, model: nn.Module) -> Storages:
        """What ``zero_grad`` leaves: FSDP1's flat gradients stay until its root's next forward finds them unwanted."""
        if self.spec.sharding not in FSDP1:
            return Storages()
        from torch.distributed.fsdp import FullyShardedDataParallel

        flat = [handle.flat_param for handle in map(_handle, FullyShardedDataParallel.fsdp_modules(model)) if handle]
        return storages_of(
            gradient
            for parameter in flat
            for gradient in (parameter.grad, getattr(parameter, "_saved_grad_shard", None))
            if gradient is not None
        )

    def _accelerator(self, spec: CellSpec) -> Any:
        from accelerate import Accelerator

        precision = "no" if spec.autocast == "none" else spec.autocast
        return Accelerator(mixed_precision=precision, **_plugin(spec))

    def _note_host(self, tensors: Iterable[torch.Tensor]) -> None:
        self.host_tensors_bytes = max(self.host_tensors_bytes, sum(host_storages(tensors).values()))

    def leave(self) -> None:
        """End the world, once every rank has come here."""
        dist.barrier()
        dist.destroy_process_group()


def _handle(module: Any) -> Any:
    return module._handle


def _plugin(spec: CellSpec) -> dict[str, Any]:
    from accelerate.utils import FullyShardedDataParallelPlugin

    if spec.sharding not in (*FSDP1, *FSDP2):
        return {}
    keeps = spec.sharding.endswith("shard-grad-op")
    words: dict[str, Any] = {"fsdp_version": 2, "reshard_after_forward": not keeps}
    if spec.sharding in FSDP1:
        words = {
            "fsdp_version": 1, "sharding_strategy": "SHARD_GRAD_OP" if keeps else "FULL_SHARD",
            "backward_prefetch": "BACKWARD_PRE", "use_orig_params": True, "sync_module_states": True,
        }  # fmt: skip
    plugin = FullyShardedDataParallelPlugin(
        **words, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=spec.quant == "none",
        state_dict_type="SHARDED_STATE_DICT",
    )  # fmt: skip
    return {"fsdp_plugin": plugin}


def _divide_adapters_apart(spec: CellSpec, model: nn.Module, accelerator: Any) -> None:
    """What Trainer asks of FSDP1 for adapters (``update_fsdp_plugin_peft``), quantised weights included."""
    from peft.utils.other import fsdp_auto_wrap_policy

    accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    if spec.quant != "none":
        storage = quantization_config(spec).bnb_4bit_quant_storage
        accelerator.state.fsdp_plugin.set_mixed_precision(storage, override=True)
