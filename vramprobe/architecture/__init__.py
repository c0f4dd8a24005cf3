"""Architecture: the dimensions and the parameters of a model, by arithmetic on its config.json.

In: a config.json as a dict. Out: a frozen Architecture with every parameter's name, shape and role, or a VramprobeError
that names the supported families. It stays this side of the torch line, and of the independence line: an account of
what transformers builds that never asks transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vramprobe.architecture import families, mixtures, relatives
from vramprobe.architecture.config import Config
from vramprobe.architecture.families import LLAMA_LIKE
from vramprobe.architecture.parts import (
    Architecture,
    Experts,
    Linear,
    Parameter,
    Role,
    UnsupportedArchitecture,
    Wrapped,
)
from vramprobe.architecture.releases import habits
from vramprobe.architecture.variants import VARIANTS, variant

__all__ = [
    "LLAMA_LIKE",
    "MIXTURES",
    "RELATIVES",
    "SUPPORTED_MODEL_TYPES",
    "VARIANTS",
    "Architecture",
    "Experts",
    "Linear",
    "Parameter",
    "Role",
    "UnsupportedArchitecture",
    "Wrapped",
    "architecture",
]

#: Dense families whose inventories are in relatives.py.
RELATIVES = ("gemma2", "gemma3_text", "phi3", "olmo2", "olmo3", "falcon", "bloom")
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2")
SUPPORTED_MODEL_TYPES = (*LLAMA_LIKE, *VARIANTS, "gpt_neox", "gpt2", "opt", *RELATIVES, *MIXTURES)


def architecture(config: Mapping[str, Any]) -> Architecture:
    """The Architecture of a ``config.json``, as the release of transformers builds it that it names (releases.py).

    Raises UnsupportedArchitecture (a VramprobeError) for a model type without arithmetic here, and VramprobeError for a
    key that is missing or has a value no such model can have.
    """
    return replace(_architecture(config), habits=habits(config))


def _architecture(config: Mapping[str, Any]) -> Architecture:
    model_type = config.get("model_type")
    checked = Config(config)
    if model_type in LLAMA_LIKE:
        return families.llama_like(checked)
    if model_type in VARIANTS:
        return variant(checked)
    if model_type in MIXTURES:
        return mixtures.mixture(checked)
    if model_type in RELATIVES:
        return relatives.of_family(checked)
    match model_type:
        case "gpt_neox":
            return families.gpt_neox(checked)
        case "gpt2":
            return families.gpt2(checked)
        case "opt":
            return families.opt(checked)
    raise UnsupportedArchitecture(
        f"model type {model_type!r} cannot be predicted by this version, which has arithmetic for "
        f"{', '.join(SUPPORTED_MODEL_TYPES)}; it can be measured: vramprobe measure"
    )
