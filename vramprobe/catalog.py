"""The models, GPUs, prices and claims shipped under data/, a local config.json, or a config.json from the hub.

In: a name as users write it. Out: frozen entries, or an error that says what else there is and what to do.
Never imports torch or transformers, reads nothing at import, and touches the network only for a hub id. Long because it
holds four kinds of entries, each in a stretch of its own: models, GPUs, prices, claims.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

from vramprobe.errors import MissingDependency, SpecError, UnknownName
from vramprobe.units import MIB

Number = TypeVar("Number", int, float)
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")
_INSTEAD = "Use a slug from `vramprobe models`, or the path of a config.json or of a checkpoint folder"

#: Where families write their depth. The first that a config has is its depth; t5 counts each of its two stacks.
_DEPTH_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
#: Lists with one element per layer, and lists of layer indices: both must follow the depth.
_PER_LAYER_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "attention_layers")
_LAYER_INDEX_LISTS = ("mlp_only_layers", "moe_layers")
#: What a config says about its file and not about the architecture; two copies of one model must resolve alike.
_BOOKKEEPING_KEYS = ("_name_or_path", "_commit_hash", "transformers_version")


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One model: its architecture (the config.json) and what is known of it. Counts take tied parameters once."""

    name: str  # slug, absolute path or hub id; find_model(entry.name) finds it again
    hf_id: str | None  # null for a local path
    config: dict[str, Any]
    n_params: int | None  # verified; null outside the catalog
    n_embedding_params: int | None
    origin: Literal["catalog", "path", "hub"]

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
    if name.endswith(".json") or name.startswith((".", "~", os.sep)):
        raise UnknownName("model", name, [], f"No file or folder is there. {_INSTEAD}.")
    if _HUB_ID.fullmatch(name):
        config = _usable_config(_hub_config(name).read_text(encoding="utf-8"), f"{name} (hub)", trust_remote_code)
        return ModelEntry(name=name, hf_id=name, config=config, n_params=None, n_embedding_params=None, origin="hub")
    raise UnknownName("model", name, _model_rows(), f"{_INSTEAD}, or a hub id such as org/name.")


def list_models() -> list[ModelEntry]:
    """Every model of the catalog, in the order of PARAMETERS.csv (by family, small before large)."""
    return [_catalog_entry(slug) for slug in _model_rows()]


