"""Write the files that sentence-transformers reads beside a model: its modules, and how tokens are pooled.

In: a pooling, mean or lasttoken; the width. Out: ``modules.json`` and ``1_Pooling/config.json``, as
sentence-transformers/all-MiniLM-L6-v2 has them (stored file 58727419584).
"""

import os

from .replacements import write_json

_MODULES = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
_POOLINGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def write(folder, pooling, width):
    """-> what it is."""
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(_MODULES)
    ]
    chosen = {"mean": "mean_tokens"}.get(pooling, pooling)
    pooled = {"word_embedding_dimension": width, **{f"pooling_mode_{name}": name == chosen for name in _POOLINGS}}
    for path, content in (("modules.json", modules), ("1_Pooling/config.json", pooled)):
        os.makedirs(os.path.dirname(os.path.join(folder, path)), exist_ok=True)
        write_json(folder, path, content)
    os.makedirs(os.path.join(folder, "2_Normalize"), exist_ok=True)
    return f"modules of sentence-transformers, {pooling} pooling, normalized"
