"""The rules of check that look at one record alone: may it be believed?

In: a RunRecord; for the rules of a measurement, one that is ok and complete. Out: doubts, each an error or a warning
with what was found, what is allowed and what to do. What a worker checks too is in measure/observation.py.
"""

from collections.abc import Iterator

from vramprobe.check.entry import Doubt
from vramprobe.measure.observation import Observation, closure, ledger_of, order_of_tiers, peak_of, steady_steps
from vramprobe.records.phase_memory import TRAINING_PHASES
from vramprobe.records.record import RunRecord
from vramprobe.units import MIB, format_bytes, word_for

#: Idle allocated memory that no tensor of the workload explains: on cuda cuBLAS workspaces (32 MiB a handle on Hopper,
#: and the autograd thread may hold one of its own), on the CPU the tables of quantisation (about 1 KiB).
MAX_UNACCOUNTED_BYTES = {"cuda": 128 * MIB, "emulated": 128 * MIB, "cpu": 1 * MIB}

_MEASURE_AGAIN = "an instrument would not have called it ok: restore the record, or measure the cell again"


# -- any record -----------------------------------------------------------------------------------------------------


def identity(record: RunRecord) -> Iterator[Doubt]:
    """Fingerprint and id are those of the spec beside them, and the instrument is one for its device."""
    spec = record.spec
    for name, written, resolved in (
        ("fingerprint", record.fingerprint, spec.fingerprint),
        ("cell_id", record.cell_id, spec.cell_id),
    ):
        if written != resolved:
            yield (
                "error",
                f"{name} is {written!r}, but the record's own spec gives {resolved!r}: one of them was edited, or a "
                "field's meaning changed; restore the record, or measure the cell again",
            )
    if record.instrument not in (spec.device, *(("emulated",) if spec.device == "cuda" else ())):
        yield (
            "error",
            f"the instrument is {record.instrument}, but the cell is for device {spec.device}; {_MEASURE_AGAIN}",
        )


def complete(record: RunRecord) -> Iterator[Doubt]:
    """An ok record has its peak, its ledger, and the phases of loading and of every step; or none, to be small."""
    if record.outcome.kind != "ok":
        return
    needed = ("peak", "ledger") if record.phases else ("peak",)
    missing = [name for name in needed if getattr(record, name) is None]
    if record.phases:
        if all(phase.name in TRAINING_PHASES for phase in record.phases):
            missing.append("the phases of loading")
        steps = {phase.step for phase in record.phases if phase.name in TRAINING_PHASES}
        if steps != set(range(1, record.spec.steps + 1)):
            missing.append(f"the phases of steps 1 to {record.spec.steps} and no others")
    else:
        yield "warning", "its phases were left out, to keep the file small: whether its steps repeat cannot be checked"
    if missing:
        yield "error", f"the outcome is ok, but the record lacks {', '.join(missing)}; {_MEASURE_AGAIN}"


def code(record: RunRecord) -> Iterator[Doubt]:
    """A reader can get the code that measured: a commit without changes on top, or a release."""
    machine = record.environment
    if machine.dirty:
        yield (
            "warning",
            f"{word_for(record.instrument)} by a checkout with uncommitted changes on {machine.commit}, which "
            "nobody else can get; commit them and measure again, or say with the results what they were",
        )
    if machine.commit is None and machine.versions.get("vramprobe") is None:
        yield (
            "warning",
            "neither a commit nor a vramprobe version says which code measured this; measure from a git checkout or "
            "with an installed vramprobe",
        )


# -- one measurement (outcome ok, complete) -------------------------------------------------------------------------


def tiers(record: RunRecord) -> Iterator[Doubt]:
    """requested ≤ allocated ≤ active ≤ reserved ≤ device, wherever they are known, and no end above its peak."""
    for reason in order_of_tiers(record.phases):
        yield "error", f"{reason}; each tier holds the one before it: {_MEASURE_AGAIN}"
    for phase in record.phases:
        device, reserved = phase.device_used_bytes, phase.reserved_end_bytes
        if device is not None and reserved is not None and device < reserved:
            yield (
                "error",
                f"{phase.name} (step {phase.step}) end: reserved {reserved} B > device {device} B; the device tier "
                "holds the allocator's segments and the CUDA context: was another process on the card? Measure again",
            )
    if record.context_bytes is not None and record.context_bytes < 0:
        yield (
            "error",
            f"context_bytes is {record.context_bytes}, so the device held less than was reserved; "
            "was another process on the card? Measure again",
        )


