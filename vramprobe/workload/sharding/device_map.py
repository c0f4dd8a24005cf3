"""One process, its layers on several cards: transformers' ``device_map="auto"``, trained as Trainer trains it.

In: a CellSpec of sharding device-map, where torch sees its cards. Out: a model, its optimizer and a Stepper. Which
layer lies where is transformers' own answer (``_get_device_map``, which balances), and so are the hooks that move
activations between cards; the outputs come back to the first card, which has the batch. ``Accelerator`` wraps it, as
Trainer has it do: autocast in the model, fp32 outputs.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from vramprobe.errors import MissingDependency, VramprobeError
from vramprobe.spec import CellSpec
from vramprobe.workload.adapter import prepare_model
from vramprobe.workload.model import build_skeleton, materialise, quantization_config
from vramprobe.workload.optimizer import build_optimizer
from vramprobe.workload.releases import no_init_weights
from vramprobe.workload.stepper import Stepper
from vramprobe.workload.trainer import accelerator_of


class SpreadStepper(Stepper):
    """The layers of one model on several cards."""

    autocasts = True  # accelerate's own

    def load(self) -> nn.Module:
        """The base model, each part of it on its card, with the hooks that move what goes from one to the next."""
        with no_init_weights():
            model, self.modules_by_card = _spread(self.spec)
        return model.train()

    def prepare(self, base: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        """(the model as it is called, its optimizer)."""
        model = prepare_model(self.spec, base)
        return accelerator_of(self.spec).prepare(model, build_optimizer(self.spec, model))


def _spread(spec: CellSpec) -> tuple[PreTrainedModel, list[list[str]]]:
    """(the model, the keys of its device map card by card)."""
    try:
        from transformers.integrations.accelerate import (
            _get_device_map,
            accelerate_dispatch,
            expand_device_map,
            get_max_memory,
        )
    except ImportError as error:
        raise MissingDependency(f"sharding device-map is placed by transformers 5 here: {error}") from error
    model = build_skeleton(spec)
    quantizer = _quantizer(spec)
    free = get_max_memory()  # of every card that is visible; "auto" would take them all
    taken = {device: size for device, size in free.items() if not isinstance(device, int) or device < spec.num_gpus}
    device_map = _get_device_map(model, "auto", taken, quantizer)
    modules_by_card = _on_cards(device_map, spec.num_gpus)
    names = [name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())]
    devices = expand_device_map(device_map, names)
    materialise(spec, model, lambda name: f"cuda:{devices[name.removeprefix('.')]}")
    accelerate_dispatch(model, quantizer, device_map, None, None, False)
    return model, modules_by_card


def _quantizer(spec: CellSpec) -> Any:
    from transformers.quantizers.auto import AutoHfQuantizer

    return AutoHfQuantizer.from_config(quantization_config(spec), pre_quantized=False) if spec.quant != "none" else None


def _on_cards(device_map: dict[str, int | str], num_gpus: int) -> list[list[str]]:
    """The keys of a device map card by card. Raises VramprobeError where it needs the host, or a single card."""
    beside = [name for name, device in device_map.items() if not isinstance(device, int)]
    if beside:
        raise VramprobeError(
            f'the weights do not fit on {num_gpus} cards: device_map="auto" leaves {beside[0]} and {len(beside) - 1} '
            f"more of {len(device_map)} parts to the host, where nothing can be trained; use more cards, larger ones, "
            "or qlora"
        )
    if len(set(device_map.values())) == 1:
        raise VramprobeError(
            'device_map="auto" puts the whole of this model on one card, and nothing on the others; leave num_gpus and '
            "sharding out"
        )
    return [[name for name, device in device_map.items() if device == card] for card in range(num_gpus)]
