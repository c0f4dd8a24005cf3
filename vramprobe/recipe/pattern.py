"""Find which layers of a model are alike, and which shallow models show what one more of them adds.

In: a config.json as a dict. Out: a LayerPattern: layers before the pattern, its period, the depths to record. Knows no
torch: what transformers fills in, the caller has put into the config.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from vramprobe.catalog import depth_of, text_config

#: Periods that each shallow run has at least: the last layers have neighbors unlike the others'.
_LEAST_LAYERS = 2
#: Lists of a config that say of each layer what kind it is.
_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "hybrid_override_pattern")


@dataclass(frozen=True)
class LayerPattern:
    """``num_first`` layers of their own, then layers that repeat with ``period``."""

    num_layers: int
    num_first: int
    period: int

    def kind(self, layer: int) -> int:
        """A number that layers of one kind share, whatever the depth."""
        return layer if layer < self.num_first else self.num_first + (layer - self.num_first) % self.period

    @property
    def shallowest(self) -> int:
        """Layers of the shallowest run: whole periods and the remainder that the model's own depth leaves."""
        rest = (self.num_layers - self.num_first) % self.period
        return self.num_first + rest + self.period * -(-_LEAST_LAYERS // self.period)

    def depths(self, number: int, *, deeper: int = 0, num_shapes: int = 0, at_any_cost: bool = False) -> list[int]:
        """The ``number`` shallowest depths that show the pattern, or those so many periods ``deeper``; empty where the
        whole model costs no more, unless ``at_any_cost``, or has no more layers. ``num_shapes``: further batch shapes,
        each recorded at the second depth."""
        depths = [self.shallowest + times * self.period for times in range(deeper, deeper + number)]
        is_cheaper = at_any_cost or sum(depths) + num_shapes * depths[1] < (1 + num_shapes) * self.num_layers
        return depths if is_cheaper and depths[-1] < self.num_layers else []


def layer_pattern(config: dict[str, Any]) -> LayerPattern | None:
    """Return the pattern that the fewest layers show, or None where a config's layers do not repeat."""
    kinds = layer_kinds(config)
    if not kinds or text_config(config).get("num_kv_shared_layers"):
        return None
    found = [
        LayerPattern(len(kinds), num_first, period)
        for period in range(1, len(kinds) // 2 + 1)
        if (num_first := _num_before(kinds, period)) + 2 * period <= len(kinds)
    ]
    return min(found, key=lambda pattern: pattern.num_first + 2 * pattern.period, default=None)


def layer_kinds(config: dict[str, Any]) -> list[Hashable]:
    """Return what the config says of each layer; layers that it says the same of are of one kind.

    The first ones of Qwen 3's text take features of its tower, one each (``deepstack_visual_indexes``).
    """
    num_fed = len((config.get("vision_config") or {}).get("deepstack_visual_indexes") or ())
    return [(_kind(text_config(config), layer), layer < num_fed) for layer in range(depth_of(config) or 0)]


def _num_before(kinds: Sequence[Hashable], period: int) -> int:
    """Layers before the part, to the end, in which each is like the one ``period`` before."""
    start = len(kinds) - period
    while start > 0 and kinds[start - 1] == kinds[start - 1 + period]:
        start -= 1
    return start


def _kind(text: dict[str, Any], layer: int) -> Hashable:
    lists = [text[name][layer] for name in _KINDS if isinstance(text.get(name), list | str) and len(text[name]) > layer]
    step = text.get("decoder_sparse_step") or text.get("interleave_moe_layer_step") or 1
    lists.append((layer + 1) % step)
    lists.append(layer < (text.get("first_k_dense_replace") or text.get("num_dense_layers") or 0))
    lists += [layer in (text.get(name) or ()) for name in ("mlp_only_layers", "cross_attention_layers")]
    if text.get("use_sliding_window"):
        lists.append(layer >= text.get("max_window_layers", 0))
    return tuple(lists)
