"""Track which bytes of the emulated card hold computed values, which hold assumed ones, and which nobody computed.

In: tensors of the card. Out: their state, and marks: those of computed bytes are kept by the driver, those of assumed
ones here. Small tensors get the policy's contents. It never allocates on the card.
"""

from operator import attrgetter

import torch

from .intervals import Intervals
from .memory import alias, ends, itemsize, runs, span
from .policy import LIKELY

UNCOMPUTED, ASSUMED, COMPUTED = 0, 1, 2
STATES = ("uncomputed", "assumed", "computed")
MASKS = frozenset({torch.bool, torch.int32, torch.int64})


class Known:
    """``driver`` is a ``Driver`` (or what has its calls), ``policy`` a ``Policy``.

    ``device_type``: whose tensors lie in the emulated memory.
    """

    def __init__(self, driver, policy, device_type):
        self.driver, self.policy, self.device_type = driver, policy, device_type
        self.assumed = Intervals()
        self.of_masks = Intervals()  # large floats that are a mask or an index, cast, or made from such alone
        self.absent, self._absent_said = Intervals(), {}  # small tensors of ranks that do not run (one_rank.py)
        self.limits = {}  # by dtype: bytes of an element, and of the largest tensor that is computed
        self.random = torch.Generator(device="cpu").manual_seed(policy.seed)
        self.on_device = attrgetter(f"is_{device_type}")
        self.mark_uncomputed, self.is_computed = driver.mark_uncomputed, driver.is_computed

    # -- sizes -------------------------------------------------------------------------------------------------------

    def limit(self, dtype):
        """Bytes of an element of this dtype, and of the largest tensor that is computed."""
        whole = not (dtype.is_floating_point or dtype.is_complex)
        found = (itemsize(dtype), self.policy.int_max_bytes if whole else self.policy.float_max_bytes)
        self.limits[dtype] = found
        return found

    def is_small(self, tensor):
        """Return True if it is so small that it is always computed."""
        size, limit = self.limits.get(tensor.dtype) or self.limit(tensor.dtype)
        return tensor.numel() * size <= limit

    def is_small_mask(self, tensor):
        """Return True if it is so small that it is always computed, with the larger limit of a mask or index."""
        return self.is_small(tensor) or (
            tensor.dtype in MASKS and tensor.numel() * itemsize(tensor.dtype) <= self.policy.mask_max_bytes
        )

    def is_of_mask(self, tensor):
        """Return True if it is a large float that was made from masks or indices alone, no larger than those may be."""
        if not (tensor.is_floating_point() and self.of_masks and self.on_device(tensor)):
            return False
        num_bytes = tensor.numel() * itemsize(tensor.dtype)
        return num_bytes <= self.policy.mask_max_bytes and self.of_masks.overlaps(*ends(tensor))

    def is_chain(self, outs):
        """Return True if floats are so many that values that were assumed are not passed on through them."""
        limit = self.policy.float_chain_max_bytes
        return all(at.is_floating_point() and at.numel() * itemsize(at.dtype) > limit for at in outs)

    # -- states ------------------------------------------------------------------------------------------------------

    def state(self, tensor):
        """UNCOMPUTED, ASSUMED or COMPUTED: the least that holds for every byte of a tensor of the card."""
        if tensor.is_contiguous():
            address, num_bytes = tensor.data_ptr(), tensor.numel() * itemsize(tensor.dtype)
            if not num_bytes:
                return COMPUTED
            if not self.is_computed(address, num_bytes):
                return UNCOMPUTED
            return ASSUMED if self.assumed.overlaps(address, address + num_bytes) else COMPUTED
        if not self.driver.any_computed(*span(tensor)):
            return UNCOMPUTED
        spans, found = runs(tensor), COMPUTED
        if spans is None:
            spans = [span(tensor)]
        assumed = self.assumed
        for address, num_bytes in spans:
            if not self.is_computed(address, num_bytes):
                return UNCOMPUTED
            if found == COMPUTED and assumed.overlaps(address, address + num_bytes):
                found = ASSUMED
        return found

    def mark(self, tensor, state):
        """Every byte of the tensor has this state from here on."""
        if len(self.absent):
            self.absent.discard(*ends(tensor))
        if state == UNCOMPUTED and tensor.is_contiguous():
            self.mark_uncomputed(tensor.data_ptr(), tensor.numel() * itemsize(tensor.dtype))
            return
        if state == UNCOMPUTED and not self.driver.any_computed(*span(tensor)):
            return  # as it is; a row of each matrix of a batch has as many runs as there are matrices
        spans = runs(tensor)
        if spans is None:  # too many pieces: all that lies between loses its mark, and none is given
            if state != COMPUTED:
                self.mark_uncomputed(*span(tensor))
            return
        for address, num_bytes in spans:
            if state == UNCOMPUTED:
                self.mark_uncomputed(address, num_bytes)
                continue
            self.driver.mark_computed(address, num_bytes)  # for the driver an assumed value is one to hand out as it is
            (self.assumed.add if state == ASSUMED else self.assumed.discard)(address, address + num_bytes)

    def hold_as_absent(self, tensor, said, *, is_assumed):
        """The tensor would hold another rank's values, which ``said`` names."""
        if is_assumed:
            self.mark(tensor, ASSUMED)
        start, stop = ends(tensor)
        self.absent.add(start, stop)
        self._absent_said[start] = (said, is_assumed)

    def said_of_absent(self, tensor):
        """Return the (words, is_assumed) recorded for a tensor over that memory, or None."""
        if not len(self.absent):
            return None
        start, stop = ends(tensor)
        if not self.absent.overlaps(start, stop):
            return None
        return self._absent_said[max(at for at in self._absent_said if at < stop)]

    def fill(self, tensor, name=""):
        """Give a small tensor of the card what the policy says of values that nobody computed."""
        over, contents = alias(tensor), self.policy.contents
        if contents == "random":
            if tensor.dtype.is_floating_point:
                over.uniform_(-1, 1, generator=self.random)
            else:
                over.copy_(torch.randint(0, 2, tensor.shape, generator=self.random, device="cpu"))
        else:
            over.fill_(1 if contents == "ones" else LIKELY.get(name, 0))

    def hold_as_mask(self, tensor):
        """The large float is made from masks or indices alone."""
        self.of_masks.add(*ends(tensor))

    def settle(self, tensor):
        """Before an uncomputed small tensor is used or read: its uncomputed bytes get the policy's contents, and
        count as assumed."""
        spans = runs(tensor)
        if spans is None:
            return
        size = itemsize(tensor.dtype)
        pending = [(address, num_bytes) for address, num_bytes in spans if not self.is_computed(address, num_bytes)]
        if pending == spans and not any(self.driver.any_computed(address, num_bytes) for address, num_bytes in spans):
            self.fill(tensor)
            self.mark(tensor, ASSUMED)
            return
        while pending:  # partly computed: halve down to single elements, never write over a computed one
            address, num_bytes = pending.pop()
            if self.is_computed(address, num_bytes):
                continue
            if num_bytes <= size:
                one = tensor.as_strided((1,), (1,), tensor.storage_offset() + (address - tensor.data_ptr()) // size)
                self.fill(one)
                self.mark(one, ASSUMED)
                continue
            half = num_bytes // size // 2 * size
            pending += [(address, half), (address + half, num_bytes - half)]
