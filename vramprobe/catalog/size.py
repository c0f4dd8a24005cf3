"""The size of a model: its parameters, for any name and config that a cell may have.

In: a model's name and its config.json as a dict. Out: a number of parameters, of an unknown architecture the usual one.
"""

from contextlib import suppress
from typing import Any

from vramprobe.catalog.depth import depth_of
from vramprobe.catalog.models import find_model
from vramprobe.errors import VramprobeError


def num_params(model: str, config: dict[str, Any]) -> int:
    """Parameters of ``model`` with ``config``, tied ones once: by arithmetic, else the catalog's, scaled to the depth.

    A stranger to both counts as the usual 12 × width² per layer with an untied head.
    """
    from vramprobe.architecture import UnsupportedArchitecture, architecture  # not for --help

    with suppress(UnsupportedArchitecture):
        return architecture(config).num_params
    depth, entry = depth_of(config) or 1, None
    with suppress(VramprobeError):  # of a config that was given as a dict
        entry = find_model(model)
    if entry is not None and entry.n_params is not None:
        embedding = entry.n_embedding_params or 0
        return embedding + (entry.n_params - embedding) * depth // (depth_of(entry.config) or depth)
    text = {**config, **config.get("text_config", {})}
    width = next((text[key] for key in ("hidden_size", "n_embd", "d_model") if isinstance(text.get(key), int)), 1024)
    return 12 * width**2 * depth + 2 * width * text.get("vocab_size", 0)
