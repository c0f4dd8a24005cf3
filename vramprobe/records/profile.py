"""ProfileRecord: what any command's processes did with a GPU's memory, by rank and phase; one JSON line.

In: what profile/ found in a run's raw files. Out: a frozen record, JSON both ways, and a journal of such lines beside
or among those of cells: each line says its kind. Bytes are ints; what is not known is null, never 0 or -1.
"""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from vramprobe.errors import StoreError
from vramprobe.records import store
from vramprobe.records.data_batches import DataBatches
from vramprobe.records.engine import EngineMemory, RequestAnswer, ServedOn
from vramprobe.records.frozen import FrozenModel
from vramprobe.records.phase_memory import Amount
from vramprobe.records.profile_memory import (
    BlocksAlike,
    HostMemory,
    Live,
    MemoryGrowth,
    PhaseHighest,
    PlaceBytes,
    ProfilePeak,
    StepPeaks,
)
from vramprobe.records.profile_outcomes import ProfileOutcome
from vramprobe.records.record import Emulation
from vramprobe.records.shown import Shown
from vramprobe.records.step_time import CardTime, StepTime
from vramprobe.records.traffic import CollectiveTraffic
from vramprobe.units import format_bytes

#: Raise it when a field changes its meaning or goes, and keep reading the old one.
FORMAT = 1


class RolloutStage(FrozenModel):
    """One stage of a step of reinforcement learning beside an engine: its fullest moment."""

    name: str  # weight_sync, generation, forward, backward, …
    device_bytes: int | None = None  # used by all processes, as the emulated driver counts
    live: Live  # what is mapped then
    asleep_bytes: Amount = 0  # allocated in torch's eyes, and unmapped


class RankProfile(FrozenModel):
    """One process that used a card. ``at_peak``, ``largest``, ``by_*`` are null or empty without a history.

    Their bytes are requested ones, as the allocator's history has them; all parts of ``at_peak`` add up to its total,
    and so do the bytes of ``by_line``.
    """

    rank: int | None = None
    pid: int
    device: int
    phases: list[PhaseHighest]
    #: load, training (all steps), evaluation, save, load_best, resume, merge, generation, after_training (the rest of
    #: the script); empty where nothing but steps was seen.
    run_phases: list[PhaseHighest] = []
    peak: ProfilePeak | None = None
    num_steps: Amount
    repeats: bool | None = None  # the last two whole steps from the second on, to the byte; null with fewer
    step_peaks: StepPeaks | None = None  # null with fewer than two whole steps after the first
    at_peak: Live | None = None
    at_peak_of: str | None = None  # the moment: "backward of step 2"
    largest: list[BlocksAlike] = []
    by_module: list[PlaceBytes] = []
    by_line: list[PlaceBytes] = []
    engine: EngineMemory | None = None  # its own account, as one of several workers of an engine
    rollout: list[RolloutStage] = []  # of the last whole step; empty without an engine in the process
    fragmentation_bytes: int | None = None  # reserved − allocated peak, of the phase with the highest reserved
    num_alloc_retries: int | None = None
    num_ooms: int | None = None
    batches: DataBatches | None = None  # of the run's own data; their steps are not in num_steps, and are in the peak
    growth: MemoryGrowth | None = None  # null where steps leave nothing behind, and without their history
    doing: str | None = None  # when it was last heard of, of a process that did not end by itself
    traffic: list[CollectiveTraffic] | None = None  # of the last whole step; null where nobody counts, as on real GPUs

    @property
    def repeats_said(self) -> str:
        """Describe how alike the steps are, to follow their number: ``; the last two are byte-identical``."""
        peaks = self.step_peaks
        if self.repeats is None or peaks is None:
            return ""
        if self.repeats:
            return "; the last two are byte-identical"
        if peaks.differ:
            return f"; their peaks differ: {peaks.what}"
        more = peaks.highest_bytes - peaks.lowest_bytes
        why = f": {peaks.what}" if peaks.what else ""
        return f"; their peaks differ by {format_bytes(more)}{why}" if more else "; their peaks are equal"


class ProfileEnvironment(FrozenModel):
    """Environment of the run; that of rank 0 where the ranks differ."""

    device_name: str | None = None
    device_total_bytes: int | None = None  # as torch reports it
    capability: tuple[int, int] | None = None
    python: str | None = None
    torch: str | None = None
    cuda: str | None = None
    alloc_conf: str | None = None
    emulator: str | None = None  # null on a real GPU
    versions: dict[str, str | None] = {}
    settings: dict[str, str] = {}  # of the models and of transformers' Trainer, defaults too

    @property
    def device_said(self) -> str:
        """The device's name, which says so where it is emulated."""
        name = self.device_name or "no GPU"
        return name if self.emulator is None else f"emulated {name}"


class CardVerdict(FrozenModel):
    """Verdict of the run on one GPU of the catalog, by its own sequence of allocations, with seconds and cost."""

    gpu: str  # short name
    verdict: Literal["fits", "does not fit", "unknown"]
    why: str
    usable_bytes: int | None = None  # what torch reports of the card, less the context
    reserved_bytes: int | None = None  # peak there
    headroom_bytes: int | None = None  # usable less reserved
    served: ServedOn | None = None  # of an inference engine: its KV cache there
    time: CardTime | None = None  # predicted; null where no step was counted
    why_no_time: str | None = None


class Replaced(FrozenModel):
    """A missing file of the run and its replacement."""

    kind: Literal[
        "config",
        "weights",
        "loaded dtype",
        "tokenizer",
        "processor",
        "video processor",
        "video decoder",
        "audio decoder",
        "image tokens",
        "video tokens",
        "sentence embedding",
        "dataset",
    ]
    what: str  # as the program named it
    by: str


