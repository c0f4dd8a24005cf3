"""Measure one operator by its schema and tensors: bytes read and written, class, shapes, direction of a copy.

In: an ATen or custom operator with its arguments and result, and the launches that the driver counted within it. Out:
the fields of a row, or None for one that did nothing on a card: a view, an allocation.
"""

import functools

import torch
from torch.utils._pytree import tree_leaves

from ..operators import SHAPE_ONLY, aten
from .flops import flops_of

#: These write without a kernel, by the driver's own copy or memset, which is no launch.
_BY_COPY_ENGINE = aten("copy_ clone _to_copy zero_ zeros zeros_like new_zeros _foreach_copy_ _foreach_zero_ fill_")
#: What is overwritten is not read.
_OVERWRITE = ("copy_", "fill_", "zero_", ".out")
#: These read as much of their table as they return.
_GATHERS = aten("embedding index gather index_select nll_loss_forward")
_SCATTERS = aten(
    "index_put_ _index_put_impl_ scatter scatter_ scatter_add scatter_add_ index_add_ embedding_dense_backward"
)
_MAX_SHOWN = 8  # tensors of a signature


def size_of(tensor):
    """Bytes that a tensor spans in memory: an expanded dimension counts once."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or size == 1 else 1
    return count * tensor.element_size()


def tensors_of(value):
    """All tensors in an argument or a result."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return []


def shown(tensors):
    """``bfloat16[8, 512] float32[512]``; of many tensors only how many there are."""
    if len(tensors) > _MAX_SHOWN:
        return f"{len(tensors)} tensors"
    return " ".join([f"{_name_of(one.dtype)}{list(one.shape)}" for one in tensors])


@functools.cache
def _name_of(dtype):
    return str(dtype)[6:]


@functools.cache
def signature(func):
    """The operator's name, and (name, is it written into) of each argument: a schema makes them anew each time."""
    schema = func._schema
    written = [one.alias_info is not None and one.alias_info.is_write for one in schema.arguments]
    return schema.name, tuple(zip([one.name for one in schema.arguments], written, strict=True))


def plain_row(name, shapes, num_launches, *, dtype="", read=0, written=0):
    """The row's fields of what is neither a product nor an attention."""
    words = {"what": "other", "name": name, "shapes": shapes, "dtype": dtype, "flops": 0}
    return words | {"read": read, "written": written, "launches": num_launches}


def row_of(func, args, kwargs, out, num_launches, has_product=False):
    """The row's fields: what, name, shapes, dtype, flops, read, written, launches; None for no work on a card.
    ``has_product``: of its parts, which have rows of their own, one is a product.
    """
    (name, arguments), given, inputs, mutated = signature(func), {}, [], []
    for position, (argument, is_written) in enumerate(arguments):
        value = args[position] if position < len(args) else kwargs.get(argument)
        given[argument] = value
        found = tensors_of(value)
        inputs += found
        if is_written:
            mutated += found
    outs = tensors_of(out)
    on_card = [one for one in inputs if one.is_cuda]
    if not on_card and not any(one.is_cuda for one in outs):
        return None
    if has_product and name == "bitsandbytes::gemm_4bit":
        return _unpacking(given, num_launches)
    row = {"name": name, "shapes": f"{shown(inputs)} -> {shown(outs)}", "launches": num_launches, "flops": 0}
    direction = _direction(name, inputs, outs, mutated)
    if direction is not None:
        moved = sum(map(size_of, mutated or outs))
        return row | {"what": direction, "dtype": "", "read": moved, "written": moved}
    computed = flops_of(name, given, outs[0] if outs else None)
    if not num_launches and computed is None and name not in _BY_COPY_ENGINE:
        return None
    read, written = _bytes(name, on_card, [one for one in outs if one.is_cuda], mutated)
    if computed is None and not num_launches and not written:
        return None
    row["what"], row["flops"] = computed or ("other", 0)
    row["launches"] = max(num_launches, 1)  # cuBLAS's stub launches nothing: a product is one kernel
    dtypes = [_name_of(one.dtype) for one in on_card if one.is_floating_point()]
    if computed is not None and dtypes[:1] == ["float32"] and _is_tf32(name, on_card[0].device):
        dtypes = ["tf32"]
    if computed is not None:
        row["width"] = int(on_card[0].shape[-1]) if on_card[0].ndim else 0
    return row | {"dtype": dtypes[0] if dtypes else "", "read": read, "written": written}


def _is_tf32(name, device):
    """Return True if tensor cores round this operator's fp32 to TF32: by default convolutions', not products'."""
    if _capability(device)[0] < 8 or "attention" in name:
        return False
    kind = "conv" if "convolution" in name else "matmul"
    getter = getattr(torch._C, "_get_fp32_precision_getter", None)
    if getter is not None:  # torch 2.9 on
        return getter("cuda", kind) == "tf32"
    return torch._C._get_cudnn_allow_tf32() if kind == "conv" else torch._C._get_cublas_allow_tf32()


_capability = functools.cache(torch.cuda.get_device_capability)


def _unpacking(given, num_launches):
    """Return the row of the kernels that ``gemm_4bit`` launches beside a product of its weight in 16 bit: they unpack
    the weight, and its scales where they are packed, too.
    """
    packed, activations, scales = given["B"], given["A"], given.get("absmax_8bit")
    wide = given["shapeB"][0] * given["shapeB"][1] * activations.element_size()
    read, written = size_of(packed) + size_of(given["absmax"]), wide
    if scales is not None:  # written in fp32, and read again
        read, written = read + 5 * scales.numel(), written + 4 * scales.numel()
    dtype = _name_of(activations.dtype)
    shapes = f"{shown([packed])} -> {dtype}{list(given['shapeB'])}"
    return plain_row("bitsandbytes::dequantize_4bit", shapes, num_launches, dtype=dtype, read=read, written=written)


def _direction(name, inputs, outs, mutated):
    """``host_to_device`` or ``device_to_host`` of a copy between both; None of anything else."""
    if name == "aten::_local_scalar_dense":
        return "device_to_host"
    if name not in ("aten::copy_", "aten::_to_copy"):
        return None
    target = (mutated or outs)[0]
    source = inputs[-1] if mutated else inputs[0]
    if source.is_cuda == target.is_cuda or "meta" in (source.device.type, target.device.type):
        return None
    return "host_to_device" if target.is_cuda else "device_to_host"


def _bytes(name, on_card, outs, mutated):
    """(read, written): each operand and each result once; results that share an operand's memory are not new."""
    overwrites, changed = any(word in name for word in _OVERWRITE), {id(one) for one in mutated}
    read = sum(size_of(one) for one in on_card if not (overwrites and id(one) in changed))
    known = {_storage(one) for one in on_card}
    written = sum(map(size_of, mutated)) + sum(size_of(one) for one in outs if _storage(one) not in known)
    if name in SHAPE_ONLY:
        return 0, written
    if name in _GATHERS:
        return written, written
    if name in _SCATTERS:
        values = max((size_of(one) for one in on_card[1:] or on_card), default=0)
        return (values, written) if name.endswith("backward") else (min(read, 2 * values), min(written, values))
    return read, written


def _storage(tensor):
    """Return an identity of its memory without ``untyped_storage()``: that makes a Python object, which counts as one
    more owner, and autograd then adds gradients that meet out of place.
    """
    try:
        return torch._C._storage_address(tensor)
    except (RuntimeError, NotImplementedError):  # sparse, or without memory
        return id(tensor)
