"""peft on one device that stands for two: what it makes in the host's memory does not count, what it moves does.

In: a Recorder. Out: a context. peft's own code runs; it is only said where its tensors are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from vramprobe.simulate.fake.recorder import Recorder

_MOVE = "_move_adapter_to_device_of_base_layer"


@contextmanager
def peft_on_a_card(recorder: Recorder) -> Iterator[None]:
    """While open, an adapter's parameters are made and initialised in the host's memory, then moved to the device.

    And the k-bit preparation empties the allocator's cache, as it does where there is a card.
    """
    import peft
    from peft.tuners.lora import layer

    def makes(update_layer: Callable[..., None]) -> Callable[..., None]:
        def update(module: Any, *args: Any, **kwargs: Any) -> None:
            recorder.to_host = True
            try:
                update_layer(module, *args, **kwargs)
            finally:
                recorder.to_host = False

        return update

    def moves(move: Callable[..., None]) -> Callable[..., None]:
        def moved(module: Any, adapter_name: str, *args: Any) -> None:
            recorder.to_host = False
            move(module, adapter_name, *args)  # casts, which makes a tensor of the device; else it finds it in place
            for name in module.adapter_layer_names:
                adapters = getattr(module, name, None)
                if isinstance(adapters, (nn.ModuleDict, nn.ParameterDict)) and adapter_name in adapters:
                    made = adapters[adapter_name]
                    for parameter in [made] if isinstance(made, nn.Parameter) else made.parameters():
                        recorder.move_to_device(parameter)

        return moved

    prepare = peft.prepare_model_for_kbit_training

    def prepare_on_a_card(*args: Any, **kwargs: Any) -> Any:
        with (
            patch.object(torch.cuda, "is_available", lambda: True),
            patch.object(torch.cuda, "empty_cache", recorder.empty_cache),
        ):
            return prepare(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patch.object(peft, "prepare_model_for_kbit_training", prepare_on_a_card))
        for owner in [one for one in vars(layer).values() if isinstance(one, type)]:
            for name, wrapped in (("update_layer", makes), (_MOVE, moves)):
                if name in vars(owner) or (owner is layer.LoraLayer and name == _MOVE):
                    stack.enter_context(patch.object(owner, name, wrapped(getattr(owner, name))))
        yield
