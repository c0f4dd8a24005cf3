"""A card of the tests' own: CPU tensors whose kernels do nothing, and a driver that keeps a set of addresses."""

import torch

from vramprobe.emulate.values.intervals import Intervals
from vramprobe.emulate.values.mode import TrueValues
from vramprobe.emulate.values.operators import Operator, tensors_in, written_in

GARBAGE = 0x55


class IntervalDriver:
    """The driver's control functions over a set of addresses."""

    def __init__(self):
        self.known, self.injected, self.cleared, self.times_trained = Intervals(), [], 0, 0

    def mark_computed(self, address, num_bytes):
        self.known.add(address, address + num_bytes)

    def mark_uncomputed(self, address, num_bytes):
        self.known.discard(address, address + num_bytes)

    def is_computed(self, address, num_bytes):
        return int(self.known.covers(address, address + num_bytes))

    def any_computed(self, address, num_bytes):
        return int(self.known.overlaps(address, address + num_bytes))

    def inject_count(self, value):
        self.injected.append(value)

    def clear_counts(self):
        self.cleared += 1

    def trains(self):
        self.times_trained += 1

    def graph_bytes(self):
        return 0


class TrueValuesOnCpu(TrueValues):
    """The mode over CPU tensors: a launch gives the right shapes and garbage for values, and leaves what it writes
    into alone."""

    def __init__(self, policy=None):
        super().__init__(IntervalDriver(), policy, device_type="cpu")

    def _launch(self, func, args, kwargs):
        operator = Operator(func)
        if operator.quiet or operator.reads_item:
            return func(*args, **kwargs)
        written = written_in(operator, func, args, kwargs)
        before = [at.clone() for at in written]
        out = func(*args, **kwargs)
        for at, saved in zip(written, before, strict=True):
            at.copy_(saved)
        if not written:
            for at in tensors_in(out if isinstance(out, (list, tuple)) else (out,), {}):
                if at.numel():
                    at.untyped_storage().fill_(GARBAGE)
        return out


def known(mode, data):
    """A tensor as a copy from the host leaves it: every byte computed."""
    tensor = torch.tensor(data)
    mode.driver.mark_computed(tensor.data_ptr(), tensor.numel() * tensor.dtype.itemsize)
    return tensor
