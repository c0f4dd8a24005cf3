"""The models: those that ship under data/, a local config.json, or a config.json from the hub.

In: a name as users write it. Out: a frozen ModelEntry, or an error that says what else there is and what to do. Touches
the network only for a hub id.
"""

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from vramprobe.catalog import hub_config
from vramprobe.catalog.hub_config import ADAPTER_CONFIG, INSTEAD
from vramprobe.catalog.names import match_name, nearest_names
from vramprobe.catalog.profiled import ProfiledModel, list_profiled, reason_against_own_code
from vramprobe.catalog.shipped import csv_rows, data_file
from vramprobe.errors import SpecError, UnknownName

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")
_LOG = logging.getLogger("vramprobe")  # at level INFO: what was taken for what; the command line prints it as notes

#: What a config says about its file and not about the architecture; two copies of one model must resolve alike.
BOOKKEEPING_KEYS = ("_name_or_path", "_commit_hash", "transformers_version")


Origin = Literal["catalog", "path", "hub", "config"]


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One model: its architecture (the config.json) and what is known of it. Counts take tied parameters once."""

    name: str  # slug, absolute path or hub id; find_model(entry.name) finds it again
    hf_id: str | None = None  # null for a local path
    config: dict[str, Any]
    n_params: int | None = None  # verified; null outside the catalog's PARAMETERS.csv
    n_embedding_params: int | None = None
    origin: Origin
    dtype: str | None = None  # of the checkpoint's weights on the hub, in torch's word; null where no source tells it
    quantization: str | None = None  # of the checkpoint, its config's quant_method; null: none
    has_scale_blocks: bool = False  # of that: a block of each weight shares a scale

    @property
    def model_type(self) -> str:
        """transformers' ``model_type``, e.g. ``llama``."""
        return self.config["model_type"]

    @property
    def checkpoint(self) -> str:
        """Argument of ``from_pretrained``: the hub id, or the local folder."""
        if self.hf_id is not None:
            return self.hf_id
        return self.name if Path(self.name).is_dir() else str(Path(self.name).parent)


def find_model(name: str, *, trust_remote_code: bool = False) -> ModelEntry:
    """The model called ``name``: a catalog slug or hub id, a local path, an id of the same shape as one of the catalog
    (names.py; said in a log message), or any other hub id. Only the last asks the network, once.

    Slugs are case-insensitive and win over a local folder of the same name; write ``./gpt2`` for the folder. A config's
    ``auto_map`` (its own Python code) is dropped unless ``trust_remote_code``. Raises UnknownName, SpecError (a config
    that cannot be used) or MissingDependency (a hub that is switched off, not installed, unreachable or closed to you).
    """
    if not name.strip():
        raise UnknownName("model", name, [], f"{INSTEAD}.")
    slug = _slugs_by_name().get(name.lower())
    if slug is not None:
        return _catalog_entry(slug)
    path = Path(name).expanduser()
    if path.exists():
        return _path_entry(path, trust_remote_code)
    if name.endswith(".json") or name.startswith((".", "~", os.sep)):
        raise UnknownName("model", name, [], f"No file or folder is there. {INSTEAD}.")
    if (entry := shipped_model(name)) is not None:
        return entry
    profiled = {other.lower(): one for one in list_profiled() for other in (one.name, one.hf_id, *one.also)}
    if (match := match_name(name, profiled)) is not None:
        raise SpecError(profiled[match.known].why_not_predicted(name))
    if reason := reason_against_own_code(name):
        raise SpecError(reason)
    if _HUB_ID.fullmatch(name):
        file = hub_config.config_file(name, _nearest(name))
        if file.name == ADAPTER_CONFIG:
            return _base_of_adapter(file, name, trust_remote_code)
        config = _usable_config(file.read_text(encoding="utf-8"), f"{name} (hub)", trust_remote_code)
        return _of_config(name, config, "hub", hf_id=name)
    raise UnknownName("model", name, [], f"{INSTEAD}, or a hub id such as org/name.", near=_nearest(name))


