"""transformers' loading: local folders that lack something, and rows that a resized embedding gets.

In: transformers' modules as they are imported. Out: their ``from_pretrained`` is given a folder of the run in place of
one with a config.json and without weights, or without a tokenizer (links to all that is there); whole ones stay as they
are. Added rows are zeros where the embedding is on the host, which is what the mean of empty weights is: for 248,320
rows of 5,120 transformers' draw by the covariance of the old ones takes 13 TFLOPs, minutes of the host.
"""

import os

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
        return plain(cls, *inputs, **options)


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
