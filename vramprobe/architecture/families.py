"""Families of models: every parameter's name, shape and role, by the rows of data/parameters.toml.

In: a checked config.json. Out: its Architecture. Names and shapes follow transformers 5, where experts are one
parameter of three dimensions, and so is what peft makes of the targets that transformers 4 had in their place
(``peft/utils/transformers_weight_conversion.py``). Never imports torch.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from vramprobe.architecture.config import Config
from vramprobe.architecture.expressions import expression
from vramprobe.architecture.parts import Architecture, Parameter, Wrapped
from vramprobe.architecture.windows import dense_layers, mixers, window_and_layers

_TABLE = Path(__file__).parents[1] / "data" / "parameters.toml"
#: A key whose value counts the parameters of a name.
_COUNTED = re.compile(r"\{(?!layer\})(\w+)\}")
_NAME = re.compile(r"[a-z_][\w.]*")
_SHARED = ("defaults", "nulls", "names")


class Row(NamedTuple):
    """A line of ``parameters``, its parts as they are written there."""

    only: str
    role: str
    name: str
    widths: tuple[str, ...]
    bias: str
    condition: str


@cache
def families() -> dict[str, dict[str, Any]]:
    """Return each model type's table as it stands in the file."""
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


@cache
def _family(model_type: str) -> dict[str, Any]:
    """Return a model type's table, with what it has of the one that it is like."""
    own = families()[model_type]
    base = _family(own["like"]) if "like" in own else {}
    whole = base | own | {key: base.get(key, {}) | own.get(key, {}) for key in _SHARED}
    return whole | {"rows": tuple(_rows(whole))}


def _rows(family: dict[str, Any]) -> Iterator[Row]:
    for line in family["parameters"].strip().splitlines():
        role, name, widths, *others = re.split(r"\s{2,}", line)
        only, _, role = role.rpartition(" ")
        more = dict(one.split(" ", 1) for one in others)
        yield Row(only, role, _whole(name, family), tuple(widths.split(", ")), more.get("bias", ""), more.get("if", ""))


def _whole(name: str, family: dict[str, Any]) -> str:
    return family["layer"] + name if name.startswith(".") else name


class Values:
    """Values of a family's expressions in one config.json; a name is one of the family's own, else a key."""

    def __init__(self, config: Config, model_type: str) -> None:
        self.config, self.family, self._known = config, _family(model_type), dict[str, Any]()

    def __call__(self, value: Any) -> Any:
        """Evaluate a name or another text of the table; any other value is itself."""
        if not isinstance(value, str):
            return value
        if value not in self._known:
            self._known[value] = self._name(value) if _NAME.fullmatch(value) else expression(value).value(self)
        return self._known[value]

    def _name(self, name: str) -> Any:
        own = self.family["names"].get(name, name)
        return self._key(name) if own == name else self(own)

    def _key(self, name: str) -> Any:
        """A key's value, checked as the kind of value that its default is."""
        part, _, key = name.rpartition(".")
        config = self.config.part(part) if part else self.config
        if name in self.family["nulls"] and config.values.get(key, "") is None:
            return self(self.family["nulls"][name])
        default = self(self.family["defaults"].get(name))
        if name in self.family.get("zeros", ()):
            return config.count(key, default)
        match default:
            case bool(default):
                return config.flag(key, default)
            case float(default):
                return config.rate(key, default)
            case list(default):
                return config.length(key, default)
            case 0:
                return config.count(key, 0)
            case default:
                return config.size(key, default)


def architecture_of(config: Config) -> Architecture:
    """Return the architecture of a config of one of :func:`families`. Raises as architecture.architecture does."""
    model_type = str(config.model_type)
    values = Values(config, model_type)
    if "text" in (family := values.family):
        return _with_tower(config, model_type)
    _check(values)
    num_layers, head_size, value_size = (values(name) for name in ("num_layers", "head_size", "value_size"))
    window, sliding = window_and_layers(config, family.get("window", ["none"]), num_layers)
    dense = dense_layers(config, family.get("dense_layers", []), num_layers)
    kinds = mixers(config, family.get("mixers", []), num_layers)
    return Architecture(
        model_type=model_type,
        num_layers=num_layers,
        num_heads=values("num_heads"),
        num_kv_heads=values("num_kv_heads"),
        head_size=head_size,
        vocab_size=values("vocab_size"),
        tied=values("tie_word_embeddings"),
        rotary_size=values("rotary_size"),
        value_size=None if value_size == head_size else value_size,
        sliding_window=window,
        sliding_layers=sliding,
        own_linears=family.get("own_linears", False),
        scales_embedding=family.get("scales_embedding", False),
        num_rotary_tables=max(len(set(sliding)), 1) if family.get("has_rotary_tables_by_kind") else 1,
        dense_layers=dense,
        mixers=kinds if len(set(kinds)) > 1 else (),
        **{name: values(family["names"].get(name, 0)) for name in ("convolved_size", "recurrent_size")},
        wrapped=tuple(_wrapped(values)),
        parameters=tuple(_parameters(values, _kinds_that_differ(dense, kinds))),
    )


