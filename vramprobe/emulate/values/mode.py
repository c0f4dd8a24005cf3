"""True values for small tensors on the emulated card, and the knowledge of which bytes nobody computed.

In: every ATen operator that a process runs while the mode is on. Each still runs on the card (same dispatch, same
allocations, no result); what is small enough then runs again on the CPU over the same memory. Out: values, marks in
the driver, a list of reads. It never allocates on the card, never changes what a program computes with, and never
hides that a value was not computed.
"""

from contextlib import contextmanager
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from . import host_zeros
from .host_reads import HostReads
from .known import MASKS, Known
from .operators import TRUSTED, Operator, tensors_in
from .policy import Policy
from .results import FAKE, Results

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
NO_DISPATCH = torch._C._disabled_torch_dispatch_impl  # of a subclass that is only another name for a tensor
DETACH = torch.ops.aten.detach.default
#: torch 2.3 sets the version counter of ``.data``, which an inference tensor lacks; 2.5 looks first.
COUNTS_VERSIONS = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 5)


class TrueValues(TorchDispatchMode):
    """The mode. ``driver`` is a ``Driver`` (or what has its calls), ``policy`` a ``Policy``.

    ``device_type``: whose tensors lie in the emulated memory; the tests watch CPU tensors, so that they need no card
    at all.
    """

    supports_higher_order_operators = True

    def __init__(self, driver, policy=None, device_type="cuda"):
        super().__init__()
        self.driver, self.known = driver, Known(driver, policy or Policy(), device_type)
        self.results = Results(self.known)
        self.host = HostReads(self.known, self._launch)
        self.reads, self.state, self.driver_read = self.host.reads, self.known.state, self.host.driver_read
        self._on_device, self._limits, self._thread = self.known.on_device, self.known.limits, self.host.thread
        self._trains = False  # autograd has run
        self._has_host = device_type != "cpu"
        self.observer = None  # called with (run, func, args, kwargs) in place of each operator that runs on the card
        self._operators = {}

    @classmethod
    def is_infra_mode(cls):
        """Dynamo runs everything eagerly, silently, while a mode of the other kind is on."""
        return True

    @classmethod
    def ignore_compile_internals(cls):
        """Return True as :meth:`is_infra_mode`, which torch 2.9 and later ask by this name."""
        return True

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # else every operator pays for a wrapper; see compiled.py for how Dynamo is kept out

    # -- one operator ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self._trains and torch._C._current_graph_task_id() != -1:
            self._trains = True
            self.driver.trains()
        operator = self._operators.get(id(func)) or self._learn(func)  # an overload's own hash is a call of Python
        if operator is None:
            return func(*args, **kwargs)  # a higher-order operator: what it calls comes here by itself
        for kind in types:
            if kind not in PLAIN and kind.__torch_dispatch__ is not NO_DISPATCH:  # bitsandbytes' parameters have none
                if kind.__module__.startswith(FAKE):
                    return func(*args, **kwargs)
                return NotImplemented  # the subclass takes itself apart, with this mode still on
        if func is DETACH and COUNTS_VERSIONS and torch.is_inference_mode_enabled():
            return self._over_the_same_storage(args[0])
        if operator.composite and (torch.is_inference_mode_enabled() or self._splits()):  # there they arrive whole
            with self.on_this_thread():
                return func.decompose(*args, **kwargs)
        if operator.keeps_zeros and self._has_host and not getattr(args[0], "is_cuda", False):
            out = host_zeros.result(func, operator, args, kwargs)
            if out is not None:
                return out
        thread = self._thread
        thread.operator = operator
        try:
            if operator.special:
                if operator.random:
                    self.results.draw_seed(args, kwargs)
                done, out = self.host.run(func, operator, args, kwargs)
                if done:
                    return out
            elif operator.parts and any(map(self._on_device, tensors_in(args, kwargs))):
                out = self._launch_in_parts(func, operator.parts, args, kwargs)
                if operator.pure and not operator.trusted:
                    return out  # what its parts made is known, each by itself
            else:
                out = self._launch(func, args, kwargs)
        finally:
            thread.operator = None
        if operator.quiet:
            if operator.lifts and self._on_device(out):
                self.results.lifted(out)
            return out
        if operator.moves:
            self.results.moved(args, kwargs, out)
            return out
        if operator.pure and type(out) is torch.Tensor:
            if not self._on_device(out):
                return out
            dtype = out.dtype
            size, limit = self._limits.get(dtype) or self.known.limit(dtype)
            num_bytes = out.numel() * size
            if num_bytes > limit and not (
                num_bytes <= self.known.policy.mask_max_bytes
                and (dtype in MASKS or self.results.is_of_mask(operator, args, (out,)))
                and self.results.mask_is_known(operator, args, kwargs, num_bytes)
            ):
                self.results.too_big(out, args, num_bytes)
                return out
        self.results.follow(func, operator, args, kwargs, out)
        return out

    def _launch(self, func, args, kwargs):
        if self.observer is not None:
            return self.observer(func, func, args, kwargs)
        return func(*args, **kwargs)

    def _launch_in_parts(self, func, key, args, kwargs):
        """A library's own operator, written in others (bitsandbytes' int8 looks for outliers): those come here, too."""
        if self.observer is not None:
            return self.observer(partial(self._run_in_parts, func, key), func, args, kwargs)
        return self._run_in_parts(func, key, *args, **kwargs)

    def _splits(self):
        """Return True if this runs within an operator of torch's own whose parts are followed."""
        return getattr(self._thread, "splits", False)

    def _run_in_parts(self, func, key, *args, **kwargs):
        before, self._thread.splits = self._splits(), func.namespace in TRUSTED
        try:
            out = self._parts_of(func, key, args, kwargs)
        finally:
            self._thread.splits = before
        return out

    def _parts_of(self, func, key, args, kwargs):
        with self.on_this_thread():
            out = func._op_dk(getattr(torch._C.DispatchKey, key), *args, **kwargs)
        if type(out) is list and any(at is None for at in out):  # FlashAttention 3: undefined tensors, None in Python
            with torch._C._DisableTorchDispatch():
                out = [torch.empty(0, device="cpu") if at is None else at for at in out]
        return out

    @staticmethod
    def _over_the_same_storage(tensor):
        """Return the tensor that ``detach`` returns, as no inference tensor."""
        with torch.inference_mode(False), torch._C._DisableTorchDispatch():
            made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def _learn(self, func):
        if not isinstance(func, torch._ops.OpOverload):
            return None
        self._operators[id(func)] = operator = Operator(func)  # which keeps func, so that no other has its id
        return operator

    # -- on, off, said -------------------------------------------------------------------------------------------------

    @contextmanager
    def on_this_thread(self):
        """The mode on top of this thread's stack, without the flags by which Dynamo would notice a mode."""
        _push_mode(self)
        try:
            yield self
        finally:
            _pop_mode()

    def __enter__(self):
        _push_mode(self)
        return self

    def __exit__(self, *failure):
        _pop_mode()

    def report(self):
        """Report the assumed values and their readers, as plain dicts."""
        reads = self.reads.as_list()
        return {
            "policy": self.known.policy.as_dict(),
            "num_reads": self.reads.num_reads,
            "num_reads_that_could_have_steered": sum(r["num_reads"] for r in reads if r["could_have_steered"]),
            "graph_bytes": int(self.driver.graph_bytes()),
            "reads": reads,
        }
