"""A config.json's content → transformers' config object, which knows its family's defaults.

In: the architecture of a CellSpec. Out: the object that models are built from. Builds no model, touches no device.
"""

import copy
from typing import Any

from transformers import AutoConfig

from vramprobe.errors import SpecError


def config_from_dict(architecture: dict[str, Any]) -> Any:
    """transformers' config object for a config.json's content."""
    fields = copy.deepcopy(
        {key: value for key, value in architecture.items() if key != "model_type"}
    )  # it writes in them
    if architecture.get("is_encoder_decoder"):  # checkpoints of encoder-decoders say so, bare architectures may not
        fields = {"decoder_start_token_id": 0, "pad_token_id": 0} | fields
    try:
        return AutoConfig.for_model(architecture["model_type"], **fields)
    except (ValueError, KeyError) as error:
        said = str(error).partition(" Should contain one of ")[0]  # and then names every family there is
        raise SpecError(f"transformers cannot read model_type {architecture['model_type']!r}: {said}") from error