def entry_of_config(config: Mapping[str, Any]) -> ModelEntry:
    """The model with this config.json, given as a dict; named after its ``_name_or_path``, else its type.

    Raises SpecError where it has no model_type.
    """
    kept = _of_architecture(config, "the dict of a config", trust_remote_code=False)
    name = str(config.get("_name_or_path") or "").rstrip("/").rsplit("/", 1)[-1]
    return _of_config(name or f"{kept['model_type']}-config", kept, "config")


def with_vision(entry: ModelEntry, given: str, *, is_needed: bool) -> ModelEntry:
    """Find the checkpoint with the vision tower of ``entry``, if ``is_needed`` and one is known; else ``entry`` itself.

    A log message names the one that is not taken, where ``given`` is a hub id: trainers load the tower, too.
    """
    twin = _vision_twin(entry, given)
    if twin is None:
        return entry
    if not is_needed:
        if _HUB_ID.fullmatch(given):
            _LOG.info("%s: the language model alone; with its vision tower, as trainers load it: %s", given, twin.name)
        return entry
    _LOG.info("%s: with its vision tower, which is %s", given, twin.name)
    return _profiled_entry(twin)


def as_served(entry: ModelEntry) -> ModelEntry:
    """Return the checkpoint with the vision tower of ``entry``, which engines load too; ``entry`` where it has none."""
    twin = _vision_twin(entry, entry.name)
    return entry if twin is None else _profiled_entry(twin)


def _vision_twin(entry: ModelEntry, given: str) -> ProfiledModel | None:
    if entry.origin != "catalog" or isinstance(entry.config.get("vision_config"), Mapping):
        return None
    same = _same_shape(given.lower())  # a mirror's id is its own, its shape another's
    names = {entry.name.lower(), (entry.hf_id or "").lower(), same[0] if same else ""}
    return next((one for one in _vision_models().values() if names & {*one.also, one.hf_id.lower()}), None)


def shipped_model(name: str) -> ModelEntry | None:
    """The model of the catalog with this slug or id, or whose shape the name says to share; no network, no files.

    One that is taken for another keeps its own id, so that ``from_pretrained`` gets what was asked for.
    """
    found = _same_shape(name.lower())
    if found is None:
        return None
    slug, note = found
    entry = _catalog_entry(slug) if slug in _model_rows() else _profiled_entry(_vision_models()[slug])
    if not note:
        return entry
    _LOG.info("%s: %s", name, note)
    return replace(entry, name=name, hf_id=name) if _HUB_ID.fullmatch(name) else entry


@cache
def _same_shape(name: str) -> tuple[str, str] | None:
    """(slug, what to say of it; empty where the name is its own), of a lower-case name; None for a stranger."""
    if (slug := _own_names().get(name)) is not None:
        return slug, ""
    known = _own_names() | _other_names()
    if (match := match_name(name, known)) is None:
        return None
    slug, end = known[match.known], match.quantized[1:]
    more = f"; its own quantization ({end}) is counted by serve, and elsewhere where --quant says it" if end else ""
    return slug, f"same shape as {slug}{more}"


@cache
def _vision_models() -> dict[str, ProfiledModel]:
    return {one.name: one for one in list_profiled() if one.has_counted_images}


@cache
def _own_names() -> dict[str, str]:
    """Slug by lower-case slug or id: the catalog's, then those of models with images."""
    vision = {name.lower(): one.name for one in _vision_models().values() for name in (one.name, one.hf_id)}
    return vision | _slugs_by_name()


@cache
def _other_names() -> dict[str, str]:
    """Slug by an id that does not tell whose shape it has."""
    also = {name.lower(): one.name for one in _vision_models().values() for name in one.also}
    rows = {row["hf_id"].lower(): row["slug"] for row in csv_rows("models/SAME_SHAPE.csv")}
    return {name: slug for name, slug in (also | rows).items() if name not in _own_names()}


def _nearest(name: str) -> list[str]:
    """The slugs most like ``name``, those that only a profile can run included."""
    known = _own_names() | {one.name: one.name for one in list_profiled()}
    return list(dict.fromkeys(known[one] for one in nearest_names(name, known)))


def is_slug(name: str) -> bool:
    """Return True if ``name`` is the catalog's own of a model."""
    return name in _model_rows()


def list_models() -> list[ModelEntry]:
    """Every model of the catalog, in the order of PARAMETERS.csv (by family, small before large)."""
    return [_catalog_entry(slug) for slug in _model_rows()]


