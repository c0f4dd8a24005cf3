"""A sweep with tiny stand-ins on the same axes: ``python benchmarks/gpu/tiny.py SWEEP.yaml FOLDER`` prints its path.

Every model becomes one of its family of some 100,000 parameters, lengths are divided by 64, and what needs a GPU
(limited cards, allocator settings, paging) is left out. It tries a stage's plumbing on a CPU in a minute; its numbers
say nothing of the models whose names it bears.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from vramprobe import catalog

#: A length of a cell or of a table of positions is divided by this, and is not below the second.
LENGTHS_DIVIDED_BY, SHORTEST = 64, 8
NUM_LAYERS = 5  # deeper than any cut of the sweeps
_WIDTH, _HEAD_SIZE = 64, 16
#: Key of a config.json → its tiny value, where the family has the key and says something there.
_SIZES = {
    "hidden_size": _WIDTH,
    "n_embd": _WIDTH,
    "intermediate_size": 2 * _WIDTH,
    "ffn_dim": 2 * _WIDTH,
    "moe_intermediate_size": _WIDTH,
    "word_embed_proj_dim": _WIDTH,
    "head_dim": _HEAD_SIZE,
    "num_attention_heads": _WIDTH // _HEAD_SIZE,
    "n_head": _WIDTH // _HEAD_SIZE,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_GPU_ONLY = ("device", "limit_vram", "alloc_conf")
_VOCABULARY, _VOCABULARY_STEP = 512, 8


def tiny_config(slug: str) -> dict[str, Any]:
    """The catalog model, tiny; no two have the same vocabulary, so that no two are the same cell."""
    config = catalog.cut_depth(catalog.find_model(slug).config, NUM_LAYERS)
    config |= {key: size for key, size in _SIZES.items() if config.get(key)}
    config |= {key: _short(config[key]) for key in ("n_positions", "n_ctx") if key in config}
    number = [entry.name for entry in catalog.list_models()].index(slug)
    return config | {"vocab_size": _VOCABULARY + _VOCABULARY_STEP * number, "bos_token_id": 0, "eos_token_id": 0}


def tiny_sweep(content: dict[str, Any], models: Path) -> dict[str, Any]:
    """The sweep's content with every block tiny; the models' configs are written under ``models``."""
    defaults = content.get("defaults", {})
    return content | {"defaults": _block(defaults, models), "cells": [_block(one, models) for one in content["cells"]]}


def _block(block: dict[str, Any], models: Path) -> dict[str, Any]:
    found = {}
    for key, value in block.items():
        if key == "exclude":
            found[key] = [_block(match, models) for match in value]
        elif key not in _GPU_ONLY:
            several = [_value(key, one, models) for one in (value if isinstance(value, list) else [value])]
            found[key] = list(dict.fromkeys(several)) if isinstance(value, list) else several[0]
    return found


def _value(key: str, value: Any, models: Path) -> Any:
    match key:
        case "model":
            return _written(value, models)
        case "seq_len":
            return _short(value)
        case "optim":
            return value.replace("paged_adamw_", "adamw_bnb_")
    return value


def _short(length: int) -> int:
    return max(length // LENGTHS_DIVIDED_BY, SHORTEST)


def _written(slug: str, models: Path) -> str:
    path = models / slug / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tiny_config(slug), indent=1))
    return str(path.parent)


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    target = folder / source.name
    content = tiny_sweep(yaml.safe_load(source.read_text()), folder / "models")
    target.write_text(yaml.safe_dump(content, sort_keys=False))
    print(target)


if __name__ == "__main__":
    main()
