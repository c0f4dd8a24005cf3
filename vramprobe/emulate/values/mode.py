"""True values for small tensors on the emulated card, and the knowledge of which bytes nobody computed.

In: every ATen operator that a process runs while the mode is on. Each still runs on the card (same dispatch, same
allocations, no result); what is small enough then runs again on the CPU over the same memory. Out: values, marks in
the driver, a list of reads. It never allocates on the card, never changes what a program computes with, and never
hides that a value was not computed.
"""

import threading
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from . import counts, routing
from .intervals import Intervals
from .memory import alias, itemsize, runs, span
from .operators import COPIES, Operator, tensors_in, written_in
from .policy import LIKELY, Policy
from .reads import Reads

UNCOMPUTED, ASSUMED, COMPUTED = 0, 1, 2
STATES = ("uncomputed", "assumed", "computed")
MASKS = frozenset({torch.bool, torch.int32, torch.int64})
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
# What an operator raises that has no kernel for these arguments on the CPU.
NO_CPU_KERNEL = (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError)
NO_DISPATCH = torch._C._disabled_torch_dispatch_impl  # of a subclass that is only another name for a tensor
FAKE = "torch._subclasses"


class TrueValues(TorchDispatchMode):
    """The mode. ``driver`` is a ``Driver`` (or what has its calls), ``policy`` a ``Policy``.

    ``device_type``: whose tensors lie in the emulated memory; the tests watch CPU tensors, so that they need no card
    at all.
    """

    supports_higher_order_operators = True

    def __init__(self, driver, policy=None, device_type="cuda"):
        super().__init__()
        self.driver, self.policy, self.reads = driver, policy or Policy(), Reads()
        self.assumed = Intervals()
        self.num_computed = self.num_assumed = self.num_launched = 0
        self._trains = False  # autograd has run
        self.without_cpu_kernel = {}
        self._operators, self._thread = {}, threading.local()
        self._on_device = attrgetter(f"is_{device_type}")
        self._device_type, self._cpu = device_type, torch.device("cpu")
        self._limits = {}
        self._random = torch.Generator(device="cpu").manual_seed(self.policy.seed)
        self._mark_uncomputed, self._is_computed = driver.mark_uncomputed, driver.is_computed

    @classmethod
    def is_infra_mode(cls):
        """Dynamo runs everything eagerly, silently, while a mode of the other kind is on."""
        return True

    @classmethod
    def ignore_compile_internals(cls):
        """The same, from torch 2.9 on."""
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
        operator = self._operators.get(func) or self._learn(func)
        if operator is None:
            return func(*args, **kwargs)  # a higher-order operator: what it calls comes here by itself
        for kind in types:
            if kind not in PLAIN and kind.__torch_dispatch__ is not NO_DISPATCH:  # bitsandbytes' parameters have none
                if kind.__module__.startswith(FAKE):
                    return func(*args, **kwargs)
                return NotImplemented  # the subclass takes itself apart, with this mode still on
        if operator.composite and torch.is_inference_mode_enabled():  # there composite operators arrive whole
            with self.on_this_thread():
                return func.decompose(*args, **kwargs)
        thread = self._thread
        thread.operator = operator
        try:
            if operator.special:
                done, out = self._special(func, operator, args, kwargs)
                if done:
                    return out
            elif operator.has_parts:
                out = self._launch_in_parts(func, args, kwargs)
                if operator.pure:
                    return out  # what its parts made is known, each by itself
            else:
                out = self._launch(func, args, kwargs)
        finally:
            thread.operator = None
        if operator.quiet:
            if operator.lifts and self._on_device(out):
                self._lifted(out)
            return out
        if operator.moves:
            self._moved(args, kwargs, out)
            return out
        if operator.pure and type(out) is torch.Tensor:
            if not self._on_device(out):
                return out
            dtype = out.dtype
            size, limit = self._limits.get(dtype) or self._limit(dtype)
            num_bytes = out.numel() * size
            if num_bytes > limit and (dtype not in MASKS or not self._mask_is_known(operator, args, kwargs, num_bytes)):
                self._is_big(out, args, num_bytes)
                return out
        self._follow(func, operator, args, kwargs, out)
        return out

    def _launch(self, func, args, kwargs):
        return func(*args, **kwargs)

    def _launch_in_parts(self, func, args, kwargs):
        """A library's own operator, written in others (bitsandbytes' int8 looks for outliers): those come here, too."""
        with self.on_this_thread():
            return func._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)

    def _learn(self, func):
        if not isinstance(func, torch._ops.OpOverload):
            return None
        self._operators[func] = operator = Operator(func)
        return operator

    def _limit(self, dtype):
        whole = not (dtype.is_floating_point or dtype.is_complex)
        found = (itemsize(dtype), self.policy.int_max_bytes if whole else self.policy.float_max_bytes)
        self._limits[dtype] = found
        return found

    def _is_big(self, out, args, num_bytes):
        try:
            address = out.data_ptr()
            if args and isinstance(args[0], torch.Tensor) and args[0].data_ptr() == address:
                return  # the same memory under another shape
        except RuntimeError:  # sparse, or without memory of its own
            return
        self._mark_uncomputed(address, num_bytes)

    def _mask_is_known(self, operator, args, kwargs, num_bytes):
        """Whether a large mask or index can be computed: all that it is made from is small or itself known."""
        if num_bytes > self.policy.mask_max_bytes or not operator.trusted or operator.empty:
            return False
        if operator.shape_only:
            return True
        for given in tensors_in(args, kwargs):
            size, limit = self._limits.get(given.dtype) or self._limit(given.dtype)
            num_bytes = given.numel() * size
            if not self._on_device(given):
                if num_bytes > limit:
                    return False
                continue
            too_big = num_bytes > limit and (given.dtype not in MASKS or num_bytes > self.policy.mask_max_bytes)
            if too_big or self.state(given) == UNCOMPUTED:
                return False
        return True

    # -- what is known --

    def state(self, tensor):
        """UNCOMPUTED, ASSUMED or COMPUTED: the least that holds for every byte of a tensor of the card."""
        spans, found = runs(tensor), COMPUTED
        if spans is None:
            spans = [span(tensor)]
        assumed = self.assumed
        for address, num_bytes in spans:
            if not self._is_computed(address, num_bytes):
                return UNCOMPUTED
            if found == COMPUTED and len(assumed) and assumed.overlaps(address, address + num_bytes):
                found = ASSUMED
        return found

    def _mark(self, tensor, state):
        if state == UNCOMPUTED and tensor.is_contiguous():
            self._mark_uncomputed(tensor.data_ptr(), tensor.numel() * itemsize(tensor.dtype))
            return
        spans = runs(tensor)
        if spans is None:  # too many pieces: all that lies between loses its mark, and none is given
            if state != COMPUTED:
                self._mark_uncomputed(*span(tensor))
            return
        for address, num_bytes in spans:
            if state == UNCOMPUTED:
                self._mark_uncomputed(address, num_bytes)
                continue
            self.driver.mark_computed(address, num_bytes)  # for the driver an assumed value is one to hand out as it is
            (self.assumed.add if state == ASSUMED else self.assumed.discard)(address, address + num_bytes)

    def _fill(self, tensor, name=""):
        """Give a small tensor of the card what the policy says of values that nobody computed."""
        over, contents = alias(tensor), self.policy.contents
        if contents == "random":
            if tensor.dtype.is_floating_point:
                over.uniform_(-1, 1, generator=self._random)
            else:
                over.copy_(torch.randint(0, 2, tensor.shape, generator=self._random, device="cpu"))
        else:
            over.fill_(1 if contents == "ones" else LIKELY.get(name, 0))

    def _settle(self, tensor):
        """Before an uncomputed small tensor is used or read: its uncomputed bytes get the policy's contents, and
        count as assumed."""
        spans = runs(tensor)
        if spans is None:
            return
        size = itemsize(tensor.dtype)
        pending = [(address, num_bytes) for address, num_bytes in spans if not self._is_computed(address, num_bytes)]
        if pending == spans and not any(self._any_computed(address, num_bytes, size) for address, num_bytes in spans):
            self._fill(tensor)
            self._mark(tensor, ASSUMED)
            return
        while pending:  # partly computed: halve down to single elements, never write over a computed one
            address, num_bytes = pending.pop()
            if self._is_computed(address, num_bytes):
                continue
            if num_bytes <= size:
                one = tensor.as_strided((1,), (1,), tensor.storage_offset() + (address - tensor.data_ptr()) // size)
                self._fill(one)
                self._mark(one, ASSUMED)
                continue
            half = num_bytes // size // 2 * size
            pending += [(address, half), (address + half, num_bytes - half)]

    def _any_computed(self, address, num_bytes, size):
        """Whether any element within is computed; asks the driver in pieces, which stops at the first that is."""
        if num_bytes <= size:
            return bool(self._is_computed(address, num_bytes))
        return any(self._is_computed(address + at, size) for at in range(0, num_bytes, size))

    # -- values --

    def _follow(self, func, operator, args, kwargs, out):
        """After a launch: compute small results for real, assume them, or mark them as not computed."""
        returned = tensors_in((out,) if not isinstance(out, (list, tuple)) else out, {})
        written = written_in(operator, func, args, kwargs) if not operator.pure else []
        outs = written or returned
        if not outs or not all(map(self._on_device, outs)) or type(outs[0]).__module__.startswith(FAKE):
            return
        if any(at.layout != torch.strided for at in outs):
            return
        if operator.empty:
            for at in outs:
                self._mark(at, UNCOMPUTED)
            return
        self.num_launched += 1
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            known = self._known_inputs(operator, args, kwargs, written)
            small = all(self._is_small(at) for at in outs) or (
                known > UNCOMPUTED and all(self._is_small_mask(at) for at in outs)
            )
            if operator.route and known != COMPUTED and self._routes(args[0], outs):
                self._route(operator, args, kwargs, outs)
            elif known < 0 or not small or not operator.trusted or (known == UNCOMPUTED and self._is_chain(outs)):
                if not (
                    small and operator.pure and operator.trusted and self._stand_in(func, operator, args, kwargs, outs)
                ):
                    self._assume(operator, outs, written)
            else:
                self._compute(func, operator, args, kwargs, returned, outs, known)

    def _is_small(self, tensor):
        size, limit = self._limits.get(tensor.dtype) or self._limit(tensor.dtype)
        return tensor.numel() * size <= limit

    def _is_small_mask(self, tensor):
        return self._is_small(tensor) or (
            tensor.dtype in MASKS and tensor.numel() * itemsize(tensor.dtype) <= self.policy.mask_max_bytes
        )

    def _is_chain(self, outs):
        return all(
            at.is_floating_point() and at.numel() * itemsize(at.dtype) > self.policy.float_chain_max_bytes
            for at in outs
        )

    def _known_inputs(self, operator, args, kwargs, written):
        """The least state among what an operator reads; -1 where one of them is too big to be read at all."""
        if operator.shape_only:
            return COMPUTED
        ignored = {id(at) for at in written} if operator.overwrites else ()
        found = COMPUTED
        for given in tensors_in(args, kwargs):
            if id(given) in ignored:
                continue
            if given.layout != torch.strided:
                return -1
            if not self._on_device(given):
                if not self._is_small_mask(given):
                    return -1
                continue
            if not self._is_small_mask(given):
                return -1
            state = self.state(given)
            if state == UNCOMPUTED and not self._is_small(given):
                return -1
            found = min(found, state)
        return found

    def _assume(self, operator, outs, written):
        self.num_assumed += 1
        for at in outs:
            if not self._is_small(at) or (not written and self._is_chain([at])):
                self._mark(at, UNCOMPUTED)
                continue
            if not written:
                self._fill(at, operator.name)
            elif self.state(at) == UNCOMPUTED:
                self._settle(at)  # a gradient that was added to: not what was left in that memory
            self._mark(at, ASSUMED)  # what was written into keeps its contents: a count of overflows stays at none

    def _stand_in(self, func, operator, args, kwargs, outs):
        """A mask made element by element from big unknown tensors (``x == x``, ``x != inf``): computed as if they
        held the contents of the policy, so that finite stays finite; -> whether it was one."""
        if any(at.dtype not in MASKS or not at.dim() for at in outs):
            return False
        largest = max(at.numel() for at in outs)
        if any(at.numel() > largest or at.layout != torch.strided for at in tensors_in(args, kwargs)):
            return False

        def constant(given):
            if isinstance(given, torch.Tensor) and self._on_device(given) and self.state(given) == UNCOMPUTED:
                value = 1 if self.policy.contents != "zeros" else 0
                return torch.full((), value, dtype=given.dtype, device="cpu").expand(given.shape)
            return [constant(at) for at in given] if isinstance(given, (list, tuple)) else self._on_cpu(given)

        try:
            result = func(*map(constant, args), **{name: constant(at) for name, at in kwargs.items()})
        except NO_CPU_KERNEL:
            return False
        results = tensors_in((result,), {})
        if len(results) != len(outs) or any(a.shape != b.shape for a, b in zip(results, outs, strict=True)):
            return False
        self.num_assumed += 1
        for at, value in zip(outs, results, strict=True):
            alias(at).copy_(value)
            self._mark(at, ASSUMED)
        return True

    def _routes(self, scores, outs):
        """Whether a choice among scores is to be made up: its indices are small enough, however large the scores."""
        indices = [at for at in outs if at.dtype == torch.int64]
        within = all(map(self._is_small_mask, indices) if indices else map(self._is_small, outs))
        return within and scores.is_floating_point()

    def _route(self, operator, args, kwargs, outs):
        self.num_assumed += 1
        has_indices = routing.fill_indices(operator.route, args, kwargs, outs, self.policy)
        for at in outs:
            if not (has_indices and at.dtype == torch.int64):
                if not self._is_small(at):
                    self._mark(at, UNCOMPUTED)
                    continue
                self._fill(at, operator.name)
            self._mark(at, ASSUMED)

    def _moved(self, args, kwargs, out):
        """After a collective: the driver moved what is small, and knows which bytes of the results are computed.

        Where this rank gave assumed values the results are assumed; what another rank only assumed is not known here.
        """

        def spans(of):
            found = (at for at in tree_leaves(of) if isinstance(at, torch.Tensor) and at.layout == torch.strided)
            return [span(at) for at in found if self._on_device(at) and at.numel()]

        assumed = any(self.assumed.overlaps(address, address + size) for address, size in spans((args, kwargs)))
        for address, size in spans(out):
            known = assumed and self._is_computed(address, size)
            (self.assumed.add if known else self.assumed.discard)(address, address + size)

    def _compute(self, func, operator, args, kwargs, returned, outs, known):
        if known == UNCOMPUTED:
            for given in tensors_in(args, kwargs):
                ignored = operator.overwrites and any(given is at for at in outs)
                if self._on_device(given) and not ignored and self.state(given) == UNCOMPUTED:
                    self._settle(given)
            known = ASSUMED
        try:
            result = self._run_on_cpu(func, operator, args, kwargs)
        except NO_CPU_KERNEL as error:
            kind = f"{operator.name}: {str(error).splitlines()[0][:100] if str(error) else type(error).__name__}"
            self.without_cpu_kernel[kind] = self.without_cpu_kernel.get(kind, 0) + 1
            self._assume(operator, outs, not operator.pure)
            return
        differing = []
        if operator.pure:
            results = tensors_in((result,) if not isinstance(result, (list, tuple)) else result, {})
            for at, value in zip(returned, results, strict=False):
                if at.shape != value.shape:  # the operator itself found another count: say so rather than guess
                    differing.append(at)
                    continue
                over = alias(at)
                if over.data_ptr() != value.data_ptr():
                    over.copy_(value)
        self.num_computed += 1
        for at in outs:
            self._mark(at, UNCOMPUTED if any(at is other for other in differing) else known)

    def _on_cpu(self, given):
        if isinstance(given, torch.Tensor):
            return alias(given) if self._on_device(given) else given
        if isinstance(given, (list, tuple)):
            return [self._on_cpu(inner) for inner in given]
        return self._cpu if isinstance(given, torch.device) else given

    def _run_on_cpu(self, func, operator, args, kwargs):
        args = [self._on_cpu(given) for given in args]
        kwargs = {name: self._on_cpu(given) for name, given in kwargs.items() if name != "pin_memory"}
        if not operator.random:
            return func(*args, **kwargs)
        seed = getattr(self._thread, "seed", 0)
        if operator.has_generator:
            kwargs["generator"] = torch.Generator(device="cpu").manual_seed(seed)
            return func(*args, **kwargs)
        saved = torch.random.get_rng_state()
        try:
            torch.default_generator.manual_seed(seed)
            return func(*args, **kwargs)
        finally:
            torch.random.set_rng_state(saved)

    # -- operators that need something before they run ----------------------------------------------------------------

    def _special(self, func, operator, args, kwargs):
        """-> (whether all is done, the result)."""
        if operator.reads_item:
            return True, self._item(func, args, kwargs)
        if operator.name == "aten::equal":
            return True, self._equal(func, args, kwargs)
        if operator.name in COPIES:
            return self._copy(func, operator, args, kwargs)
        if operator.random:
            self._thread.seed = self._seed(args, kwargs)
        if operator.counted:
            return False, self._counted(func, operator, args, kwargs)
        return False, self._launch(func, args, kwargs)

    @contextmanager
    def _handled(self):
        """Within: what the host reads has been noted already."""
        self._thread.handled = True
        try:
            yield
        finally:
            self._thread.handled = False

    def _lifted(self, tensor):
        """What ``torch.tensor`` and its like have copied to the card out of this mode's sight: numbers of the host's,
        whatever was assumed of the memory before. Which bytes came, the driver knows."""
        address, num_bytes = span(tensor)
        self.assumed.discard(address, address + num_bytes)

    def _about_to_read(self, operator_name, tensor, *, decides_shape=False):
        """The host is about to read ``tensor``: note it unless all of it was computed; small ones get the policy's
        contents."""
        state = self.state(tensor) if tensor.numel() else COMPUTED
        if state == COMPUTED:
            return COMPUTED
        self.reads.note(
            operator_name, STATES[state], str(tensor.dtype).removeprefix("torch."), tensor.numel(),
            dtype_is_float=tensor.is_floating_point(), decides_shape=decides_shape, depth=2,
        )  # fmt: skip
        if state == UNCOMPUTED and self._is_small(tensor):
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                self._settle(tensor)
        return state

    def _item(self, func, args, kwargs):
        if not self._on_device(args[0]) or type(args[0]).__module__.startswith(FAKE):
            return func(*args, **kwargs)
        self._about_to_read("item", args[0])
        with self._handled():
            return func(*args, **kwargs)

    def _equal(self, func, args, kwargs):
        first, second = args[0], args[1]
        if not (self._on_device(first) and self._on_device(second)) or first.shape != second.shape:
            return func(*args, **kwargs)
        small = self._is_small_mask(first) and self._is_small_mask(second)
        states = [self._about_to_read("equal", at) for at in (first, second)]
        with self._handled():
            self._launch(func, args, kwargs)
        if small and all(s > UNCOMPUTED or self._is_small(at) for s, at in zip(states, (first, second), strict=True)):
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                return func(alias(first), alias(second))
        return self.policy.contents != "random" or bool(torch.randint(0, 2, (), generator=self._random))

    def _copy(self, func, operator, args, kwargs):
        source = args[1] if operator.name == "aten::copy_" else args[0]
        if type(source).__module__.startswith(FAKE) or source.layout != torch.strided:
            return True, self._launch(func, args, kwargs)
        if operator.name == "aten::copy_":
            to_host = not self._on_device(args[0])
        else:
            device = kwargs.get("device")
            to_host = device is not None and torch.device(device).type == "cpu" and self._device_type != "cpu"
        if not self._on_device(source):
            if to_host or ("device" not in kwargs and operator.name != "aten::copy_"):
                return True, self._launch(func, args, kwargs)
        elif to_host:
            return True, self._to_host(func, operator, args, kwargs, source)
        with self._handled():
            out = self._launch(func, args, kwargs)
        if type(out).__module__.startswith(FAKE) or not self._on_device(out) or self._is_small(out):
            return False, out
        if out.dtype == source.dtype and out.is_contiguous() and source.is_contiguous():
            # one transfer: the driver itself knows what became of it
            address, num_bytes = out.data_ptr(), out.numel() * itemsize(out.dtype)
            if self._on_device(source) and out.dtype in MASKS and self.state(source) == ASSUMED:
                self.assumed.add(address, address + num_bytes)
            else:
                self.assumed.discard(address, address + num_bytes)
            return True, out
        if not self._on_device(source) and not self._is_small(source):
            self._mark(out, UNCOMPUTED)
            return True, out
        return False, out

    def _to_host(self, func, operator, args, kwargs, source):
        self._about_to_read("copy to the host", source)
        with self._handled():
            out = self._launch(func, args, kwargs)
        if self._is_small(source) and (
            not source.is_contiguous() or out.dtype != source.dtype or not out.is_contiguous()
        ):
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                out.copy_(alias(source))  # the kernel that would have packed it did nothing
        return out

    def _counted(self, func, operator, args, kwargs):
        asked = [at for at in counts.deciding(operator.name, args) if self._on_device(at)]
        if not asked and operator.name != "aten::multinomial":
            return self._launch(func, args, kwargs)
        found, unknown = [], 0
        for at in asked:
            state = self._about_to_read(operator.name.removeprefix("aten::"), at, decides_shape=True)
            unknown += not self._is_small_mask(at) or (state == UNCOMPUTED and not self._is_small(at))
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            if unknown:
                share = {"zeros": 0, "ones": 1, "random": 0.5}[self.policy.contents]
                found = [int(at.numel() * share) for at in asked]
            else:
                found = self._counts(operator.name, args, kwargs)
        with self._handled():
            for count in found:
                self.driver.inject_count(count)
            try:
                return self._launch(func, args, kwargs)
            finally:
                self.driver.clear_counts()

    def _counts(self, name, args, kwargs):
        def small(given):
            if not isinstance(given, torch.Tensor):
                return [small(inner) for inner in given] if isinstance(given, (list, tuple)) else given
            return alias(given) if self._on_device(given) else given

        try:
            return counts.expected(name, [small(given) for given in args], kwargs)
        except (RuntimeError, IndexError):
            return []  # the call is wrong; let it say so itself

    def _seed(self, args, kwargs):
        """A seed for one random operator's CPU run, from the card's own generator: recomputation draws the same
        numbers."""
        generator = kwargs.get("generator")
        try:
            if generator is None and self._device_type == "cuda":
                device = args[0].device if args and isinstance(args[0], torch.Tensor) else kwargs.get("device")
                if device is None or torch.device(device).type != "cuda":
                    return 0
                index = torch.device(device).index
                generator = torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
            return (generator.initial_seed() * 1_000_003 + generator.get_offset()) % (1 << 63)
        except (RuntimeError, AttributeError, IndexError):
            return self.num_launched

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

    def driver_read(self, address, num_bytes):
        """The driver's callback: the host copied bytes that nobody computed, from within an operator or from outside
        torch."""
        if getattr(self._thread, "handled", False):
            return
        operator = getattr(self._thread, "operator", None)
        self.reads.note(
            f"within {operator.name}" if operator else "outside torch's dispatcher", "uncomputed", "bytes", num_bytes,
            decides_shape=num_bytes <= 8, depth=1,
        )  # fmt: skip

    def report(self):
        """What was assumed and who read it, as plain dicts."""
        reads = self.reads.as_list()
        return {
            "policy": self.policy.as_dict(),
            "num_results_computed": self.num_computed,
            "num_results_assumed": self.num_assumed,
            "num_reads": self.reads.num_reads,
            "num_reads_that_could_have_steered": sum(r["num_reads"] for r in reads if r["could_have_steered"]),
            "num_uncomputed_reads_of_the_driver": int(self.driver.uncomputed_reads()),
            "reads": reads,
            "without_cpu_kernel": dict(sorted(self.without_cpu_kernel.items(), key=lambda item: -item[1])),
        }
