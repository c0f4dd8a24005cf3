"""Fewest: how many of a GPU a cell needs, by each kind of sharding that the libraries can do with it.

In: a cell's words, a GPU, what is offloaded, a fit or none. Out: a MinGpus for each kind, and why others have none. By
arithmetic; what is counted is said in sharding.py and cards.py. No torch here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from vramprobe.choices import DEVICE_MAP, Offload
from vramprobe.errors import SpecError
from vramprobe.predict.questions import cell, min_gpus
from vramprobe.spec import CellSpec, cannot_offload, cannot_shard

if TYPE_CHECKING:
    from vramprobe.predict.sharding import MinGpus

_NOT_OF_THE_CELL = ("fit", "allow_extrapolation")


class Fewest(NamedTuple):
    """``left_out``: why some kinds of sharding are not answered for -> which."""

    answers: list[MinGpus]
    left_out: dict[str, list[str]]


def min_gpus_by_sharding(*, gpu: str, offload: Offload | None = None, **options: Any) -> Fewest:
    """The fewest of ``gpu`` by every kind of sharding that divides a model, of ranks and of one process.

    ``options`` are those of min_gpus but the sharding. Raises SpecError where no kind does it, UnsupportedArchitecture
    where ranks cannot be counted, and what min_gpus raises.
    """
    from vramprobe.architecture import UnsupportedArchitecture
    from vramprobe.terms.ranks import DIVIDING

    if offload not in (None, *get_args(Offload)):
        raise SpecError(f"offload: {offload!r} given; allowed: {', '.join(get_args(Offload))}")
    one = cell(**{"device": "cuda"} | {name: it for name, it in options.items() if name not in _NOT_OF_THE_CELL})
    answers: list[MinGpus] = []
    left_out: dict[str, list[str]] = {}
    for kind in (*DIVIDING, DEVICE_MAP):
        reason = _why_not(one, kind, offload or "none")
        if reason is None:
            try:
                answers.append(min_gpus(gpu=gpu, sharding=kind, offload=offload, **options))
                continue
            except (SpecError, UnsupportedArchitecture) as error:
                if kind != DEVICE_MAP:
                    raise
                reason = str(error)
        left_out.setdefault(reason.replace(f" under {kind}", ""), []).append(kind)
    if not answers:
        raise SpecError(f"no kind of sharding that divides a model does this: {next(iter(left_out))}")
    return Fewest(answers, left_out)


def _why_not(one: CellSpec, kind: str, offload: str) -> str | None:
    return cannot_shard(one, kind) or cannot_offload(one.model_copy(update={"offload": offload}), kind)