class ProfileRecord(FrozenModel, Shown):
    """One profiled command."""

    format: Literal[1] = FORMAT
    kind: Literal["profile"] = "profile"
    attempt_id: str
    name: str  # the script's words
    command: list[str]
    started_at: str  # ISO 8601, UTC
    instrument: Literal["emulated", "cuda"]
    outcome: ProfileOutcome
    environment: ProfileEnvironment
    emulation: Emulation | None = None
    context_bytes: int | None = None  # assumed on an emulated card; device less reserved on a real one
    ranks: list[RankProfile]
    cards: list[CardVerdict] = []
    host: HostMemory | None = None  # null on a real GPU, where nobody counts it
    replaced: list[Replaced] = []
    step_time: StepTime | None = None  # predicted; null where no step was counted
    measured_step_seconds: float | None = None  # on a real GPU: the median of its steps' wall time
    engine: EngineMemory | None = None  # an inference engine's own account
    served: ServedOn | None = None  # what of that fits on the GPU that it ran on
    answers: list[RequestAnswer] = []  # of a server, to each request of --requests
    warnings: list[str] = []

    @property
    def allocated_spread_bytes(self) -> int | None:
        """The highest rank's allocated peak less the lowest's; null with fewer than two ranks."""
        peaks = [one.peak.allocated_bytes for one in self.ranks if one.peak is not None]
        return max(peaks) - min(peaks) if len(peaks) > 1 else None

    @property
    def highest_rank(self) -> RankProfile | None:
        """The rank with the highest allocated peak, the first of several."""
        seen = [(one.peak.allocated_bytes, one) for one in self.ranks if one.peak is not None]
        return max(seen, key=lambda one: one[0], default=(0, None))[1]

    @property
    def lacks_a_step(self) -> bool:
        """Return True if no process took a training step, of a program that is no server and no engine."""
        return not self.answers and self.engine is None and not any(rank.num_steps for rank in self.ranks)

    def headline(self) -> str:
        """Return the peak of the highest rank, how the run ended, and the verdict for each GPU that was asked about."""
        rank = self.highest_rank
        if rank is None or rank.peak is None:
            return f"{self.name}: no process used a GPU through torch"
        peak = f"{format_bytes(rank.peak.allocated_bytes)} allocated"
        peak += f", {format_bytes(rank.peak.reserved_bytes)} reserved" if rank.peak.reserved_bytes else ""
        ended = "out of memory" if self.outcome.kind == "oom" else peak
        more = [f"{one.verdict}: {one.gpu}" for one in self.cards]
        also = f" ({peak})" if self.outcome.kind == "oom" else f" at the peak ({rank.peak.phase})"
        return "; ".join([f"{ended}{also} on {self.environment.device_said}", *more])

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per phase of the highest rank, with its peaks in bytes by tier."""
        return [
            {
                "phase": one.name,
                "allocated_bytes": one.allocated_bytes,
                "reserved_bytes": one.reserved_bytes,
                "device_bytes": one.device_bytes,
            }
            for one in (self.highest_rank.phases if self.highest_rank else ())
        ]

    def causes(self) -> dict[str, int]:
        """Return the requested bytes at the peak by cause, the largest first; empty without a history."""
        highest = self.highest_rank
        alive = None if highest is None else highest.at_peak
        parts = {} if alive is None else {name.removesuffix("_bytes"): size for name, size in alive.parts().items()}
        return {name: size for name, size in sorted(parts.items(), key=lambda one: -one[1]) if size}

    def remarks(self) -> list[str]:
        """Return the causes at the peak, and the warnings."""
        said = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in self.causes().items())
        of = self.highest_rank and self.highest_rank.at_peak_of
        return [f"live at the peak ({of}): {said}"] * bool(said) + list(self.warnings)

    def may_grow(self, rank: RankProfile) -> bool:
        """Return True if --steps ended the run while the rank's steps still differed by more than 0.5 %: a later one
        may need more.
        """
        if rank.batches is not None and rank.batches.is_complete and rank.batches.fits is not None:
            return False
        differ = rank.repeats is False and rank.step_peaks is not None and rank.step_peaks.differ
        return differ and self.outcome.kind == "ok" and self.outcome.stopped


def read_profiles(path_or_folder: str | Path) -> tuple[ProfileRecord, ...]:
    """Every profile of a .jsonl file, or of all below a folder; lines of other kinds and torn tails are left out.

    Raises StoreError for a line that says it is a profile and is none.
    """
    return tuple(
        _profile(line, file, number)
        for file in store.journals(path_or_folder)
        for number, line in store.whole_lines(file)[0]
        if store.is_profile(line)
    )


def last_profile(path_or_folder: str | Path) -> ProfileRecord:
    """The last profile there. Raises StoreError where there is none."""
    found = read_profiles(path_or_folder)
    if not found:
        raise StoreError(f"{path_or_folder} holds no profile; make one: vramprobe profile --save FILE.jsonl -- COMMAND")
    return found[-1]


def _profile(line: bytes, file: Path, number: int) -> ProfileRecord:
    if (version := json.loads(line).get("format")) != FORMAT:
        raise StoreError(
            f"{file}, line {number} is a profile of format {version!r} and this vramprobe knows {FORMAT}; upgrade "
            "vramprobe to read it"
        )
    try:
        return ProfileRecord.model_validate_json(line)
    except ValidationError as error:
        raise store.cannot_be(f"{file}, line {number} is a profile", error) from None
