"""A user's words → a CellSpec: what is left out gets the default that the method's users expect.

In: the words a user types (CLI options, YAML keys; the same ones everywhere). Out: a CellSpec that holds the whole
architecture and every default, or a SpecError that says which word or combination cannot be and why. Never touches
torch or a GPU, and the network only through the catalog, for a model that is asked for by its id.
"""

import difflib
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from vramprobe import catalog
from vramprobe.architecture.images import DEFAULT_IMAGE_SIZE
from vramprobe.choices import RECIPES, meant
from vramprobe.errors import SpecError
from vramprobe.optimizers import OPTIMIZER_NAMES
from vramprobe.rules.cell import NO_SDPA
from vramprobe.rules.sharding import HYBRID, SHARD_SIZE
from vramprobe.spec import CellSpec
from vramprobe.trainers import TRL, USUAL_LOOP, config_for
from vramprobe.units import parse_length

Model = TypeVar("Model", bound=BaseModel)


def resolve(
    *,
    model: str | dict[str, Any] | None = None,
    method: str | None = None,
    device: str,
    recipe: str | None = None,
    quant: str | None = None,
    kbit_prep: str | None = None,
    dtype: str | None = None,
    autocast: str | None = None,
    num_layers: int | None = None,
    optim: str | None = None,
    lora_r: int | None = None,
    lora_alpha: float | None = None,
    lora_dropout: float | None = None,
    lora_targets: str | list[str] | None = None,
    lora_dtype: str | None = None,
    attn: str | None = None,
    **rest: Any,
) -> CellSpec:
    """A CellSpec from a user's words; what is left out gets the default that the method's users expect.

    ``model`` is a slug, a path to a ``config.json`` or checkpoint directory, a hub id, or a config.json as a dict.
    ``recipe`` names a row of :data:`RECIPES`. Words are understood in any case and under their usual aliases
    (choices.py), lengths as ``"2k"``. Raises SpecError for a value or combination that cannot be, UnknownName for an
    unknown model.
    """
    if unknown := sorted(set(rest) - set(option_names())):
        raise SpecError(f"unknown option {', '.join(map(repr, unknown))}; allowed: {', '.join(option_names())}")
    needed = {"model": model, "method": method, **{name: rest.get(name) for name in ("batch_size", "seq_len")}}
    if missing := [name for name, value in needed.items() if value is None]:
        raise SpecError(f"{', '.join(missing)}: missing; a cell needs {', '.join(needed)}")
    named = None if isinstance(model, dict) else model
    for name, value, kind in (("model", named, str), ("num_layers", num_layers, int), ("lora_r", lora_r, int)):
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise SpecError(f"{name}: {value!r} given; must be {'text' if kind is str else 'a whole number'}")
    rest = _without_trl({name: understood(name, value) for name, value in rest.items()})
    precision = _recipe_values(
        meant("recipe", recipe),
        **{
            name: meant(name, it) for name, it in (("dtype", dtype), ("autocast", autocast), ("lora_dtype", lora_dtype))
        },
    )
    if isinstance(model, dict):
        entry = catalog.entry_of_config(model)
    else:
        entry = catalog.find_model(model, trust_remote_code=bool(rest.get("trust_remote_code", False)))
        entry = catalog.with_vision(entry, model, is_needed=bool(rest.get("images") or rest.get("freeze_vision")))
    architecture = entry.config if num_layers is None else catalog.cut_depth(entry.config, num_layers)
    architecture = config_for(rest.get("trainer", "sft"), architecture)
    words = {
        "method": method,
        "device": device,
        "optim": OPTIMIZER_NAMES.get(meant("optim", optim), optim),
        "quant": quant,
        "kbit_prep": kbit_prep,
        "attn": attn,
        "lora_r": lora_r,
        "lora_alpha": lora_alpha,
        "lora_dropout": lora_dropout,
        **precision,
        "lora_targets": ",".join(lora_targets) if isinstance(lora_targets, list) else lora_targets,
    }
    words = with_defaults({name: meant(name, value) for name, value in words.items()}, architecture["model_type"])
    if rest.get("sharding") in HYBRID and rest.get("shard_size") is None:
        rest = rest | {"shard_size": SHARD_SIZE}
    if rest.get("images") and rest.get("image_size") is None:
        rest = rest | {"image_size": DEFAULT_IMAGE_SIZE}
    made = {"model": entry.name, "architecture": architecture, "num_layers": num_layers}
    return checked(CellSpec, made | words | rest)


