"""Layers that are not alike: those that look through a window, those without experts, and hybrids' mixers.

In: a checked config.json and a family's rule of data/parameters.toml. Out: the window in tokens, and for each layer if
it looks through it; the numbers of the dense layers; what mixes the tokens of each layer.
"""

from collections.abc import Sequence
from typing import Any

from vramprobe.architecture.config import Config

#: A family's rule → after how many layers one sees everything.
_PERIODS = {"all but each second": 2, "all but each fourth": 4, "all but each sixth": 6}


def window_and_layers(config: Config, rule: list[Any], num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """Return the window, None without one, and which layers look through it: empty where all do or none.

    ``rule``: a name, and the window that transformers takes where the key is absent, 0 for none.
    """
    name, default = rule[0], (rule[1] or None) if len(rule) > 1 else None
    match name:
        case "all":
            return config.absent_or_size("sliding_window", default), ()
        case "if use_sliding_window":
            window = config.absent_or_size("sliding_window", default)
            return window if config.flag("use_sliding_window", False) else None, ()
        case "qwen":
            return _qwen(config, default, num_layers)
        case "chunks":
            turned = _turned_layers(config, num_layers)
            return config.size("attention_chunk_size", default) if any(turned) else None, turned
        case "in a mask":
            sliding = _sliding(config, 2, num_layers)
            _window(config, sliding, default)
            return None, sliding
        case "none":
            return None, ()
    sliding = _sliding(config, _PERIODS[name], num_layers)
    return _window(config, sliding, default), sliding


def _sliding(config: Config, period: int, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer if it looks through the window: as layer_types says, else all but each period's last."""
    kinds = _named_kinds(config, "layer_types", ("sliding_attention", "full_attention"), num_layers)
    if kinds is None:
        if config.model_type == "gemma3_text":
            period = config.size("sliding_window_pattern", period)
        return tuple((index + 1) % period != 0 for index in range(num_layers))
    return tuple(kind == "sliding_attention" for kind in kinds)


def _window(config: Config, sliding: tuple[bool, ...], default: int | None) -> int | None:
    """The window that these layers look through, None where none does."""
    window = config.absent_or_size("sliding_window", default)
    if any(sliding) and window is None:
        raise config.wrong("sliding_window", "a whole number of 1 or more: some of its layers are sliding_attention")
    return window if any(sliding) else None


def _qwen(config: Config, default: int | None, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """A window counts where use_sliding_window is true, for the layers of layer_types, else those after the first
    max_window_layers.
    """
    window = config.absent_or_size("sliding_window", default)
    window = window if config.flag("use_sliding_window", False) else None
    num_full = config.count("max_window_layers", 28)
    if config.values.get("layer_types") is not None:
        sliding = _sliding(config, 1, num_layers)
        if window is None and any(sliding):
            raise config.wrong("layer_types", "full_attention alone unless use_sliding_window is true and there is one")
    else:
        sliding = tuple(window is not None and index >= num_full for index in range(num_layers))
    return (window, sliding) if any(sliding) else (None, ())


def _turned_layers(config: Config, num_layers: int) -> tuple[bool, ...]:
    """Llama 4's layers that turn queries and keys; they, and no others, attend within chunks."""
    period, given = config.size("no_rope_layer_interval", 4), config.values.get("no_rope_layers")
    turned = [(layer + 1) % period != 0 for layer in range(num_layers)]
    if given:
        if not isinstance(given, list) or len(given) < num_layers or not all(one in (0, 1) for one in given):
            raise config.wrong(
                "no_rope_layers", f"a list of {num_layers} numbers, 1 for a layer with rotations, else 0"
            )
        turned = [bool(one) for one in given[:num_layers]]
    kinds = config.values.get("layer_types")
    if kinds is not None and kinds != ["chunked_attention" if one else "full_attention" for one in turned]:
        raise config.not_counted("layer_types other than chunked_attention where no_rope_layers has 1")
    return tuple(turned)


def dense_layers(config: Config, rule: list[Any], num_layers: int) -> tuple[int, ...]:
    """Return the numbers of the layers without experts, where others have them."""
    if not rule:
        return ()
    name, default = rule
    if name == "mlp_layer_types":
        kinds = _named_kinds(config, name, ("dense", "sparse"), num_layers) or ["dense"] * default
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    if name != "all but moe_layers":
        return tuple(range(min(config.count(name, default), num_layers)))
    # Those that moe_layers leaves out, or of each so many all but the last.
    sparse, step = config.values.get("moe_layers"), config.size("interleave_moe_layer_step", default)
    if sparse is None:
        sparse = list(range(step - 1, num_layers, step))
    if not isinstance(sparse, list) or not all(isinstance(one, int) and 0 <= one < num_layers for one in sparse):
        raise config.wrong("moe_layers", f"a list of layers from 0 to {num_layers - 1}, or null")
    return tuple(layer for layer in range(num_layers) if layer not in sparse)


def mixers(config: Config, rule: list[Any], num_layers: int) -> tuple[str, ...]:
    """Return what mixes the tokens of each layer, empty where all do alike. ``rule``: the kinds that layer_types may
    name; then, where not all layers are of the first without it, a key that says after how many of these one of the
    second stands, and its default.
    """
    if not rule:
        return ()
    first, second, *period = rule
    if (named := _named_kinds(config, "layer_types", (first, second), num_layers)) is not None:
        return tuple(named)
    every = config.size(*period) if period else num_layers + 1
    return tuple(first if (layer + 1) % every else second for layer in range(num_layers))


#: Names of kinds in older files → as transformers 5 writes them.
_OLDER_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def _named_kinds(config: Config, key: str, allowed: Sequence[str], num_layers: int) -> list[str] | None:
    """The kinds that a config lists, one for each layer, None where it lists none."""
    kinds = config.values.get(key)
    if kinds is None:
        return None
    if isinstance(kinds, list):
        kinds = [_OLDER_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in allowed for kind in kinds):
        raise config.wrong(key, f"a list of {num_layers} names, each one of {', '.join(allowed)}")
    return kinds
