"""A rank under FSDP1 (``fsdp_version 1``): FULL_SHARD, SHARD_GRAD_OP or HYBRID_SHARD, as ``accelerate config`` has it.

In: a CellSpec of sharding fsdp1, fsdp1-shard-grad-op or fsdp1-hybrid. Out: a Rank. It keeps original parameters,
prefetches with ``BACKWARD_PRE`` and puts adapters in units of their own, as Trainer does. The groups of HYBRID_SHARD
are machines: each rank sees as many cards as make one group. Mixed precision is accelerate's autocast in forward.
"""

import warnings
from typing import Any

import torch
from torch import nn

from vramprobe.rules.sharding import HYBRID
from vramprobe.spec import CellSpec
from vramprobe.workload.model import quantization_config
from vramprobe.workload.optimizer import build_optimizer
from vramprobe.workload.sharding.fsdp import FsdpRank
from vramprobe.workload.storages import Storages


class Fsdp1Rank(FsdpRank):
    """A rank whose units are flat parameters."""

    def accelerator_options(self) -> dict[str, Any]:
        """The plugin, with the strategy's name."""
        sharding = str(self.spec.sharding)
        keeps = sharding.endswith("shard-grad-op")
        strategy = "HYBRID_SHARD" if sharding in HYBRID else "SHARD_GRAD_OP" if keeps else "FULL_SHARD"
        plugin = self.plugin(
            fsdp_version=1,
            sharding_strategy=strategy,
            backward_prefetch="BACKWARD_PRE",
            use_orig_params=True,
            sync_module_states=True,
        )
        return {"fsdp_plugin": plugin}

    def divide(self, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model is divided first: the optimizer steps its flat parameters."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP1 is deprecated, weights were raised: the record's reader knows
            if self.spec.method != "full":
                _divide_adapters_apart(self.spec, model, self.accelerator)
            model = self.accelerator.prepare(model)
            return model, self.accelerator.prepare(build_optimizer(self.spec, model))

    def kept_gradients(self, model: nn.Module) -> Storages:
        """Storages of the gradients that ``zero_grad`` leaves: flat ones stay until the root's next forward finds them
        unwanted.
        """
        from torch.distributed.fsdp import FullyShardedDataParallel

        flat = [handle.flat_param for handle in map(_handle, FullyShardedDataParallel.fsdp_modules(model)) if handle]
        kept = [getattr(parameter, name, None) for parameter in flat for name in ("grad", "_saved_grad_shard")]
        return self._on_card("gradients", [gradient for gradient in kept if gradient is not None])


def _handle(module: Any) -> Any:
    return module._handle


def _divide_adapters_apart(spec: CellSpec, model: nn.Module, accelerator: Any) -> None:
    """Set what Trainer sets on FSDP1 for adapters (``update_fsdp_plugin_peft``), quantized weights included."""
    from peft.utils.other import fsdp_auto_wrap_policy

    accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    if spec.quant != "none":
        storage = quantization_config(spec).bnb_4bit_quant_storage
        accelerator.state.fsdp_plugin.set_mixed_precision(storage, override=True)


RANK = Fsdp1Rank
