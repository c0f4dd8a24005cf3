"""transformers' loading: local folders that lack something, and rows that a resized embedding gets.

In: transformers' modules as they are imported. Out: their ``from_pretrained`` is given a folder of the run in place of
one with a config.json and without weights, or without a tokenizer (links to all that is there); whole ones stay as they
are. Added rows are zeros where the embedding is on the host, which is what the mean of empty weights is: for 248,320
rows of 5,120 transformers' draw by the covariance of the old ones takes 13 TFLOPs, minutes of the host.
"""

import os
import sys

from vramprobe_values.imports import instead_of


def serve_folders(module, run, kind):
    """``kind``: the name of a class in ``module`` that has a ``from_pretrained``."""

    @instead_of(getattr(module, kind), "from_pretrained")
    def from_pretrained(plain, cls, *inputs, **options):
        words = [*inputs, options.get("pretrained_model_name_or_path")]
        if isinstance(words[0], (str, os.PathLike)) and not options.get("gguf_file"):
            whole = run.repositories.folder_for(words[0])
            if inputs:
                inputs = (whole, *inputs[1:])
            else:
                options["pretrained_model_name_or_path"] = whole
        found = plain(cls, *inputs, **options)
        decides = ("dtype", "torch_dtype", "quantization_config")
        if kind == "PreTrainedModel" and all(options.get(name) is None for name in decides):
            _tell_dtype(found, run.repositories.name_of(str(words[0])), run)
        return found


def _tell_dtype(model, name, run):
    """Record the dtype of a model that was loaded without naming one, where transformers 4 and 5 may differ."""
    release, dtype = sys.modules["transformers"].__version__, str(getattr(model, "dtype", None)).removeprefix("torch.")
    if release.startswith("4."):
        why = f"the default of transformers {release}; transformers 5 takes that of the config"
    elif dtype in ("float32", "None"):  # so does transformers 4; a pair with loading's own account has none
        return
    else:
        why = f"that of the weights, as transformers {release} takes it; transformers 4 takes float32, twice as much"
    run.replaced("loaded dtype", name, f"{dtype}: none was given to from_pretrained, and this is {why}")


def serve_added_rows(module, run):
    """modeling_utils.PreTrainedModel."""
    name = "_init_added_embeddings_weights_with_mean"
    if not hasattr(module.PreTrainedModel, name):  # before 4.46 they are drawn by their standard deviation alone
        return

    @instead_of(module.PreTrainedModel, name)
    def of_zeros(plain, self, old_embeddings, new_embeddings, old_num_tokens, added_num_tokens):
        if old_embeddings.weight.device.type != "cpu":  # on the GPU its temporaries count, and cost no time here
            return plain(self, old_embeddings, new_embeddings, old_num_tokens, added_num_tokens)
        new_embeddings.weight.data[-1 * added_num_tokens :].zero_()