def steady(record: RunRecord) -> Iterator[Doubt]:
    """Every step after the first repeats the second to the byte."""
    for reason in steady_steps(record.phases):
        yield "error", f"{reason}; with fixed shapes they must be equal to the byte: {_MEASURE_AGAIN}"


def ledger(record: RunRecord) -> Iterator[Doubt]:
    """The ledger is what the phases say, and hardly any memory between two steps is without a cause."""
    written = record.ledger
    held = {cause: getattr(written, f"{cause}_bytes") for cause in ("weights", "gradients", "optimizer_state", "batch")}
    seen = ledger_of(Observation(record.phases, held, at_peak=written.at_peak))
    for name, value in written.model_dump(exclude={"at_peak"}).items():
        if value != getattr(seen, name):
            yield (
                "error",
                f"ledger.{name} is {value} B, but the phases and the other causes give {getattr(seen, name)} B; "
                f"they must be equal: {_MEASURE_AGAIN}",
            )
    for reason in closure(record.phases, written):
        yield "error", f"{reason}; the ledger must close: {_MEASURE_AGAIN}"
    limit = MAX_UNACCOUNTED_BYTES.get(record.instrument)
    if limit is not None and written.unaccounted_bytes > limit:
        yield (
            "warning",
            f"{format_bytes(written.unaccounted_bytes)} allocated between steps have no cause, at most "
            f"{format_bytes(limit)} (libraries' workspaces) are usual on {record.instrument}; find out what keeps them",
        )


def peak(record: RunRecord) -> Iterator[Doubt]:
    """The peak is the highest training phase, tier by tier, and the first of equals."""
    seen = peak_of(Observation(record.phases, {}))
    for name, value in record.peak.model_dump().items():
        if value != getattr(seen, name):
            yield (
                "error",
                f"peak.{name} is {value}, but the highest of the phases gives {getattr(seen, name)}; "
                f"they must be equal: {_MEASURE_AGAIN}",
            )


def composition(record: RunRecord) -> Iterator[Doubt]:
    """Check that the live tensors at the peak add up, and equal the peak of the tier in which they were traced."""
    alive = record.ledger.at_peak
    if alive is None:
        return
    if (parts_bytes := sum(alive.parts().values())) != alive.total_bytes:
        yield (
            "error",
            f"the parts of ledger.at_peak add up to {parts_bytes} B, its total is {alive.total_bytes} B; they must be "
            f"equal: {_MEASURE_AGAIN}",
        )
    allowed = _traced_peaks(record)
    if alive.total_bytes not in allowed.values():
        peaks = " or ".join(f"{value} B {tier}" for tier, value in allowed.items())
        yield (
            "error",
            f"ledger.at_peak is of {alive.total_bytes} B, but the traced steps peak at {peaks}; they must be equal: "
            f"{_MEASURE_AGAIN}",
        )


def _traced_peaks(record: RunRecord) -> dict[str, int]:
    """Tier → the peak that the allocation trace must have reached (measure/cpu.py, measure/cuda.py).

    The trace of the CPU covers the run. On cuda, emulated or not, one more steady step is traced,
    in requested bytes, or in allocated ones where torch's history holds those.
    """
    training = [phase for phase in record.phases if phase.name in TRAINING_PHASES]
    covers_the_run = record.instrument == "cpu"
    traced = [phase for phase in training if covers_the_run or phase.step == record.spec.steps]
    requested = [phase.requested_peak_bytes for phase in traced if phase.requested_peak_bytes is not None]
    return ({"requested": max(requested)} if requested else {}) | {
        "allocated": max(phase.allocated_peak_bytes for phase in traced)
    }


def retries(record: RunRecord) -> Iterator[Doubt]:
    """The allocator never had to empty its cache to go on: reserved memory and times would not be the cell's own."""
    if record.num_alloc_retries:
        yield (
            "warning",
            f"num_alloc_retries is {record.num_alloc_retries}, 0 is allowed: the card was full, so reserved memory is "
            "what was left and the times hold the retries; measure this cell on a larger card",
        )


RULES_OF_A_RECORD = (identity, complete, code)
RULES_OF_A_MEASUREMENT = (tiers, steady, ledger, peak, composition, retries)
