"""A rank under either version of FSDP: rank 0 loads the model on its host, and accelerate sends and divides it.

In: a CellSpec of a sharding whose name begins with fsdp. Out: a Rank with what fsdp1.py and fsdp2.py share: the
options that ``accelerate config`` writes (units of transformer layers, loading from rank 0's host, sharded state), and
``offload params``, which keeps the shards, their gradients and the optimizer's state on the host.
"""

import os
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from vramprobe.workload.model import build_model
from vramprobe.workload.sharding.rank import Rank


class FsdpRank(Rank):
    """A rank that holds a shard of every parameter."""

    def load(self) -> nn.Module:
        """The base model on the host of rank 0; quantized, on each card."""
        spec = self.spec
        if spec.quant != "none":
            return build_model(spec)
        if self.index != 0:
            return build_model(spec, on_host="empty")
        model = build_model(spec, on_host="filled" if self._host_is_filled else "empty")
        self._on_card("weights", [*model.parameters(), *model.buffers()])
        return model

    def prepare(self, base: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        """(the model as it is called, its optimizer)."""
        named = list(getattr(base, "_no_split_modules", None) or ())
        there = {type(module).__name__ for module in base.modules()}
        units = [name for name in named if name in there]
        if units != named:
            # A text model names its vision tower's layers, too (Qwen3.5), and accelerate and peft end there unless the
            # user says which are units.
            os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(units)
            self.accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = units
        return super().prepare(base)

    def plugin(self, **version: Any) -> Any:
        """accelerate's plugin for FSDP, with the options of one version; before 1.6 there is but the first, unnamed."""
        from accelerate.utils import FullyShardedDataParallelPlugin

        names = {field.name for field in fields(FullyShardedDataParallelPlugin)}
        if version.get("fsdp_version") == 1 and "fsdp_version" not in names:
            del version["fsdp_version"]
        return FullyShardedDataParallelPlugin(
            **version,
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=self.spec.quant == "none",
            state_dict_type="SHARDED_STATE_DICT",
            cpu_offload=self.spec.offload == "params",
        )
