"""An emulated run of a command → which GPU to rent for the whole of it, how many, how long, for how much: predicted.

In: a run's folder, limits, how long the run is, offers. Out: the same Recommendation as for a cell. Memory is the
replay of the run's own allocations, time its counted step times the run's steps, money an offer's that has a date.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from vramprobe.catalog import gpu_seen, list_gpus
from vramprobe.catalog.gpus import Gpu, find_gpu
from vramprobe.emulate.cards import card_properties
from vramprobe.errors import SpecError
from vramprobe.predict.prediction import Interval
from vramprobe.predict.verdict import NCCL_ALLOWANCE_BYTES, TIGHT_SHARE, Verdict
from vramprobe.profile import cards
from vramprobe.profile.analyse import analyse
from vramprobe.profile.card_times import num_ranks, slowest_on
from vramprobe.profile.raw import RawRun
from vramprobe.profile.replicas import count_on, is_replicated, launcher_of
from vramprobe.profile.run_files import read_run
from vramprobe.profile.run_length import RunLength, run_length
from vramprobe.profile.step_time import counted_ranks
from vramprobe.recommend.answer import Recommendation, answers_of, judged
from vramprobe.recommend.money import cheapest, offers_of
from vramprobe.recommend.options import COUNTS, CommandSetting, Limits, Option, nearest
from vramprobe.recommend.prices import Offer, old_dates, price_notes
from vramprobe.records.profile import CardVerdict, ProfileRecord
from vramprobe.speed.counted import CountedTime
from vramprobe.speed.figure import Figure
from vramprobe.speed.rates import GPUS_PER_MACHINE
from vramprobe.units import format_bytes, plural

_NOT_COUNTED = "not counted: storage, egress, downloads, evaluation, checkpoints, data loading, runs that fail"


@dataclass(frozen=True, kw_only=True)
class CommandQuestion:
    """Question about a command; the run's length by its Trainer where nothing is given."""

    limits: Limits
    steps: int | None = None
    tokens: int | None = None
    epochs: float | None = None
    gpus: tuple[str, ...] = ()  # short names; empty: those with an offer
    max_gpus: int = GPUS_PER_MACHINE

    def __post_init__(self) -> None:
        """Raises SpecError where the run's length is said twice."""
        named = {"--steps": self.steps, "--tokens": self.tokens, "--epochs": self.epochs}
        if len(both := [name for name, value in named.items() if value is not None]) > 1:
            raise SpecError(f"{' and '.join(both)} both say how long the run is: give one")


def recommended(folder: Path, question: CommandQuestion, offers: Sequence[Offer], *, today: date) -> Recommendation:
    """Every GPU and number of replicas for the run in ``folder``. Raises SpecError where its step was not counted or
    how long it is is not known."""
    run, record = read_run(folder), analyse(folder)
    _require_a_step(run, record)
    seen, own = num_ranks(run), gpu_seen(counted_ranks(run)[0].process.device_name or "")
    assert own is not None
    first = slowest_on(own, _counts(run, seen), own)
    length = run_length(run, seen, first.tokens, steps=question.steps, tokens=question.tokens, epochs=question.epochs)
    sizes = _numbers(run, record, seen, question.max_gpus)
    named = {offer.gpu for offer in offers}
    priced = [gpu for gpu in list_gpus() if gpu.short_name in named and gpu.total_bytes is not None]
    wanted = [find_gpu(name) for name in question.gpus] or priced
    verdicts = {one.gpu: one for one in cards.verdicts(run, record, [gpu.short_name for gpu in wanted])}
    judge = _Judge(run, record, own, length, verdicts, offers)
    options = [
        one
        for gpu in wanted
        for count in sizes
        if (question.gpus or offers_of(offers, gpu.short_name, count)) and (one := judge.option(gpu, count)) is not None
    ]
    answers = answers_of(question.limits, options)
    offered = [one.offer for one in options if one.offer is not None]
    return Recommendation(
        model=record.name,
        tokens=first.tokens and first.tokens * seen * length.num_steps,
        seq_len=None,
        num_steps=length.steps_on(sizes[0]),
        answers=answers,
        options=judged(question.limits, options, answers),
        by_method={},
        verdict=question.limits.verdict_of(options),
        changes_of=None,
        old_prices=old_dates([one.option.offer for one in answers if one.option and one.option.offer], today),
        notes=[
            *_notes(run, record, length, seen, sizes, options),
            *judge.notes(),
            *price_notes(offered, today),
            _NOT_COUNTED,
        ],
    )


def _require_a_step(run: RawRun, record: ProfileRecord) -> None:
    if counted_ranks(run):
        return
    outcome = record.outcome
    if outcome.kind == "oom":
        card = record.emulation.card if record.emulation else record.environment.device_said
        raise SpecError(
            f"the command runs out of memory on {card} before a step can be counted: emulate it on a larger GPU "
            "(--emulate B300), or on several ranks that share the model"
        )
    if outcome.kind == "error":
        last = f": {outcome.exception or outcome.last_lines[-1]}" if outcome.exception or outcome.last_lines else ""
        raise SpecError(f"the command ended with an error, so there is nothing to recommend{last}")
    raise SpecError("no step was counted: the command needs two optimizer steps on an emulated GPU, and no --no-speed")


def _counts(run: RawRun, count: int) -> list[Any]:
    return [count_on(raw.count or {}, count) for raw in counted_ranks(run)]


