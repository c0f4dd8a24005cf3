"""Weights of torch.hub and the hub's ``kernels`` that are not there: a model keeps its first ones, a kernel is said.

In: both as they are imported. Out: where torch.hub's file is not in its cache, a dict without tensors, which a module's
``load_state_dict`` takes for its own weights (a program that reads the dict finds nothing in it); for each kernel that
could not be loaded a line and a note of the profile, as programs take others: they see the same exception.
"""

import os
from collections import OrderedDict
from urllib.parse import urlparse

from vramprobe_values.imports import instead_of


class _FirstWeights(OrderedDict):
    """In place of the file ``name``."""

    name = ""


def serve_torch_hub(module, run):
    """torch.hub."""
    import torch

    @instead_of(module, "load_state_dict_from_url")
    def load_state_dict_from_url(plain, url, model_dir=None, *words, **options):
        name = options.get("file_name") or os.path.basename(urlparse(url).path)
        if os.path.exists(os.path.join(model_dir or os.path.join(module.get_dir(), "checkpoints"), name)):
            return plain(url, model_dir, *words, **options)
        weights = _FirstWeights()
        weights.name = name
        return weights

    @instead_of(torch.nn.Module, "load_state_dict")
    def load_state_dict(load, model, state_dict, *words, **options):
        if not isinstance(state_dict, _FirstWeights):
            return load(model, state_dict, *words, **options)
        number = sum(one.numel() for one in model.parameters())
        by = f"the first ones of {type(model).__name__}, {number / 1e6:.2f} million parameters"
        run.replaced("weights", state_dict.name, by)
        return load(model, model.state_dict(), *words, **options)


def serve_kernels(module, run):
    """kernels.get_kernel."""

    @instead_of(module, "get_kernel")
    def get_kernel(plain, repo_id, *words, **options):
        try:
            return plain(repo_id, *words, **options)
        except Exception as error:
            run.missing(
                f"the kernel {repo_id} of the hub was not loaded ({type(error).__name__}): the hub is offline under "
                "--empty-weights, and a program that takes another kernel instead (SDPA for FlashAttention 3) needs "
                f"other memory; fetch it once: hf download {repo_id}"
            )
            raise
