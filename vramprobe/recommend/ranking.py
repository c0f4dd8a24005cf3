"""Rank the techniques that pay for a cell: bytes saved and predicted time lost, of those that arithmetic knows.

In: a cell's words and a GPU. Out: Ranked, the one that saves most for each percent of time lost first. Bytes and
seconds are predicted, by the same arithmetic as ``predict`` and ``recommend``; nothing runs.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from vramprobe.catalog import find_gpu
from vramprobe.errors import VramprobeError
from vramprobe.predict.changes import LEAST_SHARE
from vramprobe.predict.questions import predict
from vramprobe.predict.verdict import verdict
from vramprobe.records.shown import Shown
from vramprobe.spec import RECIPES, resolve
from vramprobe.speed.step import estimate
from vramprobe.techniques.registry import of_kind
from vramprobe.units import GIB, format_bytes

#: A step that is slower by less than this is no slower: the speed model cannot tell.
_NO_LOSS = 0.001


class Ranked(BaseModel):
    """One technique for one cell; ``gib_per_percent`` is null where no time is lost."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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


class Ranking(BaseModel, Shown):
    """Those that save memory, and the names of those that arithmetic does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
            f"{len(self.not_known)} more techniques have no arithmetic: vramprobe.techniques() lists what each saved"
        ]


def rank(*, gpu: str, kind: str | None = None, **words: Any) -> Ranking:
    """Rank the techniques for a cell of ``words`` on ``gpu``; only those of ``kind``, if given. A trainer is none.

    Raises UnknownName, SpecError, and UnsupportedArchitecture for a model without arithmetic.
    """
    card = find_gpu(gpu)
    recipe = RECIPES.get(words.get("recipe") or "", {})
    words = {name: value for name, value in (recipe | words).items() if name not in ("recipe", "device")}
    now_bytes, now_seconds, _ = _predicted(words, card)
    found = []
    listed = [one for one in of_kind(kind) if one.kind != "trainer"]
    for one in listed:
        if one.changes is None:
            continue
        try:
            to_bytes, seconds, judged = _predicted(words | one.changes, card)
        except VramprobeError:
            continue  # it cannot be combined with this cell
        saved, lost = now_bytes - to_bytes, seconds / now_seconds - 1
        if saved < LEAST_SHARE * now_bytes:
            continue
        found.append(
            Ranked(
                technique=one.id,
                options=one.changes,
                from_bytes=now_bytes,
                to_bytes=to_bytes,
                saved_bytes=saved,
                from_seconds=now_seconds,
                to_seconds=seconds,
                slower_share=lost,
                gib_per_percent=None if lost < _NO_LOSS else saved / GIB / (100 * lost),
                verdict=judged,
            )
        )
    return Ranking(
        gpu=card.short_name,
        peak_bytes=now_bytes,
        seconds=now_seconds,
        ranked=sorted(found, key=_order),
        not_known=[one.id for one in listed if one.changes is None],
    )


def _order(one: Ranked) -> tuple[float, int]:
    worth = math.inf if one.gib_per_percent is None else one.gib_per_percent
    return -worth, -one.saved_bytes


def _predicted(words: dict[str, Any], card: Any) -> tuple[int, float, str]:
    """(allocated peak, seconds of a step, verdict) of one cell."""
    prediction = predict(engine="formula", gpu=card.short_name, device="cuda", **words)
    seconds = estimate(resolve(device="cuda", **words), card).seconds
    return prediction.peak_allocated_bytes.value, seconds, verdict(prediction, card).verdict
