"""Counted fit: counted published steps, for the fit of rates (rates_fit.py).

In: a journal's record, its card, what was published. Out: a Step of the fit, whose rates multiply measured kernels'
shares (shapes.py): what a training step reaches of what a kernel reaches alone. Loads numpy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchmarks.speed.rates_fit import unproven
from vramprobe.catalog import Gpu
from vramprobe.speed.counted import KERNELS, PHASES, Count, CountRow, Roofline, replayed, time_of
from vramprobe.speed.rates import Condition, Rates, SpeedFit

#: Everything as fast as data sheets and kernel tables say.
FULL_RATES = Rates(**dict.fromkeys(Rates.model_fields, 1.0))
#: The fields of a row as a record keeps them, in this order; of a copy on its own stream True comes after them.
_FIELDS = ("phase", "what", "name", "shapes", "dtype", "calls", "flops", "read", "written", "launches", "width")


@dataclass(frozen=True, kw_only=True)
class CountedStep:
    """A published step and what it launches; ``tokens`` of a whole step, ``tokens_per_second`` of one GPU."""

    source: str
    count: Count
    gpu: Gpu
    tokens: int
    tokens_per_second: float
    is_aside: bool = False

    @property
    def published_seconds(self) -> float:
        return self.tokens / self.tokens_per_second

    @cached_property
    def ideal(self) -> IdealStep:
        """At full rates."""
        return IdealStep(self)

    def seconds(self, rates: Rates) -> float:
        return self.ideal.seconds(rates)

    def condition(self, fit: SpeedFit) -> Condition:
        return time_of(self.count, self.gpu, fit=fit).condition


class IdealStep:
    """A step at full rates; ``seconds`` by any rates are those of :func:`~vramprobe.speed.counted.time_of`, without a
    walk over its rows.
    """

    def __init__(self, one: CountedStep) -> None:
        import numpy as np

        full = unproven(FULL_RATES, [one])
        roofline = Roofline(one.gpu, full)
        # Each row's phase and class, seconds of its FLOPs by its shape and of its bytes, and its launches.
        rows = [(row.phase_number, row.kind, *roofline.parts(row), row.launches) for row in one.count.rows]
        pairs = zip(one.count.rows, rows, strict=True)
        num_unclaimed = max(0, one.count.num_launches - one.count.num_claimed)
        launches = [sum(row[4] for row in rows if row[0] == at) for at in range(len(PHASES))]
        self._launches = [launches[0] + num_unclaimed, *launches[1:]]
        self._rows = [
            {
                kind: np.array([row[2:4] for row in rows if (row[0], row[1]) == (at, kind)] or [(0.0, 0.0)]).T
                for kind in KERNELS
            }
            for at in range(len(PHASES))
        ]
        copies = [(seconds, row.is_beside) for row, (_, kind, _, seconds, _) in pairs if kind == "copies"]
        self._copies, self._beside = (
            sum(one for one, is_beside in copies if is_beside is beside) for beside in (False, True)
        )
        self._link = time_of(one.count, one.gpu, fit=full).by_class.get("collectives", 0.0)

    def seconds(self, rates: Rates) -> float:
        import numpy as np

        phases = []
        for launches, by_kind in zip(self._launches, self._rows, strict=True):
            card = 0.0
            for kind, (flops, moved) in by_kind.items():
                level = {"products": rates.product, "attention": rates.attention}.get(kind, 1.0)
                stream = rates.dequantise if kind == "dequantize" else rates.stream
                card += float(np.maximum(flops / level, moved / stream).sum())
            phases.append((launches * rates.kernel_seconds, card))
        seconds = math.hypot(replayed(phases), self._link / rates.link, self._beside)
        return seconds + self._copies + rates.step_seconds


def from_record(told: dict[str, Any]) -> Count:
    """A journal's record as a count."""
    return Count(
        step=2,
        num_launches=told["num_launches"],
        num_claimed=told["num_claimed"],
        unclaimed=tuple((where, number) for where, number in told["unclaimed"]),
        link_bytes=tuple((kind, size, ranks) for kind, size, ranks in told["link_bytes"]),
        message_bytes=tuple(told.get("message_bytes", ())),
        rows=tuple(CountRow(**dict(zip((*_FIELDS, "is_beside"), one, strict=False))) for one in told["rows"]),
    )
