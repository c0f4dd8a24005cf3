"""The registry: each technique's name, package, switches in the training frameworks, and the run that tries it.

In: data/techniques.toml. Out: Techniques and Bases by id, in the file's order. Adding a technique is one table there.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args

from vramprobe.errors import UnknownName

TechniqueKind = Literal["weights", "training", "optimizer", "adapter", "activations", "trainer"]
KINDS: tuple[str, ...] = get_args(TechniqueKind)
FRAMEWORKS = ("trl", "axolotl", "llamafactory", "torchtune")
#: The arguments of train.py that a technique names by a key of its own, and the frameworks' forms of them.
_FORMS = {
    "optim": {"trl": "--optim {}", "axolotl": "optimizer: {}", "llamafactory": "optim: {}"},
    "adapter": {"trl": "SFTTrainer(peft_config={})"},
    "quantization": {"trl": "from_pretrained(quantization_config={})"},
}

#: Options of a cell that are no technique of their own, as TRL's command line takes them: of any value, and of one.
_TRL_OPTIONS = {
    "batch_size": "--per_device_train_batch_size {}",
    "seq_len": "--max_length {}",
    "optim": "--optim {}",
    "attn": "--attn_implementation {}",
    "lora_r": "--lora_r {}",
    "lora_dropout": "--lora_dropout {}",
    "method": "--use_peft",
}
_TRL_VALUES = {("dtype", "bf16"): "--dtype bfloat16", ("autocast", "bf16"): "--bf16"}


@dataclass(frozen=True, kw_only=True)
class Base:
    """A run without the technique: what it trains, on which GPU, by which command."""

    id: str
    text: str
    gpu: str
    command: str
    cell: dict[str, Any] | None = None  # the same as options of ``predict``, where that knows it
    has: tuple[str, ...] = ()  # techniques that are in it already


@dataclass(frozen=True, kw_only=True)
class Technique:
    """One technique. A framework's switch is "" where it has none, and null where nothing is said of it."""

    id: str
    name: str
    kind: TechniqueKind
    package: str
    docs: str
    base: str = ""  # the Base that it is compared with; "" where it is left out
    optim: str = ""
    adapter: str = ""
    quantization: str = ""
    run: str = ""
    command: str = ""  # in place of the base's command
    trl: str | None = None
    axolotl: str | None = None
    llamafactory: str | None = None
    torchtune: str | None = None
    changes: dict[str, Any] | None = None
    part: str = ""  # what it takes the place of, one at a time; its kind where nothing is said
    left_out: str = ""
    remark: str = ""
    published: str = ""  # a saving that its own documentation claims, in its words
    published_at: str = ""
    difference: str = ""  # why the run here saves another share; "" where that is not known

    def switch(self, framework: str) -> str:
        """Return the setting that switches it on in one of FRAMEWORKS; "" where there is none."""
        said = getattr(self, framework)
        if said is not None:
            return said
        named = ((getattr(self, name), form.get(framework)) for name, form in _FORMS.items())
        return next((form.format(value.rpartition("; ")[2]) for value, form in named if value and form), "")


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((files("vramprobe") / "data" / "techniques.toml").read_text(encoding="utf-8"))


@cache
def bases() -> dict[str, Base]:
    """Every base by id."""
    return {name: Base(id=name, **table | {"has": tuple(table["has"])}) for name, table in _table()["base"].items()}


@cache
def techniques() -> dict[str, Technique]:
    """Every technique by id."""
    return {name: Technique(id=name, **_with_remark(table)) for name, table in _table()["technique"].items()}


def known_changes(of_model: bool) -> list[dict[str, Any]]:
    """The techniques as options of a cell, where they are: of what is trained, or of how its step is computed.

    A trainer is no technique to change to.
    """
    kinds = ("weights", "adapter") if of_model else ("activations", "optimizer", "training")
    return [one.changes for kind in kinds for one in of_kind(kind) if one.changes]


def trl_switches(options: Mapping[str, Any], method: str) -> str:
    """Return options that replace those of a cell of ``method`` as TRL's command line takes them; "" where it has no
    words for one of them, as to leave quantization out.
    """
    if method == "qlora" and "method" in options:
        return ""
    said = [_trl_switch(name, value) for name, value in options.items()]
    return " ".join(said) if all(said) else ""


def _trl_switch(name: str, value: Any) -> str:
    if name in _TRL_OPTIONS:
        return _TRL_OPTIONS[name].format(value)
    if (name, value) in _TRL_VALUES:
        return _TRL_VALUES[name, value]
    with_it = [one for kind in KINDS for one in of_kind(kind) if (one.changes or {}).get(name) == value]
    return next((one.switch("trl") for one in with_it if set(one.changes or {}) <= {name, "method"}), "")


def _with_remark(table: dict[str, Any]) -> dict[str, Any]:
    """The shared remark that it names, in full, and its part."""
    said = table.get("remark", "")
    return {"part": table["kind"]} | table | {"remark": _table()["remark"].get(said, said)}


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """Techniques that cannot be combined with others, each named by its id or its part."""

    techniques: tuple[str, ...]
    others: tuple[str, ...]
    why: str


@cache
def exclusions() -> tuple[Exclusion, ...]:
    """Return the combinations that its package, peft, TRL or transformers refuses, beside the rule of one technique a
    part.
    """
    return tuple(
        Exclusion(techniques=tuple(one["techniques"]), others=tuple(one["others"]), why=one["why"])
        for one in _table()["exclusion"]
    )


def remarks_of(several: Sequence[Technique]) -> dict[str, list[str]]:
    """Each remark on these techniques, and the names of those that it is on."""
    found: dict[str, list[str]] = {}
    for one in several:
        if one.remark:
            found.setdefault(one.remark, []).append(one.name)
    return found


def of_kind(kind: str | None) -> list[Technique]:
    """Those of one kind, or all. Raises UnknownName for a kind that is none."""
    if kind is not None and kind not in KINDS:
        raise UnknownName("kind of technique", kind, KINDS, f"Allowed: {', '.join(KINDS)}.")
    return [one for one in techniques().values() if kind in (None, one.kind)]
