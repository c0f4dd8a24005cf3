"""Zeros on the host: where an operator's result is zero because its inputs are, nobody writes it, and it has no pages.

In: an ATen operator on CPU tensors, as weights that are cast, dequantized, stacked or copied are: files of holes and
fresh memory, which hold zeros. Out: the operator's own result, every bit of it 0, in memory without pages; or None,
where it is to run. The kernel says what was written (pages.py), so that no value is ever guessed.
"""

import torch

from . import pages
from .memory import itemsize, span
from .operators import ZEROS, tensors_in
from .results import NO_CPU_KERNEL

#: Smaller results are written as ever: a thousand of them are one gigabyte.
LEAST_BYTES = 1 << 20
#: An input that is not zero takes part as it is where it is so much smaller than the result: scales, tables.
_SMALLER_TIMES = 8
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def result(func, operator, args, kwargs):
    """Return the result of ``func``, where that is zeros of LEAST_BYTES or more on the host; None: it must run."""
    device, inputs = kwargs.get("device"), tensors_in(args, kwargs)
    if (device is not None and torch.device(device).type != "cpu") or not all(map(_is_plain, inputs)):
        return None
    if inputs and max(map(_bytes, inputs)) < LEAST_BYTES:
        return None
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        try:
            return _result(func, operator, args, kwargs, inputs)
        except NO_CPU_KERNEL:  # or a call that is wrong: run, it says so itself
            return None


def _result(func, operator, args, kwargs, inputs):
    into = kwargs.get("out", args[0] if operator.writes else None)
    largest = max((at.numel() for at in inputs), default=0)
    kept = {id(at) for at in inputs if at is not into and at.numel() * _SMALLER_TIMES <= largest}
    if not all(id(at) in kept or is_zero(at) for at in inputs):
        return None
    is_pinned = operator.name == "aten::_pin_memory"  # which has the strides of its input
    if not is_pinned and operator.name not in ZEROS and not _makes_zeros(func, args, kwargs, into, kept):
        return None
    if into is not None:
        return into
    made = args[0] if is_pinned else _run(func, args, kwargs, _without_memory, "meta", makes=operator.name in ZEROS)
    if _bytes(made) < LEAST_BYTES:
        return None
    is_pinned = is_pinned or bool(kwargs.get("pin_memory"))
    made = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device="cpu", pin_memory=is_pinned)
    storage = made.untyped_storage()
    pages.make_zero(storage.data_ptr(), storage.nbytes())
    return made


def _makes_zeros(func, args, kwargs, into, kept):
    """Return True if ``func`` makes zeros of one zero in the place of each tensor of zeros, and of the others as they
    are.
    """
    read, wide = tensors_in(args, {}), 0
    if "out" in kwargs and torch.broadcast_shapes(*(at.shape for at in read)) != into.shape:
        return False  # it would be given another shape
    if into is not None and "out" not in kwargs:
        wide = torch.broadcast_shapes(*(at.shape if id(at) in kept else (1,) * at.dim() for at in read))

    def shrunk(at):
        if id(at) in kept:
            return at
        return torch.zeros(wide if at is into else (1,) * at.dim(), dtype=at.dtype, device="cpu")

    return is_zero(_run(func, args, kwargs, shrunk, "cpu"))


def _run(func, args, kwargs, replaced, device, makes=False):
    def of(given):
        if isinstance(given, torch.Tensor):
            return replaced(given)
        return [of(inner) for inner in given] if isinstance(given, (list, tuple)) else given

    told = {name: of(given) for name, given in kwargs.items() if name != "pin_memory"}
    if makes or "device" in told:
        told["device"] = device
    return func(*map(of, args), **told)


def _without_memory(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def is_zero(tensor):
    """Return True if every bit of it is 0, and of what lies between its elements."""
    if not tensor.numel():
        return True
    storage = tensor.untyped_storage()
    return pages.are_zero(*span(tensor), is_anonymous=storage.resizable() and not storage.is_shared())


def _is_plain(tensor):
    strided = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_neg()
    return strided and tensor.device.type == "cpu" and type(tensor) in _PLAIN


def _bytes(tensor):
    return tensor.numel() * itemsize(tensor.dtype)
