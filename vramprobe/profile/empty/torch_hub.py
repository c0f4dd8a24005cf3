"""Weights that torch.hub would download, as torchvision's: a model keeps its first ones instead.

In: torch.hub as it is imported. Out: where the file is not in its cache, a dict without tensors, which a module's
``load_state_dict`` takes for its own weights. A program that reads the dict finds nothing in it.
"""

import functools
import os
from collections import OrderedDict
from urllib.parse import urlparse


class _FirstWeights(OrderedDict):
    """In place of the file ``name``."""

    name = ""


def serve(module, *, replacements):
    """torch.hub."""
    import torch

    plain, load = module.load_state_dict_from_url, torch.nn.Module.load_state_dict

    @functools.wraps(plain)
    def load_state_dict_from_url(url, model_dir=None, *words, **options):
        name = options.get("file_name") or os.path.basename(urlparse(url).path)
        if os.path.exists(os.path.join(model_dir or os.path.join(module.get_dir(), "checkpoints"), name)):
            return plain(url, model_dir, *words, **options)
        weights = _FirstWeights()
        weights.name = name
        return weights

    @functools.wraps(load)
    def load_state_dict(model, state_dict, *words, **options):
        if not isinstance(state_dict, _FirstWeights):
            return load(model, state_dict, *words, **options)
        number = sum(one.numel() for one in model.parameters())
        by = f"the first ones of {type(model).__name__}, {number / 1e6:.2f} million parameters"
        replacements.replaced("weights", state_dict.name, by)
        return load(model, model.state_dict(), *words, **options)

    module.load_state_dict_from_url = load_state_dict_from_url
    torch.nn.Module.load_state_dict = load_state_dict