def _check(values: Values) -> None:
    """Raise for a config that no such model can have, or that is not counted here."""
    config, family = values.config, values.family
    for key, value in family.get("requires", {}).items():
        config.require(key, value)
    pairs = list(family.get("multiples", []))
    if config.values.get("head_dim") is None:
        pairs += family.get("without_head_dim", [])
    for key, other in pairs:
        config.require_multiple(key, other, values(key), values(other))


def _kinds_that_differ(dense: Sequence[int], kinds: Sequence[str]) -> dict[str, bool]:
    """Kind of layer → whether other layers are of another; a kind that no layer is of is left out."""
    differing = {"sparse": bool(dense)} | ({"dense": True} if dense else {})
    return differing | {kind: len(set(kinds)) > 1 for kind in kinds}


def _parameters(values: Values, kinds: Mapping[str, bool]) -> Iterator[Parameter]:
    """Yield every parameter, in the order of the rows; ``kinds``: see :func:`_kinds_that_differ`."""
    for row in values.family["rows"]:
        if (row.condition and not values(row.condition)) or (row.only and row.only not in kinds):
            continue
        shape = tuple(values(width) for width in row.widths)
        for name in _names(row.name, values):
            for end, role, widths in _tensors(row.role, shape, bool(row.bias) and values(row.bias)):
                whole = name + end
                module = whole.split(".")[-2]
                yield Parameter(
                    whole, module, widths, role, "{layer}" in whole, row.only if kinds.get(row.only) else ""
                )


def _names(name: str, values: Values) -> list[str]:
    """The names that a row's stands for: one, or as many as a key of the config says."""
    counted = _COUNTED.search(name)
    return [name.replace(counted[0], str(index)) for index in range(values(counted[1]))] if counted else [name]


def _tensors(role: str, shape: tuple[int, ...], has_bias: bool) -> list[tuple[str, Any, tuple[int, ...]]]:
    """(End of the name, role, shape) of a row's parameters."""
    match role:
        case "linear":
            return [(".weight", role, shape), *([(".bias", "bias", shape[:1])] if has_bias else [])]
        case "conv1d":
            return [(".weight", "linear", shape), (".bias", "bias", shape[1:])]
        case "layer_norm":
            return [(".weight", "norm", shape), (".bias", "norm", shape)]
        case "embedding" | "head" | "norm":
            return [(".weight", role, shape)]
    return [("", role, shape)]


def _wrapped(values: Values) -> Iterator[Wrapped]:
    for line in values.family.get("wrapped", "").strip().splitlines():
        name, targets, *sizes = re.split(r"\s{2,}", line)
        yield Wrapped(_whole(name, values.family), tuple(targets.split(", ")), *map(values, sizes))


def _with_tower(config: Config, model_type: str) -> Architecture:
    """The language model's architecture, with the parameters of its vision tower behind the embedding's."""
    vision = Values(config.part("vision_config"), model_type)
    text = architecture_of(Config(_text_values(config, vision.family["text"])))
    if "deepstack_visual_indexes" in vision.family["defaults"] and vision("deepstack_visual_indexes") > text.num_layers:
        raise config.not_counted("fewer layers than its tower has features for them")
    first, *others = text.parameters
    return replace(text, parameters=(first, *_parameters(vision, {}), *others))


def _text_values(config: Config, model_type: str) -> dict[str, Any]:
    """The language model's own keys: under text_config, or beside the tower's as Qwen 2.5's files have them."""
    own = {key: value for key, value in config.values.items() if key not in ("text_config", "vision_config")}
    text = {**own, **(config.values.get("text_config") or {})}
    tied = config.values.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return {**text, "model_type": model_type, "tie_word_embeddings": tied}