def cut_depth(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The same architecture with its first ``num_layers`` layers (t5: so many in each stack), as a new config.

    Per-layer lists are cut with it. A cut below the period of a repeating pattern (gemma 3: every 6th layer is global)
    has another mix of layers than the whole. Raises SpecError unless 1 ≤ num_layers ≤ the config's own depth.
    """
    text = config.get("text_config")
    depth_key = _depth_key(config)
    if depth_key is None:
        if isinstance(text, dict):  # a multimodal config: its language model is what is trained
            return {**config, "text_config": cut_depth(text, num_layers)}
        raise SpecError(f"this config names no depth to cut (none of {', '.join(_DEPTH_KEYS)}); leave num_layers out")
    depth = config[depth_key]
    if not 1 <= num_layers <= depth:
        raise SpecError(f"num_layers {num_layers} is not possible: this model has {depth} layers, so 1 to {depth}")
    cut = {**config, depth_key: num_layers}
    if isinstance(config.get("num_decoder_layers"), int):
        cut["num_decoder_layers"] = min(num_layers, config["num_decoder_layers"])
    for key in _PER_LAYER_LISTS:
        if isinstance(config.get(key), list):
            cut[key] = config[key][:num_layers]
    for key in _LAYER_INDEX_LISTS:
        if isinstance(config.get(key), list):
            cut[key] = [index for index in config[key] if index < num_layers]
    return cut


def depth_of(config: dict[str, Any]) -> int | None:
    """Layers of the language model (t5: of each stack); None where the config does not say under a name we know."""
    text = config.get("text_config")
    key = _depth_key(config)
    if key is None and isinstance(text, dict):
        return depth_of(text)
    return None if key is None else config[key]


def _depth_key(config: dict[str, Any]) -> str | None:
    return next((key for key in _DEPTH_KEYS if isinstance(config.get(key), int)), None)


@cache
def _model_rows() -> dict[str, dict[str, str]]:
    return {row["slug"]: row for row in _csv_rows("models/PARAMETERS.csv")}


@cache
def _config_text(slug: str) -> str:
    return _data(f"models/{slug}.json").read_text(encoding="utf-8")


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
    dropped = _BOOKKEEPING_KEYS if trust_remote_code else (*_BOOKKEEPING_KEYS, "auto_map")
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


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. ``total_bytes`` is what nvidia-smi reports, below the nominal (decimal) size; null where not known."""

    name: str
    short_name: str  # as prices and claims write it, e.g. H100-SXM
    aliases: tuple[str, ...]
    vendor: str
    arch: str
    compute_capability: str
    nominal_gb: int
    total_bytes: int | None
    memory_type: str
    bandwidth_gb_s: float
    bf16_dense_tflops: float | None  # null: no bf16 tensor cores
    nvlink_gb_s: float | None
    source: str


def find_gpu(name: str) -> Gpu:
    """The GPU called ``name``: full or short, or as torch and nvidia-smi report it; case and separators do not count.

    A name that fits several (``A100``) is an UnknownName that lists them. As in the published prices and claims,
    ``H100`` and ``A100-80GB`` mean the SXM board, and ``A100-PCIe`` the 40 GB one.
    """
    words = _gpu_words(name)
    if (gpu := _gpus_by_words().get("".join(words))) is not None:
        return gpu
    fitting = [gpu for gpu in _gpus() if words and any(set(words) <= set(known) for known in _known_words(gpu))]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        several = ", ".join(f"{gpu.short_name} ({gpu.name})" for gpu in fitting)
        raise UnknownName("GPU", name, [], f"The name fits several: {several}. Give one of these.")
    raise UnknownName("GPU", name, [gpu.short_name for gpu in _gpus()], "`vramprobe gpus` lists them.")


def list_gpus() -> list[Gpu]:
    """Every GPU of the catalog, in file order."""
    return list(_gpus())


@cache
def _gpus() -> tuple[Gpu, ...]:
    names = {row["gpu"]: row for row in _csv_rows("gpu_names.csv")}
    return tuple(_gpu(row, names[row["gpu"]]) for row in _csv_rows("gpus.csv"))


def _gpu(row: dict[str, str], names: dict[str, str]) -> Gpu:
    total_mib = _number(row["reported_total_mib"], int)
    return Gpu(
        name=row["gpu"],
        short_name=names["short_name"],
        aliases=_split(names["aliases"], ";"),
        vendor=row["vendor"],
        arch=row["arch"],
        compute_capability=row["compute_capability"],
        nominal_gb=int(row["nominal_gb"]),
        total_bytes=None if total_mib is None else total_mib * MIB,
        memory_type=row["memory_type"],
        bandwidth_gb_s=float(row["bandwidth_gb_s"]),
        bf16_dense_tflops=_number(row["bf16_dense_tflops"], float),
        nvlink_gb_s=_number(row["nvlink_gb_s"], float),
        source=row["source"],
    )


def _gpu_words(name: str) -> list[str]:
    """``NVIDIA A100-SXM4-80GB`` → a100, sxm4, 80gb; the maker's and the series' names tell no GPU from another."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return [word for word in words if word not in ("nvidia", "amd", "geforce", "tesla", "instinct")]


def _known_words(gpu: Gpu) -> Iterator[list[str]]:
    for name in (gpu.name, gpu.short_name, *gpu.aliases):
        yield [*_gpu_words(name), f"{gpu.nominal_gb}gb"]


@cache
def _gpus_by_words() -> dict[str, Gpu]:
    return {"".join(_gpu_words(name)): gpu for gpu in _gpus() for name in (gpu.name, gpu.short_name, *gpu.aliases)}


@dataclass(frozen=True, kw_only=True)
class Price:
    """One offer; ``usd_per_hour`` is for all ``num_gpus`` together."""

    provider: str
    date: str
    terms: str
    gpu: Gpu
    num_gpus: int
    usd_per_hour: float

    @property
    def usd_per_gpu_hour(self) -> float:
        """US dollars per hour and GPU."""
        return self.usd_per_hour / self.num_gpus


def list_prices(gpu: str | None = None) -> list[Price]:
    """The shipped prices, of one GPU when ``gpu`` names one. Raises UnknownName for an unknown GPU."""
    wanted = None if gpu is None else find_gpu(gpu)
    return [price for price in _prices() if wanted in (None, price.gpu)]


@cache
def _prices() -> tuple[Price, ...]:
    return tuple(
        Price(
            provider=row["provider"],
            date=row["date"],
            terms=row["terms"],
            gpu=find_gpu(row["gpu"]),
            num_gpus=int(row["n_gpus"]),
            usd_per_hour=float(row["usd_per_hour"]),
        )
        for row in _csv_rows("prices.csv")
    )


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One published figure to check: ``quantity`` lies in ``low``…``high`` (either may be null) in ``unit``."""

    id: str
    source: str
    topic: str
    statement: str
    params_b: float | None  # billions of parameters
    method: str | None
    quant: str | None
    lora_r: int | None
    batch_size: int | None
    seq_lens: tuple[int, ...]  # one, or the two ends that the source prints
    gradient_checkpointing: bool | None
    recipe: str | None
    gpus: tuple[Gpu, ...]
    num_gpus: int | None
    quantity: str
    low: float | None
    high: float | None
    unit: str


def list_claims() -> list[Claim]:
    """Every shipped claim, in file order."""
    return [_claim(row) for row in _csv_rows("claims.csv")]


def _claim(row: dict[str, str]) -> Claim:
    return Claim(
        id=row["id"],
        source=row["source"],
        topic=row["topic"],
        statement=row["statement"],
        params_b=_number(row["params_b"], float),
        method=row["method"] or None,
        quant=row["quant"] or None,
        lora_r=_number(row["lora_r"], int),
        batch_size=_number(row["batch"], int),
        seq_lens=tuple(int(number) for number in re.findall(r"\d+", row["seq"])),
        gradient_checkpointing={"": None, "yes": True, "no": False}[row["grad_ckpt"]],
        recipe=row["recipe"] or None,
        gpus=tuple(find_gpu(name) for name in _split(row["gpu"], "/")),
        num_gpus=_number(row["n_gpus"], int),
        quantity=row["quantity"],
        low=_number(row["low"], float),
        high=_number(row["high"], float),
        unit=row["unit"],
    )


def _number(text: str, kind: Callable[[str], Number]) -> Number | None:
    return kind(text) if text else None


def _split(text: str, separator: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(separator) if part)


def _data(relative: str) -> Any:
    return resources.files("vramprobe").joinpath("data", relative)


def _csv_rows(relative: str) -> list[dict[str, str]]:
    with _data(relative).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
