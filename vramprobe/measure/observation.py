"""Observation: what any instrument hands to the record, and the checks that decide whether to believe it.

In: phases and holdings as the instrument saw them. Out: Peak, MemoryLedger and the reasons why a run is
invalid. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vramprobe.log.trace import Event, Owned, composition
from vramprobe.records.phase_memory import TRAINING_PHASES, Composition, MemoryLedger, Peak, PhaseMemory
from vramprobe.rules.cell import not_quantized
from vramprobe.spec import CellSpec

if TYPE_CHECKING:
    from vramprobe.records.record import ModelFacts
    from vramprobe.records.traffic import CollectiveTraffic

#: (tier, those that hold it, the nearest first).
_HOLDERS = (("requested", ("active", "reserved")), ("allocated", ("active", "reserved")), ("active", ("reserved",)))


@dataclass(frozen=True)
class Observation:
    """One watched run, complete or cut short. ``held_bytes``: the tensors' own account, by cause, in the last step.

    ``traffic``: of the last step; None where collectives are not counted. ``cards``: of a process with several, each
    one's, in order; this one is then the highest's.
    """

    phases: list[PhaseMemory]
    held_bytes: dict[str, int]
    at_peak: Composition | None = None
    context_bytes: int | None = None
    num_alloc_retries: int | None = None
    inconsistencies: list[str] = field(default_factory=list)
    traffic: list[CollectiveTraffic] | None = None
    cards: list[Observation] = field(default_factory=list)


def peak_of(observation: Observation) -> Peak:
    """The highest training phase, the first of equals, and the highest moment before training."""
    training = [phase for phase in observation.phases if phase.name in TRAINING_PHASES]
    setting_up = [phase for phase in observation.phases if phase.name not in TRAINING_PHASES]
    top = max(training, key=lambda phase: phase.allocated_peak_bytes)
    reserved = [phase.reserved_peak_bytes for phase in training if phase.reserved_peak_bytes is not None]
    device = [phase.device_used_bytes for phase in training if phase.device_used_bytes is not None]
    return Peak(
        phase=top.name,
        step=top.step,
        allocated_bytes=top.allocated_peak_bytes,
        reserved_bytes=max(reserved) if reserved else None,
        device_bytes=max(device) if device else None,
        load_allocated_bytes=max(phase.allocated_peak_bytes for phase in setting_up),
    )


def composition_at_peak(
    events: list[Event],
    totals: list[int],
    phases: list[PhaseMemory],
    spans: list[range],
    holdings: Iterable[tuple[int | None, Owned]],
) -> Composition | None:
    """Return the live tensors at the peak of the run by cause; None where no training phase was reached.

    ``totals``: bytes after each event. ``spans``: each phase's events. ``holdings``: each with the step it was
    seen in, or None for what stands in every step; what an older step left may be replaced only later in this one.
    """
    if not any(phase.name == "zero_grad" for phase in phases):
        return None
    peak = peak_of(Observation(phases, {}))
    in_step = [index for index, phase in enumerate(phases) if phase.step == peak.step]
    top = max(in_step, key=lambda index: phases[index].allocated_peak_bytes)
    at = max(spans[top], key=lambda position: totals[position])
    standing = [holding for step, holding in holdings if step is None or step <= peak.step]
    forwards = [spans[index] for index in in_step if phases[index].name == "forward"]
    return composition(events, standing, forwards, step_start=spans[in_step[0]].start, at=at)


def _exact(phase: PhaseMemory, moment: str) -> int:
    """Bytes as asked for where they are known: allocated adds what the caching allocator did not split off a block."""
    requested = getattr(phase, f"requested_{moment}_bytes")
    return getattr(phase, f"allocated_{moment}_bytes") if requested is None else requested


def ledger_of(observation: Observation) -> MemoryLedger:
    """The last (steady) step by cause; ``unaccounted`` is idle memory that no known tensor explains."""
    held = observation.held_bytes
    last_step = max(phase.step for phase in observation.phases if phase.step is not None)
    steady = [phase for phase in observation.phases if phase.step == last_step]
    idle_bytes = _exact(steady[-1], "end")
    first_forward = steady[0]
    kept_bytes = held.get("kept_gradients", 0)
    resident_bytes = held["weights"] + held.get("optimizer_state", 0) + held["batch"] + kept_bytes
    return MemoryLedger(
        weights_bytes=held["weights"],
        gradients_bytes=held.get("gradients", 0),
        optimizer_state_bytes=held.get("optimizer_state", 0),
        batch_bytes=held["batch"],
        saved_activations_bytes=_exact(first_forward, "end") - (idle_bytes - kept_bytes),
        unaccounted_bytes=idle_bytes - resident_bytes,
        at_peak=observation.at_peak,
    )


def reasons_not_to_believe(observation: Observation, ledger: MemoryLedger) -> list[str]:
    """Return the reasons why the measurement contradicts itself; empty if it is consistent."""
    return (
        list(observation.inconsistencies)
        + order_of_tiers(observation.phases)
        + steady_steps(observation.phases)
        + closure(observation.phases, ledger)
    )


def remarks_on(facts: ModelFacts | None, spec: CellSpec) -> list[str]:
    """Return the facts of the built model that a reader would not expect; empty for most."""
    if facts is None:
        return []
    return not_quantized(spec.quant, spec.kbit_prep, spec.dtype, facts.num_quantised_params, facts.num_params)


def order_of_tiers(phases: list[PhaseMemory]) -> list[str]:
    """requested and allocated ≤ active ≤ reserved, at the end and at the peak, wherever an instrument knows them.

    What is freed while another stream uses it is no longer allocated, and requested until that has ended.
    """
    reasons = []
    for phase in phases:
        for moment in ("end", "peak"):
            known = {
                tier: value
                for tier in ("requested", "allocated", "active", "reserved")
                if (value := getattr(phase, f"{tier}_{moment}_bytes")) is not None
            }
            for low, holders in _HOLDERS:
                high = next((tier for tier in holders if tier in known), None)
                if high is not None and known.get(low, 0) > known[high]:
                    what = f"{low} {known[low]} B > {high} {known[high]} B"
                    reasons.append(f"{phase.name} (step {phase.step}) {moment}: {what}")
        if phase.allocated_end_bytes > phase.allocated_peak_bytes:
            reasons.append(f"{phase.name} (step {phase.step}): ends above its own peak")
    return reasons


def steady_steps(phases: list[PhaseMemory]) -> list[str]:
    """Every step after the first must repeat the second to the byte, phase by phase."""
    by_step: dict[int, list[tuple[str, int, int]]] = {}
    for phase in phases:
        if phase.step is not None and phase.step > 1:
            entry = (phase.name, _exact(phase, "end"), _exact(phase, "peak"))
            by_step.setdefault(phase.step, []).append(entry)
    steady, reasons = by_step.get(2, []), []
    for step, entries in by_step.items():
        if [name for name, _, _ in entries] != [name for name, _, _ in steady]:
            reasons.append(f"step {step} does not have the phases of step 2")
            continue
        reasons += [
            f"step {step}, {here[0]}: end/peak {here[1]}/{here[2]} B, but step 2 had {before[1]}/{before[2]} B"
            for before, here in zip(steady, entries, strict=True)
            if before != here
        ]
    return reasons


def closure(phases: list[PhaseMemory], ledger: MemoryLedger) -> list[str]:
    """The allocator never holds less than the live tensors: not between steps, not at the peak."""
    reasons = []
    if ledger.unaccounted_bytes < 0:
        reasons.append(
            f"the allocator holds {-ledger.unaccounted_bytes} B less between steps than the live tensors add up to"
        )
    live_bytes = ledger.weights_bytes + ledger.gradients_bytes + ledger.batch_bytes
    top_bytes = max(phase.allocated_peak_bytes for phase in phases)
    if top_bytes < live_bytes:
        reasons.append(f"the peak, {top_bytes} B, is below the live tensors, {live_bytes} B")
    return reasons