def list_vision_models() -> list[ModelEntry]:
    """Every model with a vision tower whose images are counted, in the order of MODELS.csv."""
    return [_profiled_entry(model) for model in _vision_models().values()]


@cache
def _model_rows() -> dict[str, dict[str, str]]:
    return {row["slug"]: row for row in csv_rows("models/PARAMETERS.csv")}


@cache
def _config_text(slug: str) -> str:
    return data_file(f"models/{slug}.json").read_text(encoding="utf-8")


@cache
def _slugs_by_name() -> dict[str, str]:
    slugs = {slug.lower(): slug for slug in _model_rows()}
    return slugs | {row["hf_id"].lower(): slug for slug, row in _model_rows().items()}


def _catalog_entry(slug: str) -> ModelEntry:
    row = _model_rows()[slug]
    # Parsed anew each time: a caller may change its dict, and must not change the next caller's.
    config = json.loads(_config_text(slug))
    counts = {name: int(row[name]) for name in ("n_params", "n_embedding_params")}
    entry = _of_config(slug, config, "catalog", hf_id=row["hf_id"], dtype=row["dtype"] or None, **counts)
    config.pop("quantization_config", None)  # of the file: a catalog's architecture is what is built from it
    return entry


def _profiled_entry(model: ProfiledModel) -> ModelEntry:
    config = json.loads(model.config.read_text(encoding="utf-8"))
    entry = _of_config(model.name, config, "catalog", hf_id=model.hf_id, dtype=model.dtype)
    config.pop("quantization_config", None)  # as in _catalog_entry
    return entry


def _path_entry(path: Path, trust_remote_code: bool) -> ModelEntry:
    file = path / "config.json" if path.is_dir() else path
    if file.name == ADAPTER_CONFIG or (not file.exists() and (path / ADAPTER_CONFIG).exists()):
        return _base_of_adapter(file.with_name(ADAPTER_CONFIG), str(path), trust_remote_code)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(f"the folder {path} has no config.json; give a checkpoint folder or a config.json") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"{file} cannot be read as a config.json: {error}; give a checkpoint folder or a .json"
        ) from None
    config = _usable_config(text, str(file), trust_remote_code)
    # A checkpoint's config.json is named by its folder: that is what from_pretrained takes, and it reads better.
    name = os.path.abspath(file.parent if file.name == "config.json" else file)
    return _of_config(name, config, "path")


def _of_config(name: str, config: dict[str, Any], origin: Origin, **known: Any) -> ModelEntry:
    """The entry of a model; ``known``: what else is known of it, by its fields."""
    said = config.get("quantization_config")
    if isinstance(said, dict):
        known |= {"quantization": said.get("quant_method"), "has_scale_blocks": "weight_block_size" in said}
    return ModelEntry(name=name, config=config, origin=origin, **known)


def _base_of_adapter(file: Path, name: str, trust_remote_code: bool) -> ModelEntry:
    """The model that peft's adapter_config.json names. Raises SpecError where it names none."""
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str) or not base or Path(base).resolve() in (file.resolve(), file.resolve().parent):
        raise SpecError(f"{file} names no base_model_name_or_path; give the model that the adapter was trained on")
    _LOG.info("%s: an adapter of %s, whose shape is taken", name, base)
    return find_model(base, trust_remote_code=trust_remote_code)


def _usable_config(text: str, where: str, trust_remote_code: bool) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecError(f"{where} is not valid JSON (line {error.lineno}: {error.msg}); mend or replace it") from None
    return _of_architecture(config, where, trust_remote_code)


def _of_architecture(config: Any, where: str, trust_remote_code: bool) -> dict[str, Any]:
    """Return the keys of a config.json that describe the architecture. Raises SpecError for another dict."""
    if not isinstance(config, Mapping) or not isinstance(config.get("model_type"), str):
        raise SpecError(f"{where} has no model_type, so it is no transformers config.json; add e.g. model_type: llama")
    dropped = BOOKKEEPING_KEYS if trust_remote_code else (*BOOKKEEPING_KEYS, "auto_map")
    return {key: value for key, value in config.items() if key not in dropped}
