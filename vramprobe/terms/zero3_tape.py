"""A tape on which one rank's gradients go into DeepSpeed's bucket as they come: ZeRO-1 and ZeRO-2 over the same walk.

In: bytes of the bucket and of what is averaged for this rank. Out: the Walk of one rank. No torch here. The order of
events is DeepSpeed 0.19's, deepspeed/runtime/zero/stage_1_and_2.py: ``setup_buckets`` takes the bucket whole at the
first gradient, however little goes into it; each gradient is copied there and let go of
(``reduce_independent_p_g_buckets_and_remove_grads``); what is in it is joined to one tensor to be reduced, and raised
to the dtype that is sent (``allreduce_bucket``), which for less than a bucket is at the end of backward; then the
bucket goes (``_release_ipg_buffers``), unless ZeRO-1 has its gradients in it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from vramprobe.terms.graph import CAUSES, Leaf, Place, Value
from vramprobe.terms.rank_tape import RANK_CAUSES
from vramprobe.terms.setup import Setup
from vramprobe.terms.tape import Covers, Tape
from vramprobe.terms.walk import Walk, one_of_each_kind, walk_layers


class Bucket3(NamedTuple):
    """In bytes; ``kept``: this rank's part of the gradients, there all along where the bucket is filled more than once.

    ``stays``: until the optimizer has stepped.
    """

    whole: int
    joined: int  # while it is reduced
    kept: int
    is_filled: bool
    stays: bool


@lru_cache(maxsize=2048)
def zero_walk(setup: Setup, bucket: Bucket33) -> Walk:
    """The Walk of one rank."""
    return walk_layers(setup, one_of_each_kind(setup.arch), ZeroTape(setup.sizes.covers, bucket))


class ZeroTape(Tape):
    """A Tape whose gradients do not stay."""

    causes = (*CAUSES, *RANK_CAUSES)
    holds_whole_gradients = False

    def __init__(self, covers: Covers, bucket: Bucket33) -> None:
        super().__init__(covers)
        self._bucket = bucket
        self._buffer: Value | None = None
        self._kept: Value | None = None

    def _accumulate(self, leaf: Leaf) -> None:
        """Into the bucket."""
        if self._buffer is None:
            self._buffer = self._bytes(self._bucket.whole, "gradient_buckets")
            if self._bucket.is_filled:
                self._keep()
        leaf.gradient = None
        super()._accumulate(leaf)
        leaf.gradient = None

    def _go_to(self, place: Place) -> None:
        if place == ("backward", "end"):
            joined = self._bytes(self._bucket.joined, "gradient_buckets")
            del joined
            self._keep()
            if not self._bucket.stays:
                self._buffer = None
        super()._go_to(place)

    def _keep(self) -> None:
        if self._kept is None:
            self._kept = self._bytes(self._bucket.kept, "gradients")

    def _bytes(self, num_bytes: int, cause: str) -> Value:
        return self.new(num_bytes, "int8", cause)
