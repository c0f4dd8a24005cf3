"""Plan: what a sweep is about to do, before a minute is paid: each cell's action, predicted peak, verdict, time, cost.

In: resumed cells, a card, a fit or none, what ran there before, a price. Out: a frozen Plan in the
order of running: a few cells at the card's boundary first, then small weights before large ones, the same weights
together, so that an OOM saves the larger cells behind it. Never runs anything and never imports torch.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vramprobe.architecture import RunFails, UnsupportedArchitecture
from vramprobe.errors import VramprobeError
from vramprobe.lengths.padding import PaddedData
from vramprobe.model.card_fit import CardFit
from vramprobe.predict.at_hand import NoRecipe, NotAtHand
from vramprobe.predict.expected import predict_at_hand
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.shares import near
from vramprobe.predict.verdict import verdict
from vramprobe.records.outcomes import Skipped
from vramprobe.records.record import Environment, RunRecord
from vramprobe.spec import CellSpec
from vramprobe.sweep.card import Card, Rate, is_same_card
from vramprobe.sweep.definition import Sweep
from vramprobe.sweep.duration import Pace, account_seconds, pace_of
from vramprobe.sweep.resume import Journal, ResumedCell, differing, resume
from vramprobe.sweep.skip import certain_oom

#: Records cells that no recipe is at hand of, each with a Prediction or why there is none, until it is told to stop.
Recording = Callable[[Sequence[CellSpec], Callable[[], bool]], Sequence[Prediction | str]]
PlanVerdict = Literal["fits", "risky", "certain oom", "unknown"]
#: Why a cell has no prediction that could have one.
NOT_AT_HAND = "no recipe is at hand; --record records one, seconds each"
#: Loading the libraries once, for all cells that are forked from there.
START_SECONDS = 8.0
#: Of the cells to run, how many of those that may or may not fit are run first: what they show corrects all others.
_BOUNDARY_SHARE, _MAX_BOUNDARY_CELLS = 0.1, 6


@dataclass(frozen=True, kw_only=True)
class SweepPolicy:
    """Rules that choose the cells to run: whether to skip certain out-of-memory cells and quarantined ones, and which
    to run twice.
    """

    skip: bool = True
    audit_share: float = 0.05  # of the cells to skip, so many are run all the same
    replicate_share: float = 0.0  # of the cells that end well, so many are run a second time, last of all
    retry_quarantined: bool = False
    verify: bool = False  # each cell repeats a step under other values (an emulated GPU alone)

    def audits(self, spec: CellSpec) -> bool:
        """Return True if ``spec`` is run although it would be skipped; every resume chooses the same cells."""
        return _is_among(spec, self.audit_share)

    def replicates(self, spec: CellSpec) -> bool:
        """Return True if ``spec`` is measured twice; every resume chooses the same cells."""
        return _is_among(spec, self.replicate_share)


def _is_among(spec: CellSpec, share: float) -> bool:
    """A draw that is random over cells and always the same for one."""
    return int(spec.fingerprint, 16) < share * 16 ** len(spec.fingerprint)


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One cell of a plan. ``prediction`` is null where there is none (``note`` says why) or the cell is not run."""

    spec: CellSpec
    num_params: int
    action: Literal["run", "stale", "skip", "kept", "quarantined"]
    reason: str
    verdict: PlanVerdict = "unknown"
    prediction: Prediction | None = None
    note: str = ""
    skipped: Skipped | None = None
    seconds: float = 0.0  # expected; 0 for what is not run
    record: RunRecord | None = None  # the attempt that counts so far
    num_ok: int = 0
    replicates: bool = False  # a second attempt at a cell, in place once the first has ended well

    @property
    def is_run(self) -> bool:
        """Return True if the cell is going to be measured."""
        return self.action in ("run", "stale")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Rows in the order of running; those that are not run come first."""

    rows: tuple[PlanRow, ...]
    card: Card | None
    rate: Rate | None
    fit: CardFit | None
    ooms: tuple[RunRecord, ...] = ()  # of this very card, which the verdicts rest on
    num_slots: int = 1  # cells that run at once
    data: Mapping[str, PaddedData] = field(default_factory=dict)  # by fingerprint, of a sweep on a data set

    @property
    def to_run(self) -> list[PlanRow]:
        """The rows that are going to be measured."""
        return [row for row in self.rows if row.is_run]

    @property
    def seconds(self) -> float:
        """Expected for everything that is run, loading the libraries once included."""
        return sum(row.seconds for row in self.rows) / self.num_slots + (START_SECONDS if self.to_run else 0.0)

    @property
    def dollars(self) -> float | None:
        """US dollars for the plan's seconds; None without a price."""
        return None if self.rate is None else self.rate.dollars(self.seconds)

    def actions(self) -> dict[str, int]:
        """Rows by what is done with them."""
        return dict(Counter[str](row.action for row in self.rows))

    def verdicts(self) -> dict[str, int]:
        """Rows that are not done with, by whether they will fit."""
        return dict(Counter[str](row.verdict for row in self.rows if row.is_run or row.action == "skip"))


