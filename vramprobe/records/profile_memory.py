"""Memory that a profile saw: highest points of phases, blocks alive at the peak, growth from step to step.

In: what the hook recorded, analysed. Out: frozen classes, bytes as integers, which a RankProfile holds (profile.py).
"""

from vramprobe.records.frozen import FrozenModel
from vramprobe.records.phase_memory import Amount, Composition

_MATTERS = 0.005  # as a share, of a peak that differs from step to step


class Live(Composition):
    """Live tensors of any command at one point in time; the parts add up to ``total_bytes`` exactly."""

    engine_weights_bytes: Amount = 0  # those of an inference engine within the process
    kv_cache_bytes: Amount = 0
    master_weights_bytes: Amount = 0  # copies of the weights that an optimizer steps in their place


class PhaseHighest(FrozenModel):
    """All phases of one name: the highest of each tier, which need not be of one moment."""

    name: str  # load, forward, backward, optimizer_step, zero_grad, evaluation, generation, save, merge, other
    num_phases: Amount
    allocated_bytes: Amount
    reserved_bytes: Amount | None = None
    device_bytes: int | None = None  # used on the device by all processes: at a phase's end; emulated, within it


class ProfilePeak(FrozenModel):
    """The highest memory of one rank, loading included: allocated by the phase that has it, the others over the run."""

    phase: str
    step: int | None = None  # 1-based; null outside the steps
    allocated_bytes: Amount
    requested_bytes: Amount | None = None  # the highest in that phase: without what the allocator rounds up
    reserved_bytes: Amount | None = None
    device_bytes: int | None = None  # over the run: NVML's highest on a real GPU, the driver's on an emulated one

    @property
    def said(self) -> str:
        """``backward of step 2``, ``load``."""
        return self.phase if self.step is None else f"{self.phase} of step {self.step}"


class BlocksAlike(FrozenModel):
    """Blocks of one size, cause and origin, alive at the peak."""

    size_bytes: Amount  # of each, as requested
    num_blocks: Amount
    cause: str
    line: str | None = None  # file:line, innermost outside torch; null on autograd's own threads
    function: str | None = None
    module: str | None = None  # Class.method around it, by the file's syntax
    parameter: str | None = None  # its name where it is one; numbers that differ stand as *

    @property
    def total_bytes(self) -> int:
        """All of them together."""
        return self.size_bytes * self.num_blocks


class PlaceBytes(FrozenModel):
    """Bytes live at the peak that one place requested."""

    place: str  # "file:line function", or "Class.method"
    cause: str | None = None  # null where blocks of several causes are counted together
    num_bytes: Amount
    num_blocks: Amount


class StepPeaks(FrozenModel):
    """Allocated peaks of whole steps, without the first."""

    lowest_bytes: Amount
    highest_bytes: Amount
    what: str | None = None  # differs between the two steps, where it matters

    @property
    def differ(self) -> bool:
        """Return True if the peaks differ by more than 0.5 %, which matters to a reader."""
        return self.highest_bytes - self.lowest_bytes > _MATTERS * self.highest_bytes


class LineGrowth(FrozenModel):
    """Bytes that one line's blocks add with each step."""

    place: str  # "file:line function"
    bytes_per_step: Amount


class KeptList(FrozenModel):
    """A collection of the program's that holds tensors of many steps."""

    name: str  # losses, self.losses
    file: str
    function: str
    num_tensors: Amount
    num_with_graph: Amount  # whose graph, and what that saved, they keep alive
    added_at: list[str] = []  # file:line


class MemoryGrowth(FrozenModel):
    """Requested bytes that each step from ``first_step`` to ``last_step`` left alive."""

    bytes_per_step: Amount
    first_step: int
    last_step: int
    full_at_step: int | None = None  # at the latest, if every step adds as much; null where the card is not known
    by_line: list[LineGrowth]  # of the allocations, the largest first
    kept: list[KeptList] = []


class HostPhase(FrozenModel):
    """Bytes of host memory that the ranks hold in one phase: CPU tensors and pinned memory."""

    name: str
    total_bytes: Amount  # of all ranks, each at its highest
    pinned_bytes: Amount  # of those, the highest of each rank
    num_ranks: Amount
    highest_rank_bytes: Amount


class HostMemory(FrozenModel):
    """By phase of the run. Not in it: Python, libraries, numpy, data loaders, and files that are mapped.

    ``mapped_bytes``: checkpoint files, each once however many ranks map it. They are pages of the file cache, which
    the ranks of a machine share and the kernel may drop.
    """

    phases: list[HostPhase]
    peak_bytes: Amount
    peak_phase: str
    mapped_bytes: Amount
    limit_bytes: int | None = None  # --host-memory
    fits: bool | None = None  # what is counted into the limit; null without one
