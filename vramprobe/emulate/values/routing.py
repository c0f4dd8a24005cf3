"""Choose indices among scores that nobody computed: those of ``topk``, ``sort``, ``argmax`` and sampling.

In: an operator's name, arguments and results (device tensors), a policy. Out: the index results filled in, on the CPU
over the same memory. Mixtures of experts take their shapes from these: with stale bytes every token would go to one
expert.
"""

import torch

from .memory import alias
from .operators import aten

_EXTREMES = aten("argmax argmin max min")


def _last(indices, dim):
    return indices.movedim(dim, -1) if indices.dim() else indices


def fill_indices(name, args, kwargs, outs, policy):
    """Write the chosen indices; returns whether this overload has indices at all (``max`` of a whole tensor has none).

    Row t (all dimensions but the one chosen along, flattened) of k choices among E: (t * k + j) % E under ``even``,
    so that each of the E is chosen by rows * k / E of the rows; j under ``one_expert``.
    """
    scores = args[0]
    index_outs = [out for out in outs if out.dtype == torch.int64]
    if not index_outs or scores.dtype == torch.int64:
        return False
    dim = _chosen_dim(name, args, kwargs)
    num_choices = scores.shape[dim] if scores.dim() and dim is not None else scores.numel()
    if not num_choices:
        return False
    for out in index_outs:
        if not out.numel():
            continue
        indices = alias(out)
        if name in _EXTREMES:
            indices.copy_((_spread(out.numel(), policy) % num_choices).view(out.shape))
            continue
        chosen = _last(indices, dim if dim is not None else -1)
        width = chosen.shape[-1] if chosen.dim() else 1
        rows = out.numel() // width
        step = width if name in ("aten::topk", "aten::multinomial") else 1
        first = _spread(rows, policy) * step
        chosen.copy_(((first[:, None] + torch.arange(width)) % num_choices).view(chosen.shape))
    return True


def _spread(rows, policy):
    """A number for each row: others under ``even``, 0 under ``one_expert``."""
    return torch.arange(rows) if policy.routing == "even" else torch.zeros(rows, dtype=torch.int64)


def _chosen_dim(name, args, kwargs):
    if name == "aten::multinomial":
        return -1
    if name in _EXTREMES:
        return kwargs.get("dim", args[1] if len(args) > 1 else None)
    if name == "aten::topk":
        return kwargs.get("dim", args[2] if len(args) > 2 else -1)
    given = [
        arg for arg in args[1:] if isinstance(arg, int) and not isinstance(arg, bool)
    ]  # sort(x, dim, desc), sort.stable
    return kwargs.get("dim", given[0] if given else -1)