def plan_sweep(
    sweep: Sweep,
    journal: Journal,
    *,
    card: Card | None,
    context_of: Callable[[CellSpec], Environment | None],
    policy: SweepPolicy | None = None,
    **words: Any,
) -> Plan:
    """Plan a run of ``sweep`` into ``journal`` as of now; ``words`` are those of :func:`make_plan`.

    ``context_of`` gives the environment that a cell would be measured in, null where that is not known: what was
    measured in another is stale.
    """
    policy = policy or SweepPolicy()
    cells = resume(sweep.cells, journal, context_of, retry_quarantined=policy.retry_quarantined)
    known = [cell.record for cell in cells if cell.record is not None and cell.action != "stale"]  # of this machine
    seen = {"pace": pace_of(known, card.gpu if card else None), "ooms": _ooms_on(card, journal, context_of)}
    return replace(make_plan(cells, card=card, policy=policy, **seen, **words), data=sweep.data)


def _ooms_on(
    card: Card | None, journal: Journal, context_of: Callable[[CellSpec], Environment | None]
) -> list[RunRecord]:
    """Return this journal's records that ran out of memory on this card, without those measured in another context."""
    if card is None:
        return []

    def is_stale(record: RunRecord) -> bool:
        here = context_of(record.spec)
        return here is not None and bool(differing(record.environment, here))

    found = [journal.record(one) for attempts in journal.attempts.values() for one in attempts if one.outcome == "oom"]
    return [record for record in found if is_same_card(record.environment, card) and not is_stale(record)]


def make_plan(
    cells: Sequence[ResumedCell],
    *,
    card: Card | None,
    fit: CardFit | None = None,
    pace: Pace | None = None,
    ooms: Iterable[RunRecord] = (),
    policy: SweepPolicy | None = None,
    rate: Rate | None = None,
    recording: Recording | None = None,
    stop: Callable[[], bool] = lambda: False,
    num_slots: int = 1,
) -> Plan:
    """The plan of ``cells``. ``ooms`` are out-of-memory records of this very card; ``card`` is null on a CPU.

    ``recording`` is asked for cells without a recipe at hand, until ``stop`` says yes.
    """
    policy, ooms, pace = policy or SweepPolicy(), tuple(ooms), pace or Pace()
    to_run = [cell.spec for cell in cells if cell.action in ("run", "stale")]
    predicted = _predictions(to_run, card, fit, recording, stop)
    rows = _in_order([_row(cell, predicted, card, pace, ooms, policy) for cell in cells])
    every = (*rows, *_second_attempts(rows, policy))
    return Plan(rows=every, card=card, rate=rate, fit=fit, ooms=ooms, num_slots=num_slots)


def _second_attempts(rows: list[PlanRow], policy: SweepPolicy) -> list[PlanRow]:
    """A row more for each cell to replicate that ended well, or is run and may."""
    chosen = [row for row in rows if policy.replicates(row.spec) and row.num_ok < 2 and row.verdict != "certain oom"]
    again = [row for row in chosen if row.is_run or (row.record is not None and row.record.outcome.kind == "ok")]
    return [
        replace(
            row,
            action="run",
            reason="replicates an attempt",
            replicates=True,
            seconds=row.seconds or (row.record.timing.total_seconds if row.record and row.record.timing else 0.0),
        )
        for row in again
    ]


