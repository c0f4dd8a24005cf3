"""The results of launches on the emulated card: computed on the CPU, assumed, or marked as not computed.

In: an operator, its arguments, what its launch returned. Out: values in the card's memory, and marks. It never launches
anything, and never notes a read.
"""

import threading

import torch
from torch.utils._pytree import tree_leaves

from . import routing
from .known import ASSUMED, COMPUTED, MASKS, UNCOMPUTED
from .memory import alias, ends, span
from .operators import tensors_in, written_in

# What an operator raises that has no kernel for these arguments on the CPU.
NO_CPU_KERNEL = (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError)
FAKE = "torch._subclasses"


class Results:
    """``known``: a ``Known``."""

    def __init__(self, known):
        self.known = known
        self.num_launched = 0
        self._cpu, self._thread = torch.device("cpu"), threading.local()

    def follow(self, func, operator, args, kwargs, out):
        """After a launch: compute small results for real, assume them, or mark them as not computed."""
        is_one = operator.pure and type(out) is torch.Tensor  # of the card, or the mode had not come here
        returned = [out] if is_one else tensors_in((out,) if not isinstance(out, (list, tuple)) else out, {})
        written = written_in(operator, func, args, kwargs) if not operator.pure else []
        outs = written or returned
        if not is_one and (
            not outs or not all(map(self.known.on_device, outs)) or type(outs[0]).__module__.startswith(FAKE)
        ):
            return
        if any(at.layout != torch.strided for at in outs):
            return
        if operator.empty:
            for at in outs:
                self.known.mark(at, UNCOMPUTED)
            return
        self.num_launched += 1
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            known = self._known_inputs(operator, args, kwargs, written)
            if known <= UNCOMPUTED and is_one and not operator.route and self.known.is_chain(outs):
                self.known.mark(out, UNCOMPUTED)
                return
            of_mask = known == COMPUTED and operator.pure and self.is_of_mask(operator, args, outs)
            small = all(self.known.is_small(at) for at in outs) or (
                known > UNCOMPUTED and all(of_mask or self.known.is_small_mask(at) for at in outs)
            )
            if operator.route and known != COMPUTED and self._routes(args[0], outs):
                self._route(operator, args, kwargs, outs)
            elif known < 0 or not small or not operator.trusted or (known == UNCOMPUTED and self.known.is_chain(outs)):
                if not (
                    small and operator.pure and operator.trusted and self._stand_in(func, operator, args, kwargs, outs)
                ):
                    self._assume(operator, outs, written)
            else:
                self._compute(func, operator, args, kwargs, returned, outs, known)
                for at in outs if of_mask else ():
                    self.known.hold_as_mask(at)

    def _known_inputs(self, operator, args, kwargs, written):
        """The least state among what an operator reads; -1 where one of them is too big to be read at all."""
        if operator.shape_only:
            return COMPUTED
        ignored = {id(at) for at in written} if operator.overwrites else ()
        found, known = COMPUTED, self.known
        for given in tensors_in(args, kwargs):
            if id(given) in ignored:
                continue
            if given.layout != torch.strided or not (known.is_small_mask(given) or known.is_of_mask(given)):
                return -1
            if not known.on_device(given):
                continue
            state = known.state(given)
            if state == UNCOMPUTED and not known.is_small(given):
                return -1
            found = min(found, state)
        return found

    def too_big(self, out, args, num_bytes):
        """After a launch whose result is not computed for its size."""
        try:
            address = out.data_ptr()
            if args and isinstance(args[0], torch.Tensor) and args[0].data_ptr() == address:
                return  # the same memory under another shape
        except RuntimeError:  # sparse, or without memory of its own
            return
        self.known.mark_uncomputed(address, num_bytes)

    def is_of_mask(self, operator, args, outs):
        """Return True if large floats are a mask or an index that is cast, or made from one that was: their values are
        as well known. Gemma 4 counts an image's tokens by such a one.
        """
        if operator.name == "aten::_to_copy" and args[0].dtype in MASKS:
            return all(at.is_floating_point() for at in outs)
        known = self.known
        if not known.of_masks or not all(at.is_floating_point() for at in outs):
            return False
        return any(isinstance(at, torch.Tensor) and known.is_of_mask(at) for at in args)

    def mask_is_known(self, operator, args, kwargs, num_bytes):
        """Return True if a large mask or index can be computed: all that it is made from is small or itself known."""
        if num_bytes > self.known.policy.mask_max_bytes or not operator.trusted or operator.empty:
            return False
        if operator.shape_only:
            return True
        for given in tensors_in(args, kwargs):
            size, limit = self.known.limits.get(given.dtype) or self.known.limit(given.dtype)
            num_bytes = given.numel() * size
            if not self.known.on_device(given):
                if num_bytes > limit:
                    return False
                continue
            within = num_bytes <= self.known.policy.mask_max_bytes and given.dtype in MASKS
            if (num_bytes > limit and not (within or self.known.is_of_mask(given))) or self.known.state(
                given
            ) == UNCOMPUTED:
                return False
        return True

    def _assume(self, operator, outs, written):
        for at in outs:
            is_fresh = not written or not self.known.driver.any_computed(*span(at))
            if not self.known.is_small(at) or (is_fresh and self.known.is_chain([at])):
                self.known.mark(at, UNCOMPUTED)
                continue
            if not written:
                self.known.fill(at, operator.name)
            elif self.known.state(at) == UNCOMPUTED:
                self.known.settle(at)  # a gradient that was added to: not what was left in that memory
            self.known.mark(at, ASSUMED)  # what was written into keeps its contents: a count of overflows stays at none

    def _stand_in(self, func, operator, args, kwargs, outs):
        """A mask made element by element from big unknown tensors (``x == x``, ``x != inf``): computed as if they
        held the contents of the policy, so that finite stays finite; -> whether it was one."""
        if any(at.dtype not in MASKS or not at.dim() for at in outs):
            return False
        largest = max(at.numel() for at in outs)
        if any(at.numel() > largest or at.layout != torch.strided for at in tensors_in(args, kwargs)):
            return False

        def constant(given):
            if (
                isinstance(given, torch.Tensor)
                and self.known.on_device(given)
                and self.known.state(given) == UNCOMPUTED
            ):
                value = 1 if self.known.policy.contents != "zeros" else 0
                return torch.full((), value, dtype=given.dtype, device="cpu").expand(given.shape)
            return [constant(at) for at in given] if isinstance(given, (list, tuple)) else self._on_cpu(given)

        try:
            result = func(*map(constant, args), **{name: constant(at) for name, at in kwargs.items()})
        except NO_CPU_KERNEL:
            return False
        results = tensors_in((result,), {})
        if len(results) != len(outs) or any(a.shape != b.shape for a, b in zip(results, outs, strict=True)):
            return False
        for at, value in zip(outs, results, strict=True):
            alias(at).copy_(value)
            self.known.mark(at, ASSUMED)
        return True

    def _routes(self, scores, outs):
        """Return True if a choice among scores must be made up: its indices are small enough, at any size of scores."""
        indices = [at for at in outs if at.dtype == torch.int64]
        within = all(map(self.known.is_small_mask, indices) if indices else map(self.known.is_small, outs))
        return within and scores.is_floating_point()

    def _route(self, operator, args, kwargs, outs):
        has_indices = routing.fill_indices(operator.route, args, kwargs, outs, self.known.policy)
        for at in outs:
            if not (has_indices and at.dtype == torch.int64):
                if not self.known.is_small(at):
                    self.known.mark(at, UNCOMPUTED)
                    continue
                self.known.fill(at, operator.name)
            self.known.mark(at, ASSUMED)

    def moved(self, args, kwargs, out):
        """After a collective: the driver moved what is small, and knows which bytes of the results are computed.

        Where this rank gave assumed values the results are assumed; what another rank only assumed is not known here.
        """

        def spans(of):
            found = (at for at in tree_leaves(of) if isinstance(at, torch.Tensor) and at.layout == torch.strided)
            return [span(at) for at in found if self.known.on_device(at) and at.numel()]

        assumed = any(self.known.assumed.overlaps(address, address + size) for address, size in spans((args, kwargs)))
        for address, size in spans(out):
            known = assumed and self.known.is_computed(address, size)
            (self.known.assumed.add if known else self.known.assumed.discard)(address, address + size)

    def lifted(self, tensor):
        """Forget assumptions about what ``torch.tensor`` and its like have copied to the card out of this mode's sight:
        numbers of the host's. The driver knows which bytes came.
        """
        self.known.assumed.discard(*ends(tensor))

    def _compute(self, func, operator, args, kwargs, returned, outs, known):
        if known == UNCOMPUTED:
            for given in tensors_in(args, kwargs):
                ignored = operator.overwrites and any(given is at for at in outs)
                if self.known.on_device(given) and not ignored and self.known.state(given) == UNCOMPUTED:
                    self.known.settle(given)
            known = ASSUMED
        try:
            result = self._run_on_cpu(func, operator, args, kwargs)
        except NO_CPU_KERNEL:
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
        for at in outs:
            self.known.mark(at, UNCOMPUTED if any(at is other for other in differing) else known)

    def _on_cpu(self, given):
        if isinstance(given, torch.Tensor):
            return alias(given) if self.known.on_device(given) else given
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

    def draw_seed(self, args, kwargs):
        """Before a random operator: the seed of its run on the CPU, from the card's own generator, so that
        recomputation draws the same numbers."""
        self._thread.seed = self._seed(args, kwargs)

    def _seed(self, args, kwargs):
        generator = kwargs.get("generator")
        try:
            if generator is None and self.known.device_type == "cuda":
                device = args[0].device if args and isinstance(args[0], torch.Tensor) else kwargs.get("device")
                if device is None or torch.device(device).type != "cuda":
                    return 0
                index = torch.device(device).index
                generator = torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
            return (generator.initial_seed() * 1_000_003 + generator.get_offset()) % (1 << 63)
        except (RuntimeError, AttributeError, IndexError):
            return self.num_launched
