"""The counts that kernels inside data-dependent operators would have found: ``nonzero``, boolean indexing, ``unique`` …

In: an operator's name and its arguments as CPU tensors over the card's memory. Out: the numbers that the operator's own
C++ code will copy to the host, in the order in which it asks: seen, and tested, under torch 2.4.1 and 2.13.0 only.
"""

import torch


def _masks(indices):
    return [at for at in indices if isinstance(at, torch.Tensor) and at.dtype in (torch.bool, torch.uint8)]


def expected(name, args, kwargs):
    """The counts of one call; [] where this call asks for none."""
    match name:
        case "aten::nonzero":
            return [int(args[0].count_nonzero())]
        case "aten::masked_select" | "aten::masked_scatter_backward":  # which selects
            return [int(torch.broadcast_tensors(args[0], args[1])[1].count_nonzero())]
        case "aten::index" | "aten::index_put" | "aten::index_put_" | "aten::_index_put_impl_":
            return [int(at.count_nonzero()) for at in _masks(args[1])]
        case "aten::_unique2" | "aten::_unique":
            return [torch.unique(args[0]).numel()]
        case "aten::unique_consecutive":
            dim = kwargs.get("dim", args[3] if len(args) > 3 else None)
            return [torch.unique_consecutive(args[0], dim=dim).shape[dim or 0]]
        case "aten::unique_dim":
            return [torch.unique(args[0], dim=args[1]).shape[args[1]]]
        case "aten::unique_dim_consecutive":
            return [torch.unique_consecutive(args[0], dim=args[1]).shape[args[1]]]
        case "aten::bincount":
            return [int(args[0].min()), int(args[0].max())] if args[0].numel() else []
        case "aten::repeat_interleave":
            # the sum, then (one byte) whether none is negative
            return [] if kwargs.get("output_size") is not None else [int(args[0].sum()), int((args[0] >= 0).all())]
        case "aten::multinomial":  # asked by 2.4.1, not by 2.13.0: whether all are valid, whether any row is all zeros
            return [1, 0]
        case _:
            return []


def deciding(name, args):
    """The tensors whose values decide the result's shape."""
    match name:
        case "aten::masked_select" | "aten::masked_scatter_backward":
            return [args[1]]
        case "aten::index" | "aten::index_put" | "aten::index_put_" | "aten::_index_put_impl_":
            return _masks(args[1])
        case "aten::multinomial":
            return []  # what is drawn is no shape
        case _:
            return [args[0]]
