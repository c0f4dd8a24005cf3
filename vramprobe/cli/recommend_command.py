"""``vramprobe recommend -- COMMAND``: one emulated run of a command → which GPU to rent for the whole run.

In: a command's words and what is asked. Out: a Recommendation. Of several replicas one is run: the others do the same.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramprobe.cli.emulate import say
from vramprobe.errors import SpecError, StoreError

if TYPE_CHECKING:
    from vramprobe.recommend.answer import Recommendation

#: It has the most memory of the cards that emulated runs are checked on (benchmarks/).
_CARD = "H200"
_NUM_STEPS = 3
#: So many replicas show what is shared, and each number of them holds the same.
_REPLICAS = 2


@dataclass(frozen=True)
class Asked:
    """The verb's options, as they were typed."""

    steps: int | None
    tokens: str | None
    epochs: float | None
    deadline: str | None
    budget: float | None
    gpus: Sequence[str] | None
    max_gpus: int
    provider: str | None
    region: str | None
    terms: str
    prices: str | None


def of_command(
    command: list[str], asked: Asked, *, emulate: str | None = None, seq_len: int | None = None
) -> Recommendation:
    """The answer for a command. Raises SpecError before anything runs in vain."""
    question, offers = _question(asked), _offers(asked)
    home = Path(tempfile.mkdtemp(prefix="vramprobe-recommend-"))
    try:
        _run(command, home, emulate or _CARD, asked.max_gpus, seq_len)
        return _recommended(home, question, offers)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def of_folder(folder: Path, asked: Asked) -> Recommendation:
    """The answer for the run that a profile left."""
    return _recommended(folder, _question(asked), _offers(asked))


def _recommended(folder: Path, question: Any, offers: Sequence[Any]) -> Recommendation:
    from vramprobe.profile.recommended import recommended

    return recommended(folder, question, offers, today=date.today())


def _question(asked: Asked) -> Any:
    from vramprobe.catalog import find_gpu
    from vramprobe.profile.recommended import CommandQuestion
    from vramprobe.recommend.options import Limits
    from vramprobe.units import parse_count, parse_duration

    if asked.budget is not None and asked.budget <= 0:
        raise SpecError(f"--budget {asked.budget}: an amount of dollars above 0 is needed")
    named = {"--steps": asked.steps, "--tokens": asked.tokens, "--epochs": asked.epochs}
    if len(both := [name for name, value in named.items() if value is not None]) > 1:
        raise SpecError(f"{' and '.join(both)} both say how long the run is: give one")
    return CommandQuestion(
        limits=Limits(
            deadline_seconds=None if asked.deadline is None else parse_duration(asked.deadline),
            budget_usd=asked.budget,
        ),
        steps=asked.steps,
        tokens=None if asked.tokens is None else parse_count(asked.tokens),
        epochs=asked.epochs,
        gpus=tuple(find_gpu(name).short_name for name in asked.gpus or ()),
        max_gpus=asked.max_gpus,
    )


def _offers(asked: Asked) -> Sequence[Any]:
    from vramprobe.recommend.prices import chosen
    from vramprobe.recommend.questions import offers_from

    return chosen(offers_from(asked.prices), terms=asked.terms, provider=asked.provider, region=asked.region)


@contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Redirect stdout to stderr: the command's output is not the answer, which a pipe gets."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _run(command: list[str], home: Path, emulate: str, max_gpus: int, seq_len: int | None) -> None:
    """One emulated run of one rank. Raises StoreError where it left nothing, what the launch raises."""
    from vramprobe.profile import launch
    from vramprobe.profile.replicas import launcher_of
    from vramprobe.profile.stand_ins import stand_ins

    launcher = launcher_of(command)
    ranks = 1 if launcher is None else launcher.num_ranks or min(_REPLICAS, max_gpus)
    options = launch.Options(
        trace="all",
        steps=_NUM_STEPS,
        phases=True,
        one_rank=(0, ranks) if ranks > 1 else None,
        stand_ins=stand_ins(seq_len),
    )
    with _stdout_on_stderr():
        launch.run(command, home, options, emulate=emulate, say=say)
    if not any(home.glob("*.jsonl")):
        raise StoreError("the command left nothing to look at: no process of it used a GPU through torch")
