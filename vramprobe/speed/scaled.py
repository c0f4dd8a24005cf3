"""A counted step with more micro-steps, or on several GPUs: its count, and how fast a cell is by it.

In: the Count of one GPU's step, a cell with its ranks. Out: a Count for counted.py's time, or an Estimate. More
micro-steps launch in proportion. Ranks send what their sharding gathers and reduces, and step a share of the
optimizer's state where it is divided. What they send is derived; the time of it is the counted model's.
"""

from dataclasses import replace
from typing import NamedTuple

from vramprobe.catalog import Gpu
from vramprobe.records.frozen import FrozenModel
from vramprobe.records.traffic import link_bytes
from vramprobe.rules.sharding import rules_of
from vramprobe.spec import CellSpec
from vramprobe.speed.counted import Count, CountRow, time_of
from vramprobe.speed.figure import Figure
from vramprobe.speed.rates import Condition


class Estimate(FrozenModel):
    """Speed of a step: predicted, not measured. ``parts`` are seconds of an optimizer step, which overlap."""

    seconds: float  # of an optimizer step: all its micro-steps on all GPUs
    tokens_per_second: Figure  # of all GPUs together
    mfu: float  # model operations, attention's too, without recomputation, over the peak
    parts: dict[str, float]  # as estimated, also where records of the card say that it is faster
    condition: Condition


class Exchanged(NamedTuple):
    """Bytes of a whole model that ranks exchange: all weights, as they are gathered, and all gradients."""

    weights_bytes: int
    gradients_bytes: int


def with_micro_steps(count: Count, factor: float) -> Count:
    """Return the count with ``factor`` times as many micro-steps before the optimizer's."""
    rows = tuple(row if factor == 1 or row.phase == "optimizer" else _scaled(row, factor) for row in count.rows)
    claimed = sum(row.launches for row in rows)
    return replace(
        count,
        rows=rows,
        num_claimed=claimed,
        num_launches=claimed + round(max(0, count.num_launches - count.num_claimed) * factor),
        link_bytes=tuple((kind, round(num_bytes * factor), ranks) for kind, num_bytes, ranks in count.link_bytes),
    )


def _scaled(row: CountRow, factor: float) -> CountRow:
    names = ("calls", "flops", "read", "written", "launches")
    return replace(row, **{name: round(getattr(row, name) * factor) for name in names})


def on_ranks(count: Count, spec: CellSpec, shared: Exchanged) -> Count:
    """Return the step of one of a cell's ranks, from the ``count`` of one GPU's.

    Where weights are gathered, they and the gradients are sent in each micro-step; else gradients are once a step.
    """
    rules, num, grad_accum = rules_of(spec.sharding), spec.num_gpus, spec.grad_accum
    sent = [("all_reduce", shared.gradients_bytes)]
    if rules.num_gathers:
        gathered = grad_accum * rules.num_gathers * shared.weights_bytes
        sent = [("all_gather", gathered), ("reduce_scatter", grad_accum * shared.gradients_bytes)]
    parts = num if rules.divides_state else 1
    rows = (
        replace(row, flops=row.flops // parts, read=row.read // parts, written=row.written // parts)
        if row.phase == "optimizer"
        else row
        for row in count.rows
    )
    links = tuple((kind, link_bytes(kind, num, num_bytes), num) for kind, num_bytes in sent)
    return replace(count, rows=tuple(rows), link_bytes=links)


def whole_step(spec: CellSpec, count: Count, grad_accum: int, shared: Exchanged) -> Count:
    """Return what one of a cell's GPUs launches and sends in a step, from the ``count`` of one GPU's step of
    ``grad_accum`` micro-steps."""
    found = with_micro_steps(count, spec.grad_accum / grad_accum)
    return found if spec.num_gpus == 1 else on_ranks(found, spec, shared)


def estimate(spec: CellSpec, whole: Count, gpu: Gpu) -> Estimate:
    """Estimate the speed of a cell from its :func:`whole_step`.

    Raises SpecError for a card whose peak is not known, and for more GPUs than a machine has.
    """
    time = time_of(whole, gpu)
    tokens = spec.num_gpus * spec.grad_accum * spec.num_tokens
    return Estimate(
        seconds=time.seconds,
        tokens_per_second=Figure(
            value=tokens / time.seconds, low=tokens / time.high_seconds, high=tokens / time.low_seconds
        ),
        mfu=time.mfu,
        parts=time.by_class,
        condition=time.condition,
    )