def with_evidence(row: PlanRow, ooms: Iterable[RunRecord], card: Card | None, policy: SweepPolicy) -> PlanRow:
    """The row once more when its turn has come: an OOM of this run may have made it certain."""
    skipped = certain_oom(row.spec, ooms, row.prediction, card)
    if skipped is None or row.verdict == "certain oom":  # the latter: judged already
        return row
    if not policy.skip:
        return replace(row, verdict="certain oom")
    if policy.audits(row.spec):
        return replace(row, verdict="certain oom", reason=f"{row.reason}; audits a skip: {skipped.evidence}")
    if row.record is not None and row.record.outcome.kind == "skipped":
        reason = f"skipped at {row.record.started_at}: {skipped.evidence}"
        return replace(row, verdict="certain oom", action="kept", reason=reason, seconds=0.0)
    return replace(row, verdict="certain oom", action="skip", reason=skipped.evidence, skipped=skipped, seconds=0.0)


def _row(
    cell: ResumedCell,
    predicted: dict[str, Prediction | str],
    card: Card | None,
    pace: Pace,
    ooms: Sequence[RunRecord],
    policy: SweepPolicy,
) -> PlanRow:
    row = PlanRow(
        spec=cell.spec,
        num_params=cell.spec.num_params,
        action=cell.action,
        reason=cell.reason,
        record=cell.record,
        num_ok=cell.num_ok,
    )
    if not row.is_run:
        return row
    found = predicted[cell.spec.fingerprint]
    prediction, note = (None, found) if isinstance(found, str) else (found, "")
    gpu, is_emulated = (None, False) if card is None else (card.gpu, card.is_emulated)
    account = account_seconds(cell.spec, row.num_params, gpu, is_emulated=is_emulated)
    seconds = pace.correct(row.num_params, account)
    judged: PlanVerdict = "unknown"
    if prediction is not None and card is not None:
        fits = verdict(prediction, card.of(cell.spec)).verdict == "fits"
        judged = "fits" if fits else "risky"
    row = replace(row, prediction=prediction, note=note, seconds=seconds, verdict=judged)
    return with_evidence(row, ooms, card, policy)


def _predictions(
    specs: Sequence[CellSpec],
    card: Card | None,
    fit: CardFit | None,
    recording: Recording | None,
    stop: Callable[[], bool],
) -> dict[str, Prediction | str]:
    """By fingerprint, a prediction that decisions may rest on, or why there is none: the cell can still be measured."""
    found: dict[str, Prediction | str] = {}
    left = []
    for spec in specs:
        try:
            prediction = _predicted(spec, fit, card, is_near_enough=recording is None)
        except VramprobeError as error:
            found[spec.fingerprint] = str(error)
        else:
            found[spec.fingerprint] = prediction or ("" if spec.device == "cpu" else NOT_AT_HAND)
            left += [spec] if prediction is None and spec.device != "cpu" else []
    if recording is not None and left:
        found |= dict(zip((spec.fingerprint for spec in left), recording(left, stop), strict=True))
    return found


def _predicted(spec: CellSpec, fit: CardFit | None, card: Card | None, *, is_near_enough: bool) -> Prediction | None:
    """By a recipe at hand, or near: of several GPUs, and where nothing is recorded. None without a recipe; the CPU is
    not predicted."""
    gpu = card.gpu if card else None
    if spec.is_sharded:
        try:
            return near(spec, gpu)
        except RunFails:
            raise
        except (NotAtHand, UnsupportedArchitecture):
            return None
    with suppress(NoRecipe):
        return predict_at_hand(spec, gpu, fit)
    if is_near_enough:
        with suppress(NoRecipe):
            return predict_at_hand(spec, gpu, fit, near=True).model_copy(update={"engine": "near"})
    return None


def _in_order(rows: list[PlanRow]) -> list[PlanRow]:
    at_rest = [row for row in rows if row.action in ("kept", "quarantined")]
    waiting = sorted((row for row in rows if row.action not in ("kept", "quarantined")), key=_by_weights_then_size)
    risky = sorted((row for row in waiting if row.verdict == "risky" and row.is_run), key=lambda row: row.seconds)
    boundary = risky[: min(_MAX_BOUNDARY_CELLS, round(_BOUNDARY_SHARE * len(waiting)))]
    early = {row.spec.fingerprint for row in boundary}
    return [*at_rest, *boundary, *(row for row in waiting if row.spec.fingerprint not in early)]


def _by_weights_then_size(row: PlanRow) -> tuple[int, str, str, str, int, int]:
    spec = row.spec
    peak = row.prediction.peak_allocated_bytes.value if row.prediction else 0
    return (row.num_params, spec.model_label, spec.quant, spec.dtype, peak, spec.num_tokens)
