"""Several cards under one process: each with an instrument of its own, the record with an entry for each.

In: a workload whose layers lie on several cards. Out: the Observation of the card that holds the most, with every
card's beside it, and a record whose ``ranks`` are the cards. What is the process's and not a card's (the emulation, its
verification) is asked of the first.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from vramprobe.choices import PhaseName
from vramprobe.measure.cuda import CudaInstrument, trace_cards
from vramprobe.measure.observation import Observation, ledger_of, peak_of, reasons_not_to_believe
from vramprobe.records.outcomes import Invalid, Ok
from vramprobe.records.phase_memory import Composition
from vramprobe.records.record import RankRecord, RunRecord
from vramprobe.workload.storages import Storages


class CardsInstrument:
    """One instrument for all cards; ``first`` watches card 0, and what else it can do is the process's."""

    def __init__(self, first: CudaInstrument, others: Sequence[CudaInstrument]) -> None:
        self._all = [first, *others]
        self._at_peak: list[Composition | None] = [None] * len(self._all)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._all[0], name)

    @property
    def warnings(self) -> list[str]:
        """Warnings of any card, each once."""
        return list(dict.fromkeys(warning for one in self._all for warning in one.warnings))

    @property
    def oom_seen(self) -> dict[str, int] | None:
        """By the card that ran out, if one did."""
        return next((one.oom_seen for one in self._all if one.oom_seen is not None), None)

    def start(self) -> None:
        """Every card's context; the first card stays the one that torch means by cuda."""
        for one in self._all:
            one.start()
        torch.cuda.set_device(0)

    @contextmanager
    def phase(self, name: PhaseName, step: int | None = None, micro_step: int | None = None) -> Iterator[None]:
        """One phase, on every card."""
        with ExitStack() as stack:
            for one in self._all:
                stack.enter_context(one.phase(name, step, micro_step))
            yield

    def holds(self, cause: str, storages: Storages, step: int | None = None) -> None:
        """These storages, standing now, have this cause; each card is told of its own."""
        for card, one in enumerate(self._all):
            one.holds(cause, storages.on_card(card), step)

    def trace_step(self, step: Callable[[], None], *, is_extra: bool = True) -> Composition | None:
        """Trace one step on every card and return the composition at the peak of the highest card."""
        self._at_peak = trace_cards(self._all, step, is_extra=is_extra)
        return self._at_peak[self._highest([one.finish() for one in self._all])]

    def finish(self) -> Observation:
        """Return the observation of the highest card, or of the one that ran out, with every card's as ``cards``."""
        seen = [replace(one.finish(), at_peak=alive) for one, alive in zip(self._all, self._at_peak, strict=True)]
        return replace(seen[self._highest(seen)], cards=seen)

    def _highest(self, seen: Sequence[Observation]) -> int:
        for card, one in enumerate(self._all):
            if one.oom_seen is not None:
                return card
        return max(range(len(seen)), key=lambda card: _height_bytes(seen[card]))


def _height_bytes(observation: Observation) -> int:
    """Bytes of the highest allocated peak over the training phases, as in the record; over the others where no step
    began.
    """
    training = [phase for phase in observation.phases if phase.step is not None]
    return max((phase.allocated_peak_bytes for phase in training or observation.phases), default=0)


def with_cards(
    record: RunRecord, cards: Sequence[Observation], modules_by_card: Sequence[Sequence[str]] | None
) -> RunRecord:
    """The record with an entry for each card in ``ranks``, and the doubts of all of them."""
    ranks, doubts = [], []
    for card, observation in enumerate(cards):
        found: dict[str, Any] = {}
        if record.peak is not None:
            found = {"peak": peak_of(observation), "ledger": ledger_of(observation)}
            reasons = reasons_not_to_believe(observation, found["ledger"])
            doubts += [f"card {card}: {reason}" for reason in reasons]
        ranks.append(
            RankRecord(
                rank=card,
                modules=None if modules_by_card is None else list(modules_by_card[card]),
                phases=observation.phases,
                context_bytes=observation.context_bytes,
                num_alloc_retries=observation.num_alloc_retries,
                **found,
            )
        )
    outcome = record.outcome
    if isinstance(outcome, Ok | Invalid):
        outcome = Invalid(reasons=doubts) if doubts else Ok()
    return record.model_copy(update={"ranks": ranks, "outcome": outcome})
