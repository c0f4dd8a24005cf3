"""Look at what a folder of a repository has: weights that a model can be read from, a tokenizer.

In: a folder of the hub's cache, of the run or of the user. Out: whether it is complete. Reads names and indexes only.
"""

import json
import os
import re

_WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx)(\.index(\.\w+)?\.json)?$")
_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json",
    "sentencepiece.bpe.model",
)  # fmt: skip


def snapshot(home):
    """The folder of the newest revision in a cache, or None."""
    try:
        with open(os.path.join(home, "refs", "main")) as file:
            folder = os.path.join(home, "snapshots", file.read().strip())
    except OSError:
        return None
    return folder if os.path.isdir(folder) else None


def is_whole(folder):
    """Return True if it has weights and a tokenizer."""
    return has_weights(folder) and has_tokenizer(folder)


def has_tokenizer(folder):
    """Return True if one of the files that tokenizers are read from is there."""
    return any(os.path.exists(os.path.join(folder, name)) for name in _TOKENIZERS)


def has_weights(folder):
    """Return True if a model can be read from it: one file, or every shard of an index."""
    names = [name for name in os.listdir(folder) if _WEIGHTS.search(name) and not name.startswith("training_args")]
    indexes = [name for name in names if name.endswith(".json")]
    for name in indexes:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            shards = set(json.load(file)["weight_map"].values())
        if shards <= set(names):
            return True
    return any(not re.search(r"-\d{5}-of-\d{5}\.", name) for name in set(names) - set(indexes))


def remove_weights(folder):
    """Remove weights that are not whole: shards without the others, an index without its shards."""
    for name in filter(_WEIGHTS.search, os.listdir(folder)):
        os.unlink(os.path.join(folder, name))
