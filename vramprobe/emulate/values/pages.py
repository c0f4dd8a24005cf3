"""Pages of this process's memory: which were never written, and memory without pages.

In: an address, bytes. Out: whether all of them are 0, exactly; pages given back. What nobody has written, as Linux says
in /proc/self/pagemap, is not read: a page that is read is there from then on. Where Linux says nothing, all is read.
"""

import ctypes
import errno
import os
from itertools import pairwise

import torch

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_OF_A_FILE, _IS_THERE = 1, 6  # the upmost bits of a page's entry: of a file; swapped, present
_PAGES_AT_ONCE = 1 << 15
_DONT_NEED = 4
_libc = ctypes.CDLL(None, use_errno=True)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def are_zero(address, num_bytes, *, is_anonymous=False):
    """``is_anonymous``: it is known to be memory of no file, shared with nobody."""
    if not _is_zero(address, min(num_bytes, 64)):  # weights that somebody trained
        return False
    end = address + num_bytes
    try:
        runs = _written(address, end)
        if not is_anonymous:
            runs += _data_of_files(address, end)
    except OSError:
        runs = [(address, end)]
    return all(_is_zero(max(start, address), min(stop, end) - max(start, address)) for start, stop in runs)


def make_zero(address, num_bytes):
    """Write zeros into memory of this process alone, or give its pages back, which is the same."""
    first, last = -(-address // _PAGE_BYTES) * _PAGE_BYTES, (address + num_bytes) // _PAGE_BYTES * _PAGE_BYTES
    if first >= last or _libc.madvise(first, last - first, _DONT_NEED):
        ctypes.memset(address, 0, num_bytes)
        return
    ctypes.memset(address, 0, first - address)
    ctypes.memset(last, 0, address + num_bytes - last)


def _is_zero(address, num_bytes):
    if num_bytes <= 0:
        return True
    first = ctypes.c_ubyte.from_address(address).value
    return not first and not _libc.memcmp(address, address + 1, num_bytes - 1)


def _written(address, end):
    """The runs of pages that are there and of no file: written, or read once. Raises OSError."""
    first, last, found = address // _PAGE_BYTES, -(-end // _PAGE_BYTES), []
    told = bytearray(8 * min(last - first, _PAGES_AT_ONCE))
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        for at in range(first, last, _PAGES_AT_ONCE):
            count = min(last - at, _PAGES_AT_ONCE)
            if os.preadv(file.fileno(), [memoryview(told)[: 8 * count]], 8 * at) < 8 * count:
                raise OSError("pagemap ends early")
            entries = torch.frombuffer(told, dtype=torch.int64, count=count)
            low, high = (int(one) for one in entries.aminmax())
            if low < 0 or high >> 62:
                bits = entries.bitwise_right_shift(61).bitwise_and(_IS_THERE | _OF_A_FILE)
                found.append(((bits & _IS_THERE != 0) & (bits & _OF_A_FILE == 0)).nonzero().flatten() + at)
    return _as_runs(torch.cat(found)) if found else []


def _as_runs(numbers):
    breaks = [0, *((numbers.diff() > 1).nonzero().flatten() + 1).tolist(), len(numbers)]
    pairs = pairwise(breaks)
    return [(int(numbers[at]) * _PAGE_BYTES, (int(numbers[to - 1]) + 1) * _PAGE_BYTES) for at, to in pairs if to > at]


def _data_of_files(address, end):
    """The runs of memory over files that are no holes of them. Raises OSError where other memory is among it."""
    found, at = [], address
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            place, rights, offset, _, inode, *path = line.split(maxsplit=5)
            start, stop = (int(one, 16) for one in place.split("-"))
            if stop <= at:
                continue
            if start > at or rights[3] != "p":
                break
            stop = min(stop, end)
            if inode != "0":
                found += _data_of(path[0].rstrip("\n"), int(offset, 16) - start, at, stop)
            at = stop
            if at >= end:
                return found
    raise OSError("memory that others may write")


def _data_of(path, offset, start, stop):
    """The runs between two addresses at which a file, mapped so that ``offset`` is between them, has data."""
    found, file = [], os.open(path, os.O_RDONLY)
    try:
        while start < stop:
            try:
                start = os.lseek(file, start + offset, os.SEEK_DATA) - offset
            except OSError as error:
                if error.errno != errno.ENXIO:  # no data from here on
                    raise
                break
            to = os.lseek(file, start + offset, os.SEEK_HOLE) - offset
            if start < stop:
                found.append((start, min(to, stop)))
            start = to
    finally:
        os.close(file)
    return found
