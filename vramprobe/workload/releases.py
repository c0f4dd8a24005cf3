"""Names and defaults that releases of transformers have otherwise, so that one workload runs under 4 and 5.

In: the transformers that is installed, a model. Out: functions and arguments as that release has them. What a layer or
a loss does is that release's own code, and is not here.
"""

from inspect import signature
from typing import Any

import transformers
from packaging.version import Version

try:
    from transformers.initialization import no_init_weights
except ImportError:  # before 5
    from transformers.modeling_utils import no_init_weights

__all__ = [
    "CALL_OPTIONS", "DTYPE", "HAS_MASK", "adapters_in_fp32", "enable_checkpointing", "no_init_weights",
    "quantize_linears", "vocab_size",
]  # fmt: skip

_RELEASE = Version(transformers.__version__)
_IS_FOURTH = Version("5.0.0.dev0") > _RELEASE
#: The argument of ``from_config`` and ``from_pretrained``.
DTYPE = "dtype" if Version("4.56") <= _RELEASE else "torch_dtype"
#: What a model is called with beside its batch: 5's Trainer switches the cache off, 4's leaves it as the config has it.
CALL_OPTIONS: dict[str, Any] = {} if _IS_FOURTH else {"use_cache": False}
#: Rows that are not padded have a mask of ones, as every collator makes it: without one, 4.53 to 4.57 look for packed
#: rows, and hand sdpa a mask of all pairs of tokens.
HAS_MASK = _IS_FOURTH


def enable_checkpointing(model: Any, *, trains_inputs: bool) -> None:
    """Recompute each layer in backward as the release does by default: 5 without re-entering autograd, 4 by that, for
    which a layer's input needs a gradient even where nothing before it is trained (``trains_inputs`` is false)."""
    if hasattr(model, "activation_checkpointing_enable"):  # transformers renames the call on its way to version 6
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": _IS_FOURTH})
    if _IS_FOURTH and not trains_inputs:
        model.enable_input_require_grads()


def adapters_in_fp32(are: bool) -> dict[str, bool]:
    """Arguments of ``get_peft_model`` for adapters that are made in fp32; before peft 0.12 they have the model's."""
    from peft import get_peft_model

    name = "autocast_adapter_dtype"
    return {name: are} if name in signature(get_peft_model).parameters else {}


def vocab_size(model: Any) -> int:
    """Tokens that a model's text has; ``get_text_config`` is there from 4.45 on."""
    config = model.config
    return (config.get_text_config() if hasattr(config, "get_text_config") else config).vocab_size


def quantize_linears(model: Any, config: Any) -> None:
    """Put bitsandbytes' layers in place of those that a quantized ``from_pretrained`` would replace."""
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    kept = model._keep_in_fp32_modules
    if hasattr(HfQuantizer, "get_modules_to_not_convert"):
        left = HfQuantizer.get_modules_to_not_convert(model, None, kept)
    else:
        from transformers.integrations import get_keys_to_not_convert

        left = [*get_keys_to_not_convert(model), *(kept or [])]
    replace_with_bnb_linear(model, modules_to_not_convert=left, quantization_config=config)