def _numbers(run: RawRun, record: ProfileRecord, seen: int, max_gpus: int) -> list[int]:
    """Return the numbers of GPUs to try: those of a launcher that starts replicas; else as many as ran."""
    if seen == 1 or not is_replicated(run) or launcher_of(record.command) is None:
        return [seen]
    return [count for count in COUNTS if count <= min(max_gpus, GPUS_PER_MACHINE)]


class _Judge:
    """Options of one run; remembers the GPUs of which nothing can be said."""

    def __init__(
        self,
        run: RawRun,
        record: ProfileRecord,
        own: Gpu,
        length: RunLength,
        verdicts: Mapping[str, CardVerdict],
        offers: Sequence[Offer],
    ) -> None:
        self._run, self._record, self._own, self._length = run, record, own, length
        self._verdicts, self._offers = verdicts, offers
        self._unknown: dict[str, list[str]] = {}

    def option(self, gpu: Gpu, count: int) -> Option | None:
        """So many of a GPU; None where nothing can be said of it."""
        said = self._verdicts[gpu.short_name]
        try:
            found = slowest_on(gpu, _counts(self._run, count), self._own)
        except SpecError as error:
            said = said.model_copy(update={"verdict": "unknown", "why": str(error)})
        if said.verdict == "unknown":
            names = self._unknown.setdefault(said.why, [])
            names += [gpu.short_name] if gpu.short_name not in names else []
            return None
        return self._option(gpu, count, found, _verdict(said, self._record, gpu, count))

    def _option(self, gpu: Gpu, count: int, found: CountedTime, verdict: Verdict) -> Option:
        steps = self._length.steps_on(count)
        seconds = Figure(value=found.seconds, low=found.low_seconds, high=found.high_seconds)
        setting = CommandSetting(
            num_gpus=count,
            num_steps=steps,
            step_seconds=seconds,
            tokens_per_second=_rate(found, count),
            verdict=verdict,
            condition=found.condition,
        )
        fits, hours = verdict.verdict != "does not fit", _times(seconds, steps / 3600)
        offer, usd = cheapest(self._offers, hours, gpu.short_name, count, None)
        return Option(
            method=Path(self._record.command[0]).name,
            gpu=gpu.short_name,
            num_gpus=count,
            setting=setting,
            hours=hours if fits else None,
            usd=usd if fits else None,
            offer=offer,
            host=None,
            why_not="" if fits else f"does not fit: {verdict.reason}",
        )

    def notes(self) -> list[str]:
        """A note for each reason why a GPU was not judged."""
        return [f"not judged: {', '.join(names)}: {why}" for why, names in self._unknown.items()]


def _times(figure: Figure, factor: float) -> Figure:
    return Figure(value=figure.value * factor, low=figure.low * factor, high=figure.high * factor)


def _rate(found: CountedTime, count: int) -> Figure | None:
    if found.tokens is None:
        return None
    tokens = found.tokens * count
    return Figure(value=tokens / found.seconds, low=tokens / found.high_seconds, high=tokens / found.low_seconds)


def _verdict(said: CardVerdict, record: ProfileRecord, gpu: Gpu, count: int) -> Verdict:
    """A replay's verdict as predict words it: tight where little is left, or less than NCCL takes on several."""
    usable = said.usable_bytes
    if usable is None:  # it ran out there
        usable = card_properties(gpu.short_name).total_bytes - cards.context_on(record, gpu, is_own=True)
    peak = record.highest_rank.peak if record.highest_rank else None
    needed = said.reserved_bytes or (peak.reserved_bytes if peak else None) or 0
    aside = NCCL_ALLOWANCE_BYTES if count > 1 else 0
    answer: Any = said.verdict
    if answer == "fits" and needed > TIGHT_SHARE * (usable - aside):
        answer = "tight"
    basis = f"{said.why}, of which NCCL takes up to {format_bytes(aside)}" if aside else said.why
    return Verdict(
        gpu=gpu.name,
        verdict=answer,
        needed_bytes=Interval(value=needed, low=needed, high=needed),
        usable_bytes=usable,
        reason=basis,
    )


def _notes(
    run: RawRun, record: ProfileRecord, length: RunLength, seen: int, sizes: Sequence[int], options: Sequence[Option]
) -> list[str]:
    fewest = sizes[0]
    notes = [f"{length.steps_on(fewest):,} steps on {plural(fewest, 'GPU')}, by {length.said}"]
    if len(sizes) > 1 and not length.is_data:
        notes.append(
            "each number of GPUs takes the same steps, so that more GPUs train more samples: give --tokens to compare "
            "the same data"
        )
    if len(sizes) > 1:
        notes.append("memory on one GPU includes DDP's buckets, which a run without DDP does not have")
    if seen > 1 and len(sizes) == 1 and not is_replicated(run):
        notes.append(
            f"the ranks share the model, so that its memory depends on their number: only {seen} were emulated"
        )
    if seen == 1 and launcher_of(record.command) is not None:
        notes.append("one process ran: for several GPUs give the launcher its number of processes")
    if options and not any(one.hours for one in options):
        near = nearest(options)
        verdict = near.setting.verdict
        notes.append(
            f"nothing fits; nearest {near.num_gpus} × {near.gpu}, {verdict.reason}. Gradient checkpointing, a smaller "
            "micro-batch, or ranks that share the model (FSDP, ZeRO) need less; vramprobe profile names the largest "
            "blocks"
        )
    notes.append(
        "time is predicted from the count of one step, not measured; docs/step_time.md says how far its 80 % intervals "
        "were checked"
    )
    return notes
