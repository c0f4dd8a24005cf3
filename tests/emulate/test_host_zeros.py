"""Zeros on the host: what is made of unwritten memory has no pages, and is bit for bit what the operator makes."""

import mmap
import random

import pytest
import torch
from values_on_cpu import IntervalDriver

from vramprobe.emulate.values import host_zeros, pages
from vramprobe.emulate.values.mode import TrueValues
from vramprobe.emulate.values.operators import Operator
from vramprobe.units import MIB

aten = torch.ops.aten
ROWS = 1024  # of 1,024 numbers


def fresh(dtype=torch.float32):
    """Zeros that nobody has written."""
    made = torch.empty(ROWS, 1024, dtype=dtype)
    pages.make_zero(made.data_ptr(), made.nbytes)
    return made


def anonymous_mib():
    """Memory of this process that is no file's."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024


def made_of(func, *args, **kwargs):
    """Return what is made without the operator, or None."""
    return host_zeros.result(func, Operator(func), args, kwargs)


SCALES, TABLE = torch.linspace(-3, 3, ROWS)[:, None], torch.arange(16.0)
#: An operator, its arguments (made anew, as some are written into), and whether its result is zeros.
CASES = {
    "cast": (aten._to_copy.default, lambda: ((fresh(),), {"dtype": torch.bfloat16}), True),
    "cast to whole numbers": (aten._to_copy.default, lambda: ((fresh(),), {"dtype": torch.int32}), True),
    "copy": (aten.clone.default, lambda: ((fresh(),), {}), True),
    "transposed copy": (aten.clone.default, lambda: ((fresh().t(),), {"memory_format": torch.contiguous_format}), True),
    "copy into": (aten.copy_.default, lambda: ((fresh(), fresh(torch.bfloat16)), {}), True),
    "copy into columns": (aten.copy_.default, lambda: ((fresh()[:, 0::2], fresh()[:, 1::2]), {}), True),
    "stack": (aten.stack.default, lambda: (([fresh(), fresh()],), {}), True),
    "join": (aten.cat.default, lambda: (([fresh(), fresh()], 1), {}), True),
    "join with something": (aten.cat.default, lambda: (([fresh(), torch.ones(8, 1024)],), {}), False),
    "nibble": (aten.bitwise_and.Scalar, lambda: ((fresh(torch.uint8), 15), {}), True),
    "shift": (aten.__rshift__.Scalar, lambda: ((fresh(torch.uint8), 4), {}), True),
    "look up": (aten.index.Tensor, lambda: ((TABLE, [fresh(torch.int32)]), {}), True),
    "look up one": (aten.index.Tensor, lambda: ((TABLE + 1, [fresh(torch.int32)]), {}), False),
    "scale": (aten.mul.Tensor, lambda: ((fresh(), SCALES.abs()), {}), True),
    "scale by what is negative": (aten.mul.Tensor, lambda: ((fresh(), SCALES), {}), False),  # -0.0
    "scale in place": (aten.mul_.Tensor, lambda: ((fresh(), SCALES.abs()), {}), True),
    "scale by powers": (aten.ldexp.out, lambda: ((one := fresh(), SCALES), {"out": one}), True),
    "add one": (aten.add.Tensor, lambda: ((fresh(), 1), {}), False),
    "add in place": (aten.add_.Tensor, lambda: ((fresh(), torch.ones(1024)), {}), False),
    "add what was written": (aten.add.Tensor, lambda: ((fresh(), torch.ones(ROWS, 1024)), {}), False),
    "other shape": (aten.add.out, lambda: ((fresh(), fresh()), {"out": torch.empty(0)}), False),
    "divide": (aten.div.Tensor, lambda: ((fresh(), SCALES[:1].abs()), {}), True),
    "divide by zero": (aten.div.Tensor, lambda: ((fresh(), fresh()), {}), False),
    "exponent": (aten.exp.default, lambda: ((fresh(),), {}), False),
    "sign turned": (aten.neg.default, lambda: ((fresh(),), {}), False),
    "choice": (aten.where.self, lambda: ((fresh(torch.bool), SCALES, fresh()), {}), True),
    "choice of the other": (aten.where.self, lambda: ((fresh(torch.bool), fresh(), SCALES), {}), False),
    "moments": (aten.lerp_.Scalar, lambda: ((fresh(), fresh(), 0.1), {}), True),
    "pad": (aten.constant_pad_nd.default, lambda: ((fresh(), [0, 8]), {}), True),
    "pad by ones": (aten.constant_pad_nd.default, lambda: ((fresh(), [0, 8], 1), {}), False),
    "repeat": (aten.repeat.default, lambda: ((fresh(), [3, 1]), {}), True),
    "roll": (aten.roll.default, lambda: ((fresh(), [3], [0]), {}), True),
    "flip": (aten.flip.default, lambda: ((fresh(), [0]), {}), True),
    "lower half": (aten.tril.default, lambda: ((fresh(),), {}), True),
    "upper half": (aten.triu.default, lambda: ((fresh(),), {}), True),
    "zeros": (aten.zeros.default, lambda: (([ROWS, 1024],), {}), True),
    "zeros alike": (aten.zeros_like.default, lambda: ((fresh(),), {"dtype": torch.float64}), True),
    "new zeros": (aten.new_zeros.default, lambda: ((fresh(), [ROWS, 2048]), {}), True),
    "filled alike": (aten.full_like.default, lambda: ((fresh(), 0), {}), True),
    "filled by ones": (aten.full_like.default, lambda: ((fresh(), 1), {}), False),
    "set to zero": (aten.zero_.default, lambda: ((fresh(),), {}), True),
    "filled in place": (aten.fill_.Scalar, lambda: ((fresh(), 0), {}), True),
    "small": (aten.mul.Tensor, lambda: ((torch.zeros(1024), 2), {}), False),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_made_is_bit_for_bit_what_the_operator_makes(case: str) -> None:
    func, arguments, is_zeros = CASES[case]
    args, kwargs = arguments()
    made = made_of(func, *args, **kwargs)
    assert (made is not None) == is_zeros
    if made is None:
        return
    args, kwargs = arguments()
    real = func(*args, **kwargs)
    assert (made.shape, made.stride(), made.dtype) == (real.shape, real.stride(), real.dtype)
    as_bytes = [one.contiguous().view(torch.uint8) for one in (made, real)]
    assert torch.equal(*as_bytes)


def test_every_operator_that_rearranges_has_a_case() -> None:
    from vramprobe.emulate.values.operators import REARRANGES, ZEROS

    assert {func._schema.name for func, _, is_zeros in CASES.values() if is_zeros} >= (REARRANGES | ZEROS) - {
        "aten::_pin_memory"  # which needs a driver: tests/profile/test_host.py
    }


def test_zeros_that_are_cast_and_stacked_take_no_memory() -> None:
    with TrueValues(IntervalDriver()):
        before = anonymous_mib()
        one = torch.empty(64 << 20, dtype=torch.bfloat16).float()
        both = torch.stack([one, torch.zeros_like(one)]).double()
        both.copy_(both * 2)
        assert anonymous_mib() - before < 16  # of 2,176 MiB
        assert int(both.count_nonzero()) == 0
        both[1, -1] = 5
        assert (both + 1).sum() == 5 + both.numel()


@pytest.mark.parametrize("at", [0, 8, 5 * mmap.PAGESIZE - 1, MIB // 2, 4 * MIB - 1])
def test_one_byte_that_was_written_is_found(at: int) -> None:
    one = fresh().view(-1).view(torch.uint8)
    assert host_zeros.is_zero(one)
    one[at] = 1
    assert not host_zeros.is_zero(one)
    assert host_zeros.is_zero(one[:at])
    assert host_zeros.is_zero(one[at + 1 :])
    one[at] = 0  # written, and zero
    assert host_zeros.is_zero(one)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_file_of_holes_is_zero_but_where_it_has_data(tmp_path, is_shared: bool) -> None:
    path, at = tmp_path / "file", 9 * MIB + 17
    with open(path, "wb") as file:
        file.truncate(16 * MIB)
        file.seek(at)
        file.write(b"\1")
    one = torch.UntypedStorage.from_file(str(path), is_shared, 16 * MIB)
    whole = torch.empty(0, dtype=torch.uint8).set_(one)
    assert host_zeros.is_zero(whole[:at])
    assert not host_zeros.is_zero(whole)
    assert host_zeros.is_zero(whole[at + 1 :])
    whole[MIB] = 1
    assert not host_zeros.is_zero(whole[:at])


def test_memory_of_numpy_and_of_others_is_read() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros(4 * MIB, dtype=numpy.uint8)
    assert host_zeros.is_zero(torch.from_numpy(array))
    array[3 * MIB] = 1
    assert not host_zeros.is_zero(torch.from_numpy(array))
    shared = torch.zeros(4 * MIB, dtype=torch.uint8).share_memory_()
    assert host_zeros.is_zero(shared)
    shared[MIB] = 1
    assert not host_zeros.is_zero(shared)


def test_without_pagemap_all_is_read(monkeypatch) -> None:
    def refuse(*_):
        raise OSError("no such file")

    monkeypatch.setattr(pages, "_written", refuse)
    one = fresh()
    assert host_zeros.is_zero(one)
    one[512, 512] = 1
    assert not host_zeros.is_zero(one)


def test_memory_that_was_used_before_is_zero_again() -> None:
    draw = random.Random(0)
    for _ in range(50):
        one = torch.full((draw.randrange(1, 64 << 10),), 255, dtype=torch.uint8)
        start = draw.randrange(0, one.numel())
        count = draw.randrange(0, one.numel() - start + 1)
        pages.make_zero(one.data_ptr() + start, count)
        assert int(one.count_nonzero()) == one.numel() - count
        assert not one[start : start + count].any()
