"""Device memory seen by the CPU: tensors over the same bytes, and the runs of bytes that a tensor occupies.

In: tensors whose addresses are host addresses (the emulated card's memory). Out: CPU tensors without a copy;
(address, bytes) pairs. It allocates nothing and never reads a byte.
"""

import ctypes
import functools

import torch

WINDOW_BITS = (
    40  # one window of address space of 1 TiB has one CPU tensor over it per dtype; nothing behind it need be mapped
)
MAX_RUNS = 4096


@functools.cache
def itemsize(dtype):
    """Bytes of one element (``dtype.itemsize`` computes it anew each time)."""
    return dtype.itemsize


@functools.cache
def _window(number, dtype):
    address = number << WINDOW_BITS
    whole = (ctypes.c_char * (2 << WINDOW_BITS)).from_address(address)  # twice: a tensor may begin at the end of one
    with torch.inference_mode(False):
        return torch.frombuffer(whole, dtype=torch.uint8).view(dtype)


def alias(tensor):
    """A CPU tensor over the very bytes of ``tensor``, with its shape and strides."""
    address, dtype = tensor.data_ptr(), tensor.dtype
    if not address:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
    number = address >> WINDOW_BITS
    offset = (address - (number << WINDOW_BITS)) // itemsize(dtype)
    return _window(number, dtype).as_strided(tensor.shape, tensor.stride(), offset)


def runs(tensor):
    """The contiguous runs of bytes that ``tensor`` occupies: [(address, bytes)], or None where they are more than
    MAX_RUNS."""
    count = tensor.numel()
    if not count:
        return []
    size, address = itemsize(tensor.dtype), tensor.data_ptr()
    if tensor.is_contiguous():
        return [(address, count * size)]
    inner, outer = 1, []
    for stride, length in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and s):
        if stride == inner and not outer:
            inner *= length
        else:
            outer.append((stride, length))
    num_runs = 1
    for _, length in outer:
        num_runs *= length
    if num_runs > MAX_RUNS:
        return None
    starts = [0]
    for stride, length in reversed(outer):
        starts = [start + stride * i for start in starts for i in range(length)]
    return [(address + start * size, inner * size) for start in starts]


def span(tensor):
    """(address, bytes) from the first to the last byte that a tensor occupies, whatever lies between."""
    if tensor.is_contiguous() and (count := tensor.numel()):
        return tensor.data_ptr(), count * itemsize(tensor.dtype)
    reach = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        reach += (length - 1) * stride
    return tensor.data_ptr(), reach * itemsize(tensor.dtype)


def ends(tensor):
    """The address of a tensor's first byte, and the one after its last."""
    address, num_bytes = span(tensor)
    return address, address + num_bytes
