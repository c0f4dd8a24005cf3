"""Rank the techniques that pay for a cell: bytes saved and predicted time lost, of those whose step is recorded.

In: a cell's words and a GPU. Out: Ranked, the one that saves most for each percent of time lost first. Bytes and
seconds are predicted from recorded steps, as by ``predict`` and ``recommend``.
"""

import math
from typing import Any, Literal, NamedTuple

from vramprobe.catalog import Gpu, find_gpu
from vramprobe.choices import RECIPES
from vramprobe.errors import VramprobeError
from vramprobe.predict.changes import LEAST_SHARE
from vramprobe.predict.recorded import predict_replay
from vramprobe.predict.verdict import verdict
from vramprobe.recommend.recorded import Say, estimated, find_step, one_gpu, record_step
from vramprobe.records.frozen import FrozenModel
from vramprobe.records.shown import Shown
from vramprobe.resolve import resolve
from vramprobe.techniques.registry import of_kind
from vramprobe.units import GIB, format_bytes

#: A step that is slower by less than this is no slower: the speed model cannot tell.
_NO_LOSS = 0.001


class Ranked(FrozenModel):
    """One technique for one cell; ``gib_per_percent`` is null where no time is lost."""

    technique: str
    options: dict[str, Any]
    from_bytes: int
    to_bytes: int
    saved_bytes: int
    from_seconds: float
    to_seconds: float
    slower_share: float
    gib_per_percent: float | None
    verdict: Literal["fits", "tight", "does not fit"]


class Ranking(FrozenModel, Shown):
    """Those that save memory, and the names of those whose step is not recorded."""

    gpu: str
    peak_bytes: int
    seconds: float
    ranked: list[Ranked]
    not_known: list[str]

    def headline(self) -> str:
        """Return the GPU and the peak without any of them."""
        return f"{self.gpu}: {format_bytes(self.peak_bytes)} allocated, a step {self.seconds:.3g} s; predicted"

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per technique: bytes saved, then the peak, the verdict, by which share a step is longer."""
        return [
            {
                "technique": one.technique,
                "saved_bytes": one.saved_bytes,
                "peak_bytes": one.to_bytes,
                "slower_share": one.slower_share,
                "verdict": one.verdict,
            }
            for one in self.ranked
        ]

    def remarks(self) -> list[str]:
        """Return what the ranking leaves out."""
        return [
            f"{len(self.not_known)} more techniques are not recorded for this cell: records=True records those that "
            "can be, vramprobe.techniques() lists what each saved"
        ]


def rank(
    *, gpu: str, kind: str | None = None, records: bool = False, say: Say = lambda words: None, **words: Any
) -> Ranking:
    """Rank the techniques for a cell of ``words`` on ``gpu``; only those of ``kind``, if given. A trainer is none.

    The cell is recorded if it is not at hand; others with ``records`` alone, seconds each, of which ``say`` hears.
    Raises UnknownName, SpecError, and what a recording raises.
    """
    card = find_gpu(gpu)
    recipe = RECIPES.get(words.get("recipe") or "", {})
    words = {name: value for name, value in (recipe | words).items() if name not in ("recipe", "device")}
    now, found = _predicted(words, card, say), []
    assert now is not None
    listed = [one for one in of_kind(kind) if one.kind != "trainer"]
    not_known = [one.id for one in listed if one.changes is None]
    for one in listed:
        if one.changes is None:
            continue
        try:
            then = _predicted(words | one.changes, card, say if records else None)
        except VramprobeError:
            continue  # it cannot be combined with this cell
        if then is None:
            not_known.append(one.id)
            continue
        saved, lost = now.peak_bytes - then.peak_bytes, then.seconds / now.seconds - 1
        if saved < LEAST_SHARE * now.peak_bytes:
            continue
        found.append(
            Ranked(
                technique=one.id,
                options=one.changes,
                from_bytes=now.peak_bytes,
                to_bytes=then.peak_bytes,
                saved_bytes=saved,
                from_seconds=now.seconds,
                to_seconds=then.seconds,
                slower_share=lost,
                gib_per_percent=None if lost < _NO_LOSS else saved / GIB / (100 * lost),
                verdict=then.verdict,
            )
        )
    return Ranking(
        gpu=card.short_name,
        peak_bytes=now.peak_bytes,
        seconds=now.seconds,
        ranked=sorted(found, key=_order),
        not_known=not_known,
    )


def _order(one: Ranked) -> tuple[float, int]:
    worth = math.inf if one.gib_per_percent is None else one.gib_per_percent
    return -worth, -one.saved_bytes


class _Cell(NamedTuple):
    """One cell's allocated peak, seconds of its step, verdict."""

    peak_bytes: int
    seconds: float
    verdict: Literal["fits", "tight", "does not fit"]


def _predicted(words: dict[str, Any], card: Gpu, say: Say | None) -> _Cell | None:
    """Return what is predicted of one cell; None where it would have to be recorded and ``say`` is None."""
    spec = resolve(device="cuda", **words)
    step = find_step(one_gpu(spec), card, near=False)
    if step is None and say is not None:
        step = record_step(one_gpu(spec), card, say, over_rows=False)
    if step is None:
        return None
    prediction = predict_replay(step.replay(card), spec, gpu=card)
    seconds = estimated(spec, step, card).seconds
    return _Cell(prediction.peak_allocated_bytes.value, seconds, verdict(prediction, card).verdict)
