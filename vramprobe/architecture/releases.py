"""What a release of transformers or bitsandbytes does otherwise than the pinned one, as read in its source.

In: a config.json, which names releases by RELEASE_KEY and QUANTISER_KEY; without these they are the pinned ones. Out:
their Habits, or UnsupportedArchitecture for what was not read. A release is a whole number, 4048 for 4.48.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vramprobe.architecture.parts import PINNED, Habits, Logits, UnsupportedArchitecture

#: transformers' own key of the release that wrote a config.json. Those that are read lose it (catalog/models.py), so
#: here it is what somebody asked for.
RELEASE_KEY = "transformers_version"
QUANTISER_KEY = "bitsandbytes_version"
#: The oldest that was read and run, and the last before 5 (benchmarks/versions/versions.md).
OLDEST, LAST_FOURTH = 4042, 4057
#: The first whose checkpoints do not re-enter autograd unless told to (gradient_checkpointing_enable), and whose
#: experts are two tensors of a layer instead of linear layers.
FIFTH = 5000
#: The first whose layers share one rotary table; before, each keeps its own for all positions.
SHARED_ROTARY = {"llama": 4041, "mistral": 4042, "qwen2": 4045, "mixtral": 4048}
#: The first whose loss is a function apart (loss_utils.ForCausalLMLoss); before, the 16-bit logits were gone by then.
LOSS_APART = {"llama": 4046, "qwen2": 4046, "mixtral": 4046, "granite": 4048, "mistral": 4048}
#: The first that pads the labels instead of cutting the last token off a copy of the logits.
LABELS_PADDED = 4049
#: From the first on and before the second, sdpa is handed copies of its inputs laid out by heads (sdpa_attention.py).
HEADS_COPIED, HEADS_AS_THEY_ARE = 4048, 4056
#: The first that hands sdpa grouped heads as they are (use_gqa_in_sdpa).
HEADS_GROUPED = 4054
#: The first whose flash attention 2 is one function for all models, which takes grouped heads as they are
#: (integrations/flash_attention.py); before, classes of their own repeated them, but for Llama's.
FLASH_APART = 4048
#: The first bitsandbytes whose 4-bit layers compute in the dtype that they are told (modules.py, compute_type_is_set).
COMPUTES_AS_TOLD = 47
#: Those that kept the inputs of 4-bit products (autograd/_functions.py, ctx.tensors).
KEEPING_INPUTS = ("0.43", "0.43.0", "0.43.1")
#: The model types whose older code was read and run.
READ = ("llama", "mistral", "mixtral", "qwen2")


def habits(config: Mapping[str, Any]) -> Habits:
    """Those of the releases that a config.json names; transformers from 5.0 on is taken for the pinned one.

    Raises UnsupportedArchitecture for a model type or a release of which they are not known.
    """
    found, quantiser = _of_transformers(config), config.get(QUANTISER_KEY)
    if quantiser is None:
        return found
    return replace(
        found, computes_in_fp32=release_of(quantiser) < COMPUTES_AS_TOLD, keeps_inputs=quantiser in KEEPING_INPUTS
    )


def _of_transformers(config: Mapping[str, Any]) -> Habits:
    named = config.get(RELEASE_KEY)
    if named is None:
        return PINNED
    release, model_type = release_of(named), config.get("model_type")
    if release >= FIFTH:
        return PINNED
    if release < OLDEST or model_type not in READ:
        raise UnsupportedArchitecture(
            f"the formula engine has no arithmetic for a {model_type} under transformers {named}: before 5.0 it knows "
            f"{', '.join(READ)}, from {in_words(OLDEST)} on; run it under that release: docs/versions.md"
        )
    logits: Logits = "labels padded"
    if release < LABELS_PADDED:
        logits = "shifted copy" if release < LOSS_APART[model_type] else "shifted copy, 16-bit logits kept"
    has_own_tables = release < SHARED_ROTARY[model_type]
    return Habits(
        logits=logits,
        rotary_positions=config["max_position_embeddings"] if has_own_tables else 0,
        repeats_heads=release < HEADS_GROUPED,
        flash_repeats_heads=release < FLASH_APART and model_type != "llama",
        copies_heads=HEADS_COPIED <= release < HEADS_AS_THEY_ARE,
        reenters=True,
        experts_are_linear=True,
    )


def release_of(version: str) -> int:
    """4048 of ``4.48`` or ``4.48.1``."""
    major, minor = version.split(".")[:2]
    return 1000 * int(major) + int(minor)


def in_words(release: int) -> str:
    """``4.48``."""
    return f"{release // 1000}.{release % 1000}"
