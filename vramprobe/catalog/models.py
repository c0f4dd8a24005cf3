"""The models: those that ship under data/, a local config.json, or a config.json from the hub.

In: a name as users write it. Out: a frozen ModelEntry, or an error that says what else there is and what to do. Touches
the network only for a hub id.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from vramprobe.catalog.profiled import ProfiledModel, find_profiled
from vramprobe.catalog.shipped import csv_rows, data_file
from vramprobe.errors import MissingDependency, SpecError, UnknownName

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")
_INSTEAD = "Use a slug from `vramprobe models`, or the path of a config.json or of a checkpoint folder"

#: What a config says about its file and not about the architecture; two copies of one model must resolve alike.
BOOKKEEPING_KEYS = ("_name_or_path", "_commit_hash", "transformers_version")


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One model: its architecture (the config.json) and what is known of it. Counts take tied parameters once."""

    name: str  # slug, absolute path or hub id; find_model(entry.name) finds it again
    hf_id: str | None  # null for a local path
    config: dict[str, Any]
    n_params: int | None  # verified; null outside the catalog's PARAMETERS.csv
    n_embedding_params: int | None
    origin: Literal["catalog", "path", "hub"]
    dtype: str | None = None  # of the checkpoint's weights on the hub, in torch's word; null where no source tells it

    @property
    def model_type(self) -> str:
        """transformers' ``model_type``, e.g. ``llama``."""
        return self.config["model_type"]

    @property
    def checkpoint(self) -> str:
        """What ``from_pretrained`` takes: the hub id, or the local folder."""
        if self.hf_id is not None:
            return self.hf_id
        return self.name if Path(self.name).is_dir() else str(Path(self.name).parent)


def find_model(name: str, *, trust_remote_code: bool = False) -> ModelEntry:
    """The model called ``name``: a catalog slug or hub id (no network), a local path, or any other hub id (network).

    Slugs are case-insensitive and win over a local folder of the same name; write ``./gpt2`` for the folder. A config's
    ``auto_map`` (its own Python code) is dropped unless ``trust_remote_code``. Raises UnknownName, SpecError (a config
    that cannot be used) or MissingDependency (a hub that is switched off, not installed, unreachable or closed to you).
    """
    if not name.strip():
        raise UnknownName("model", name, [], f"{_INSTEAD}.")
    slug = _slugs_by_name().get(name.lower())
    if slug is not None:
        return _catalog_entry(slug)
    path = Path(name).expanduser()
    if path.exists():
        return _path_entry(path, trust_remote_code)
    if (profiled := find_profiled(name)) is not None:
        return _profiled_entry(profiled, name)
    if name.endswith(".json") or name.startswith((".", "~", os.sep)):
        raise UnknownName("model", name, [], f"No file or folder is there. {_INSTEAD}.")
    if _HUB_ID.fullmatch(name):
        config = _usable_config(_hub_config(name).read_text(encoding="utf-8"), f"{name} (hub)", trust_remote_code)
        return ModelEntry(name=name, hf_id=name, config=config, n_params=None, n_embedding_params=None, origin="hub")
    raise UnknownName("model", name, _model_rows(), f"{_INSTEAD}, or a hub id such as org/name.")


def list_models() -> list[ModelEntry]:
    """Every model of the catalog, in the order of PARAMETERS.csv (by family, small before large)."""
    return [_catalog_entry(slug) for slug in _model_rows()]


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
    return ModelEntry(
        name=slug,
        hf_id=row["hf_id"],
        # Parsed anew each time: a caller may change its dict, and must not change the next caller's.
        config=json.loads(_config_text(slug)),
        n_params=int(row["n_params"]),
        n_embedding_params=int(row["n_embedding_params"]),
        origin="catalog",
        dtype=row["dtype"] or None,
    )


def _profiled_entry(model: ProfiledModel, given: str) -> ModelEntry:
    if not model.is_simulated:
        raise SpecError(model.why_not_predicted(given))
    return ModelEntry(
        name=model.name,
        hf_id=model.hf_id,
        config=json.loads(model.config.read_text(encoding="utf-8")),
        n_params=None,
        n_embedding_params=None,
        origin="catalog",
        dtype=model.dtype,
    )


def _path_entry(path: Path, trust_remote_code: bool) -> ModelEntry:
    file = path / "config.json" if path.is_dir() else path
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
    return ModelEntry(name=name, hf_id=None, config=config, n_params=None, n_embedding_params=None, origin="path")


def _usable_config(text: str, where: str, trust_remote_code: bool) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecError(f"{where} is not valid JSON (line {error.lineno}: {error.msg}); mend or replace it") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise SpecError(f"{where} has no model_type, so it is no transformers config.json; add e.g. model_type: llama")
    dropped = BOOKKEEPING_KEYS if trust_remote_code else (*BOOKKEEPING_KEYS, "auto_map")
    return {key: value for key, value in config.items() if key not in dropped}


def _hub_config(hub_id: str) -> Path:
    """The config.json of ``hub_id``, downloaded or from the hub's local cache."""
    try:
        from huggingface_hub import constants, hf_hub_download
        from huggingface_hub import errors as hub
    except ImportError:
        raise MissingDependency(
            f"model {hub_id!r} is not in the catalog, and asking the hub needs the package huggingface_hub; "
            f"install it (pip install 'vramprobe[measure]'). {_INSTEAD}."
        ) from None
    try:
        return Path(hf_hub_download(hub_id, "config.json"))
    except hub.GatedRepoError:
        raise MissingDependency(
            f"model {hub_id!r} is gated on the hub: accept its terms there and log in (`hf auth login`). {_INSTEAD}."
        ) from None
    except hub.RepositoryNotFoundError:
        advice = f"The hub has no such repository, or it is private and you are not logged in. {_INSTEAD}."
        raise UnknownName("model", hub_id, _slugs_by_name(), advice) from None
    except hub.LocalEntryNotFoundError as error:  # before EntryNotFoundError, its base
        why = (
            "HF_HUB_OFFLINE is set"
            if constants.HF_HUB_OFFLINE
            else f"the hub is unreachable ({error.__cause__ or error})"
        )
        todo = "Unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "Check the connection"
        raise MissingDependency(
            f"model {hub_id!r} is not in the catalog nor in the hub's local cache, and {why}. {todo}, or: {_INSTEAD}."
        ) from None
    except hub.EntryNotFoundError:
        raise UnknownName(
            "model", hub_id, _slugs_by_name(), f"Its repository has no config.json. {_INSTEAD}."
        ) from None
    except OSError as error:  # HTTP errors, time-outs, a full disk: all OSErrors in huggingface_hub
        raise MissingDependency(f"the config of {hub_id!r} did not come from the hub: {error}. {_INSTEAD}.") from None
