"""Rows that a resized embedding gets: transformers draws them by the covariance of the old ones, on the host.

In: transformers' modeling_utils as it is imported. Out: rows of zeros where the embedding is on the host, which is what
the mean of empty weights is. For 248,320 rows of 5,120 that covariance takes 13 TFLOPs, minutes of the host.
"""

import functools


def serve(module):
    """modeling_utils.PreTrainedModel."""
    name = "_init_added_embeddings_weights_with_mean"
    plain = getattr(module.PreTrainedModel, name, None)
    if plain is None:  # before transformers 4.46 they are drawn by their standard deviation alone
        return

    @functools.wraps(plain)
    def of_zeros(self, old_embeddings, new_embeddings, old_num_tokens, added_num_tokens):
        if old_embeddings.weight.device.type != "cpu":  # on the GPU its temporaries count, and cost no time here
            return plain(self, old_embeddings, new_embeddings, old_num_tokens, added_num_tokens)
        new_embeddings.weight.data[-1 * added_num_tokens :].zero_()

    setattr(module.PreTrainedModel, name, of_zeros)
