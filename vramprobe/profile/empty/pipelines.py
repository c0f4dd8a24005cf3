"""Pipelines of diffusers, and parts of one: configs, empty weights and tokenizers, by the folder of each part.

In: JSON files by their path in a repository, from the catalog (``profiled/``), the hub's cache or a local folder. Out:
a folder with these files, and beside each config what it lacks: weights with the names and shapes that this very
diffusers, or transformers, would save, or a tokenizer. A float32 checkpoint has a variant ``fp16`` too, as on the hub.
"""

import importlib
import json
import os

from . import checkpoint, present, tokenizer
from .replacements import Refused, write_json

INDEX = "model_index.json"
_CONFIGS = ("config.json", "scheduler_config.json", "tokenizer_config.json", "preprocessor_config.json")
_ASSUMED_DTYPE = "bfloat16"
_VARIANT = {"float32": ("float16", "fp16")}
#: diffusers lists the shards of an id at the hub, which is offline: its parts are one file each.
_ONE_FILE_BYTES = 1 << 62
#: The class that is neither in transformers nor at diffusers' top.
_SAFETY_CHECKER = "diffusers.pipelines.stable_diffusion.safety_checker"


def are_files(config):
    """Return True if ``config`` is files by their path, and not the config of one model."""
    return any(name.endswith(".json") for name in config)


def read(folder):
    """The configs of a pipeline, or of a part of one, by their path in ``folder``; empty for anything else."""
    index = _content(folder, INDEX)
    if index is None:
        config = _content(folder, "config.json")
        return {"config.json": config} if "_class_name" in (config or {}) else {}
    parts = [name for name, kind in index.items() if isinstance(kind, list) and kind[0]]
    found = {f"{part}/{name}": _content(folder, f"{part}/{name}") for part in parts for name in _CONFIGS}
    return {INDEX: index, **{path: content for path, content in found.items() if content is not None}}


def with_references(files, known):
    """``files`` with a catalog's config in the place of each model's id. ``known``: as hub.Repositories has them."""
    whole = {}
    for path, content in files.items():
        if isinstance(content, str):
            with open(known[content.lower()]["config"], encoding="utf-8") as file:
                content = json.load(file)
        whole[path] = content
    return whole


def is_whole(folder, files):
    """Return True if no part lacks its weights or its tokenizer."""
    return not any(_lacks(folder, path) for path in files)


def fill(folder, files, dtype=None):
    """Write what ``folder`` lacks of a pipeline; -> what is made, by kind. ``dtype``: of all its weights, if known."""
    for path, content in files.items():
        os.makedirs(os.path.join(folder, os.path.dirname(path)), exist_ok=True)
        if not os.path.exists(os.path.join(folder, path)):
            write_json(folder, path, content)
    weights, tokenizers = [], []
    for path, content in files.items():
        home = os.path.join(folder, os.path.dirname(path))
        if not _lacks(folder, path):
            continue
        if os.path.basename(path) == "config.json":
            weights.append(_write_weights(home, content, dtype))
        else:
            tokenizers.append(_write_tokenizer(home, content, _encoder_of(path, files)))
    made = {"weights": f"empty files of {', '.join(weights)}"} if weights else {}
    return made | ({"tokenizer": f"{', '.join(tokenizers)}, of letters and English words"} if tokenizers else {})


def _lacks(folder, path):
    home, name = os.path.split(os.path.join(folder, path))
    if name == "config.json":
        return not present.has_weights(home)
    return name == "tokenizer_config.json" and not present.has_tokenizer(home)


def _content(folder, path):
    try:
        with open(os.path.join(folder, path), encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def _write_weights(folder, content, known):
    """In the dtype that is known, else the config's, else an assumed one; -> what they are."""
    present.remove_weights(folder)  # shards without the others
    said = known or str(content.get("dtype") or content.get("torch_dtype") or "").removeprefix("torch.")
    dtype, kind = said or _ASSUMED_DTYPE, _class_of(content)
    with checkpoint.without_memory():
        if "_class_name" in content:
            model = kind.from_config(content)
            form = {"stem": "diffusion_pytorch_model", "max_shard_bytes": _ONE_FILE_BYTES}
        else:
            model, form = kind(importlib.import_module("transformers").AutoConfig.from_pretrained(folder)), {}
    count = checkpoint.write(model, folder, dtype, **form)
    also = _VARIANT.get(dtype)
    if also:
        checkpoint.write(model, folder, also[0], variant=also[1], **form)
    of = f"{dtype}{'' if said else ', assumed'}{f' and as variant {also[1]}' if also else ''}"
    return f"{kind.__name__} ({count / 1e9:.2f} billion parameters in {of})"


def _class_of(content):
    """The class of a part: diffusers' own name for it, else its architecture in transformers. Raises Refused."""
    own = content.get("_class_name")
    name = own or (content.get("architectures") or [""])[0]
    for module in ("diffusers" if own else "transformers", _SAFETY_CHECKER):
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError:
            found = None
        if found is not None:
            return found
    raise Refused(
        f"--empty-weights has no weights for {name!r}, a part of a pipeline: the command's diffusers and transformers "
        "have no such class; install a newer release, or download the pipeline"
    )


def _encoder_of(path, files):
    """The config of the text encoder that reads this tokenizer's tokens."""
    return files.get(path.replace("tokenizer_config", "config").replace("tokenizer", "text_encoder"), {})


def _write_tokenizer(folder, content, encoder):
    """One of the class that tokenizer_config.json names; -> what it is."""
    kind, size, length = content.get("tokenizer_class"), encoder.get("vocab_size"), content.get("model_max_length")
    if kind and size and kind.startswith("CLIP"):
        tokenizer.write_clip(folder, size)
    elif kind and size and kind.startswith("T5"):
        tokenizer.write_t5(folder, size)
    elif size:
        tokenizer.write(folder, size, {}, length, kind=kind)
    else:
        raise Refused(
            f"--empty-weights makes no tokenizer for {folder}: no text encoder tells its vocabulary; download it"
        )
    return f"{kind} ({size:,} tokens)"
