"""A GPU as kernels see it: its compute capability and how many multiprocessors it has."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from vramprobe.catalog.contexts import threads_per_sm

#: Whose blocks may have 163 KiB of shared memory and more.
_MUCH_SHARED_MEMORY = ((8, 0), (9, 0), (10, 0), (10, 3))


class Chip(NamedTuple):
    """What decides which kernel a GPU runs and how large its workspace is; by default an A100."""

    capability: tuple[int, int] = (8, 0)
    num_sms: int = 108

    @property
    def threads_per_sm(self) -> int:
        """Threads that one multiprocessor holds at most."""
        return threads_per_sm(self.capability)

    @property
    def has_much_shared_memory(self) -> bool:
        """Whether a block may have 163 KiB of shared memory, as on data center GPUs from the A100 on."""
        return self.capability in _MUCH_SHARED_MEMORY

    @property
    def prefers_cudnn(self) -> bool:
        """transformers/cuda/sdp_utils.cpp, ``check_prefer_cudnn_attention``, with cuDNN 9.15 or newer."""
        return self.capability in ((9, 0), (10, 0), (10, 3))

    @property
    def lacks_wide_flash(self) -> bool:
        """Whether flash attention has no backward for some wide heads (transformers/cuda/sdp_utils.cpp,
        ``check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120``).
        """
        return self.capability in ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))


A100, _TURING, _ADA = Chip(), Chip((7, 5), 40), Chip((8, 9), 128)


class HasCapability(Protocol):
    """A GPU or a chip."""

    @property
    def capability(self) -> tuple[int, int] | None: ...


def chip_like(gpu: HasCapability | None) -> Chip:
    """One chip for all GPUs whose attention saves and allocates alike, so that they share a walk: of those before
    Ampere, those whose flash attention lacks wide heads, and all others (also AMD's, and where none is named).
    """
    if gpu is None or gpu.capability is None:
        return A100
    if gpu.capability < (8, 0):
        return _TURING
    return _ADA if Chip(gpu.capability).lacks_wide_flash else A100
