"""Operators through which the host reads the emulated card, or that decide a shape by values: item, equal, copies,
counts.

In: such an operator before its launch. Out: its result, and each read of what was not computed noted. Small tensors
that nobody computed get the policy's contents first.
"""

import threading
from contextlib import contextmanager

import torch

from . import counts, one_rank
from .known import ASSUMED, COMPUTED, MASKS, STATES, UNCOMPUTED
from .memory import alias, itemsize
from .operators import COPIES
from .reads import Reads, here
from .results import FAKE

#: What rows consist of; int32 holds quantized weights, too.
_ROWS = frozenset({torch.bool, torch.int64})


class HostReads:
    """``known``: a ``Known``; ``launch``: runs an operator on the card."""

    def __init__(self, known, launch):
        self.known, self._launch = known, launch
        self.reads, self.thread = Reads(), threading.local()

    def run(self, func, operator, args, kwargs):
        """Launch it, its reads noted -> (whether all is done, the result)."""
        if operator.reads_item:
            return True, self._item(func, args, kwargs)
        if operator.name == "aten::equal":
            return True, self._equal(func, args, kwargs)
        if operator.name in COPIES:
            return self._copy(func, operator, args, kwargs)
        if operator.counted:
            return False, self._counted(func, operator, args, kwargs)
        return False, self._launch(func, args, kwargs)

    @contextmanager
    def _handled(self):
        """Within: what the host reads has been noted already."""
        self.thread.handled = True
        try:
            yield
        finally:
            self.thread.handled = False

    def _about_to_read(self, operator_name, tensor, *, decides_shape=False):
        """The host is about to read ``tensor``: note it unless all of it was computed; small ones get the policy's
        contents."""
        state = self.known.state(tensor) if tensor.numel() else COMPUTED
        if tensor.numel() and (absent := self.known.said_of_absent(tensor)) is not None:
            one_rank.note_read(*absent, here(2))
        if state == COMPUTED:
            return COMPUTED
        self.reads.note(
            operator_name,
            STATES[state],
            str(tensor.dtype).removeprefix("torch."),
            tensor.numel(),
            dtype_is_float=tensor.is_floating_point(),
            decides_shape=decides_shape,
            depth=2,
        )
        if state == UNCOMPUTED and self.known.is_small(tensor):
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                self.known.settle(tensor)
        return state

    def _item(self, func, args, kwargs):
        if not self.known.on_device(args[0]) or type(args[0]).__module__.startswith(FAKE):
            return func(*args, **kwargs)
        self._about_to_read("item", args[0])
        with self._handled():
            return func(*args, **kwargs)

    def _equal(self, func, args, kwargs):
        first, second = args[0], args[1]
        if not (self.known.on_device(first) and self.known.on_device(second)) or first.shape != second.shape:
            return func(*args, **kwargs)
        small = self.known.is_small_mask(first) and self.known.is_small_mask(second)
        states = [self._about_to_read("equal", at) for at in (first, second)]
        with self._handled():
            self._launch(func, args, kwargs)
        if small and all(
            s > UNCOMPUTED or self.known.is_small(at) for s, at in zip(states, (first, second), strict=True)
        ):
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                return func(alias(first), alias(second))
        return self.known.policy.contents != "random" or bool(torch.randint(0, 2, (), generator=self.known.random))

    def _copy(self, func, operator, args, kwargs):
        source = args[1] if operator.name == "aten::copy_" else args[0]
        if not isinstance(source, torch.Tensor):  # copy_(1.0): the number itself
            return False, self._launch(func, args, kwargs)
        if type(source).__module__.startswith(FAKE) or source.layout != torch.strided:
            return True, self._launch(func, args, kwargs)
        if operator.name == "aten::copy_":
            to_host = not self.known.on_device(args[0])
        else:
            device = kwargs.get("device")
            to_host = device is not None and torch.device(device).type == "cpu" and self.known.device_type != "cpu"
        if not self.known.on_device(source):
            if to_host or ("device" not in kwargs and operator.name != "aten::copy_"):
                return True, self._launch(func, args, kwargs)
        elif to_host:
            return True, self._to_host(func, operator, args, kwargs, source)
        with self._handled():
            out = self._launch(func, args, kwargs)
        if type(out).__module__.startswith(FAKE) or not self.known.on_device(out) or self.known.is_small(out):
            return False, out
        if out.dtype == source.dtype and out.is_contiguous() and source.is_contiguous():
            # one transfer: the driver itself knows what became of it
            address, num_bytes = out.data_ptr(), out.numel() * itemsize(out.dtype)
            if out.dtype in _ROWS and num_bytes <= self.known.policy.mask_max_bytes and self._is_known(source):
                # a padding mask or positions of a million tokens, which the driver takes for weights and leaves out
                with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                    alias(out).copy_(alias(source) if self.known.on_device(source) else source)
                self.known.mark(out, COMPUTED)
            elif self.known.on_device(source) and out.dtype in MASKS and self.known.state(source) == ASSUMED:
                self.known.assumed.add(address, address + num_bytes)
            else:
                self.known.assumed.discard(address, address + num_bytes)
            return True, out
        if not self.known.on_device(source) and not self.known.is_small(source):
            self.known.mark(out, UNCOMPUTED)
            return True, out
        return False, out

    def _is_known(self, source):
        return not self.known.on_device(source) or self.known.state(source) == COMPUTED

    def _to_host(self, func, operator, args, kwargs, source):
        self._about_to_read("copy to the host", source)
        with self._handled():
            out = self._launch(func, args, kwargs)
        if self.known.is_small(source) and (
            not source.is_contiguous() or out.dtype != source.dtype or not out.is_contiguous()
        ):
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                out.copy_(alias(source))  # the kernel that would have packed it did nothing
        return out

    def _counted(self, func, operator, args, kwargs):
        asked = [at for at in counts.deciding(operator.name, args) if self.known.on_device(at)]
        if not asked and operator.name != "aten::multinomial":
            return self._launch(func, args, kwargs)
        found, unknown = [], 0
        for at in asked:
            state = self._about_to_read(operator.name.removeprefix("aten::"), at, decides_shape=True)
            unknown += not self.known.is_small_mask(at) or (state == UNCOMPUTED and not self.known.is_small(at))
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            if unknown:
                share = {"zeros": 0, "ones": 1, "random": 0.5}[self.known.policy.contents]
                found = [int(at.numel() * share) for at in asked]
            else:
                found = self._counts(operator.name, args, kwargs)
        with self._handled():
            for count in found:
                self.known.driver.inject_count(count)
            try:
                return self._launch(func, args, kwargs)
            finally:
                self.known.driver.clear_counts()

    def _counts(self, name, args, kwargs):
        def small(given):
            if not isinstance(given, torch.Tensor):
                return [small(inner) for inner in given] if isinstance(given, (list, tuple)) else given
            return alias(given) if self.known.on_device(given) else given

        try:
            return counts.expected(name, [small(given) for given in args], kwargs)
        except (RuntimeError, IndexError):
            return []  # the call is wrong; let it say so itself

    def driver_read(self, address, num_bytes):
        """The driver's callback: the host copied bytes that nobody computed, from within an operator or from outside
        torch."""
        if getattr(self.thread, "handled", False):
            return
        operator = getattr(self.thread, "operator", None)
        self.reads.note(
            f"within {operator.name}" if operator else "outside torch's dispatcher",
            "uncomputed",
            "bytes",
            num_bytes,
            decides_shape=num_bytes <= 8,
            depth=1,
        )