def _without_trl(rest: dict[str, Any]) -> dict[str, Any]:
    """The words with loop trl as those that it stands for."""
    if rest.get("loop") != TRL:
        return rest
    if rest.get("loss") not in (None, "chunked_nll"):
        raise SpecError(f"loop trl means loss=chunked_nll, but loss={rest['loss']} was given; drop one of them")
    named = {} if rest.get("trainer", "sft") != "sft" else {"loss": "chunked_nll"}
    return rest | named | {"loop": USUAL_LOOP}


def understood(name: str, value: Any) -> Any:
    """The value that is meant: a word of choices.py in any spelling, a length such as ``2k``. Raises SpecError."""
    return parse_length(value) if name == "seq_len" and isinstance(value, str) else meant(name, value)


def with_defaults(words: dict[str, Any], model_type: str) -> dict[str, Any]:
    """A cell's words, and for each of them that is None what the method's users expect, if anything."""
    given = {name: value for name, value in words.items() if value is not None}
    method = given.get("method")
    usual = {
        "optim": "adamw_torch_fused",
        "quant": "nf4" if method == "qlora" else "none",
        "kbit_prep": "peft" if method == "qlora" else "none",
        "dtype": "bf16" if given.get("autocast") != "fp16" else "fp32" if method == "full" else "fp16",
        "autocast": "none" if method == "full" else "fp16" if given.get("dtype") == "fp16" else "bf16",
        "attn": "eager" if model_type in NO_SDPA else "sdpa",
    }
    if method in ("lora", "qlora"):
        usual |= {
            "lora_r": 16,
            "lora_alpha": 2.0 * given.get("lora_r", 16),
            "lora_dropout": 0.0,
            "lora_targets": "all-linear",
            "lora_dtype": "bf16" if given.get("kbit_prep") == "trl" else "fp32",
        }
    return usual | given


def option_names() -> list[str]:
    """Every word that :func:`resolve` takes: the keys of a sweep file and, with dashes, the options of the CLI."""
    return sorted((set(CellSpec.model_fields) - {"architecture"}) | {"recipe"})


def checked(kind: type[Model], values: dict[str, Any]) -> Model:
    """``kind(**values)``, with pydantic's complaint turned into a SpecError a person can act on."""
    try:
        return kind(**values)
    except ValidationError as error:
        raise SpecError("; ".join(_plain(problem) for problem in error.errors())) from None


def _plain(problem: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    given = problem["input"]
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "literal_error":
        choices = get_args(CellSpec.model_fields[where].annotation) if where in CellSpec.model_fields else ()
        near = difflib.get_close_matches(str(given).lower(), [str(choice) for choice in choices], n=1)
        message = f"allowed: {problem['ctx']['expected']}" + (f". Nearest: {near[0]}" if near else "")
    shown = "" if isinstance(given, dict | CellSpec) else f": {given!r} given"
    return f"{where}{shown}; {message}" if where else message


def _recipe_values(recipe: str | None, **given: str | None) -> dict[str, str | None]:
    if recipe is None:
        return given
    if recipe not in RECIPES:
        raise SpecError(f"unknown recipe {recipe!r}; allowed: {', '.join(RECIPES)}")
    for key, value in RECIPES[recipe].items():
        if given[key] not in (None, value):
            raise SpecError(
                f"recipe {recipe!r} means {key}={value}, but {key}={given[key]} was given; drop one of them"
            )
        given[key] = value
    return given
