"""Local folders with a config.json and without weights, or without a tokenizer: transformers is led to a whole one.

In: transformers' modules as they are imported. Out: their ``from_pretrained``, which is given a folder of the run in
place of one that lacks something (links to all that is there). Folders that are whole stay as they are.
"""

import functools
import os


def serve(module, *, kind, repositories):
    """``kind``: the name of a class in ``module`` that has a ``from_pretrained``."""
    kind = getattr(module, kind)
    plain = kind.from_pretrained.__func__

    @functools.wraps(plain)
    def from_pretrained(cls, *inputs, **options):
        words = [*inputs, options.get("pretrained_model_name_or_path")]
        if isinstance(words[0], (str, os.PathLike)) and not options.get("gguf_file"):
            whole = repositories.folder_for(words[0])
            if inputs:
                inputs = (whole, *inputs[1:])
            else:
                options["pretrained_model_name_or_path"] = whole
        return plain(cls, *inputs, **options)

    kind.from_pretrained = classmethod(from_pretrained)
