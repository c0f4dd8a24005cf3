"""One of several ranks: its model loaded, divided and stepped by accelerate, as transformers' Trainer goes about it.

In: a CellSpec with a sharding, in a process whose environment says which rank it is. Out: a model, its optimizer and a
Stepper for training.py. Nothing of the libraries is changed; what is asked of them are accelerate's own answers:

* ddp: the whole model on each card, ``DistributedDataParallel`` with its defaults.
* fsdp1, fsdp1-shard-grad-op: ``fsdp_version 1`` as ``accelerate config`` writes it (units of transformer layers, with
  adapters in units of their own as Trainer asks, original parameters, ``BACKWARD_PRE``), loaded from rank 0's host.
* fsdp, fsdp-shard-grad-op: ``fsdp_version 2``, the same, with and without resharding after forward.
* fsdp1-hybrid: ``HYBRID_SHARD``, whose groups are the machines: each rank sees as many cards as make one.
* fsdp-hybrid: a ``ParallelismConfig`` of ``dp_replicate_size`` groups of ``dp_shard_size`` ranks: a mesh of two
  dimensions.
* fsdp… with a cp_size: ``dp_shard_size`` × ``cp_size`` ranks share the model, and ``cp_size`` each sequence
  (context_parallel.py).
* zero1 … zero3: DeepSpeed's engine (zero_ranks.py).
* offload params: FSDP's shards, their gradients and state stay on the host.

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

from vramprobe.choices import FSDP1, FSDP2, HYBRID
from vramprobe.spec import CellSpec
from vramprobe.workload.adapter import prepare_model
from vramprobe.workload.model import build_model, counted, quantization_config
from vramprobe.workload.optimizer import build_optimizer
from vramprobe.workload.stepper import Stepper
from vramprobe.workload.storages import Storages, gradient_tensors, state_tensors, storages_on, weight_tensors

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
        self._on_host: dict[str, Storages] = {}

    def load(self) -> nn.Module:
        """The base model where the libraries load it: on the host of rank 0 under FSDP, else on each card."""
        spec = self.spec
        if spec.sharding not in (*FSDP1, *FSDP2) or spec.quant != "none":
            return build_model(spec)
        if self.index != 0:
            return build_model(spec, on_host="empty")
        model = build_model(spec, on_host="filled" if self._host_is_filled else "empty")
        self._on_card("weights", [*model.parameters(), *model.buffers()])
        return model

    def prepare(self, base: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        """(the model as it is called, its optimizer)."""
        spec, model = self.spec, prepare_model(self.spec, base)
        self._counted = counted(model)
        self._on_host.clear()  # what was loaded there has been divided by the time that the next is noted
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
        kept = [getattr(parameter, name, None) for parameter in flat for name in ("grad", "_saved_grad_shard")]
        return self._on_card("gradients", [gradient for gradient in kept if gradient is not None])

    def weights(self, model: nn.Module) -> Storages:
        """On this card; what is on the host is noted beside, as it is of gradients and state."""
        return self._on_card("weights", weight_tensors(model))

    def gradients(self, model: nn.Module) -> Storages:
        """Each parameter's."""
        return self._on_card("gradients", gradient_tensors(model))

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Storages:
        """The optimizer's."""
        return self._on_card("optimizer_state", state_tensors(optimizer))

    def _accelerator(self, spec: CellSpec) -> Any:
        from accelerate import Accelerator

        precision = "no" if spec.autocast == "none" else spec.autocast
        return Accelerator(mixed_precision=precision, **_plugin(spec))

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


def _handle(module: Any) -> Any:
    return module._handle


def _plugin(spec: CellSpec) -> dict[str, Any]:
    from accelerate.utils import FullyShardedDataParallelPlugin

    if spec.sharding not in (*FSDP1, *FSDP2):
        return {}
    keeps = spec.sharding.endswith("shard-grad-op")
    words: dict[str, Any] = {"fsdp_version": 2, "reshard_after_forward": not keeps}
    if spec.sharding in FSDP1:
        strategy = "HYBRID_SHARD" if spec.sharding in HYBRID else "SHARD_GRAD_OP" if keeps else "FULL_SHARD"
        words = {
            "fsdp_version": 1, "sharding_strategy": strategy,
            "backward_prefetch": "BACKWARD_PRE", "use_orig_params": True, "sync_module_states": True,
        }  # fmt: skip
    plugin = FullyShardedDataParallelPlugin(
        **words, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=spec.quant == "none",
        state_dict_type="SHARDED_STATE_DICT", cpu_offload=spec.offload == "params",
    )  # fmt: skip
    return {"fsdp_plugin": plugin} | _mesh(spec)


def _mesh(spec: CellSpec) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    if spec.sharding == "fsdp-hybrid" and spec.shard_size is not None:
        sizes = {"dp_replicate_size": spec.num_gpus // spec.shard_size, "dp_shard_size": spec.shard_size}
    if spec.cp_size > 1:
        from accelerate.utils import TorchContextParallelConfig

        sharing = spec.shard_size or spec.num_gpus
        rotation = TorchContextParallelConfig(cp_comm_strategy=spec.cp_rotation)
        sizes |= {"dp_shard_size": sharing // spec.cp_size, "cp_size": spec.cp_size, "cp_handler": rotation}
    if not sizes:
        return {}
    from accelerate.utils import ParallelismConfig

    return {"parallelism_config": ParallelismConfig(**sizes)}


def _divide_adapters_apart(spec: CellSpec, model: nn.Module, accelerator: Any) -> None:
    """What Trainer asks of FSDP1 for adapters (``update_fsdp_plugin_peft``), quantised weights included."""
    from peft.utils.other import fsdp_auto_wrap_policy

    accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    if spec.quant != "none":
        storage = quantization_config(spec).bnb_4bit_quant_storage
        accelerator.state.fsdp_plugin.set_mixed_precision(storage, override=True)
