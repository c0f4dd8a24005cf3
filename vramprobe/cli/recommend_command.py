"""``vramprobe recommend -- COMMAND``: one emulated run of a command → which GPU to rent for the whole run.

In: a command's words and what is asked. Out: a Recommendation. Of several replicas one is run: the others do the same.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramprobe.cli.emulate import say
from vramprobe.errors import SpecError, StoreError

if TYPE_CHECKING:
    from vramprobe.profile.recommended import CommandQuestion
    from vramprobe.recommend.answer import Recommendation
    from vramprobe.recommend.prices import Offer

#: It has the most memory of the cards that emulated runs are checked on (benchmarks/).
_CARD = "H200"
_NUM_STEPS = 3
#: So many replicas show what is shared, and each number of them holds the same.
_REPLICAS = 2


def of_command(
    command: list[str], *, emulate: str | None = None, seq_len: int | None = None, **asked: Any
) -> Recommendation:
    """The answer for a command; ``asked`` are the verb's options. Raises SpecError before anything runs in vain."""
    question, offers = _asked(**asked)
    home = Path(tempfile.mkdtemp(prefix="vramprobe-recommend-"))
    try:
        _run(command, home, emulate or _CARD, question.max_gpus, seq_len)
        return _recommended(home, question, offers)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def of_folder(folder: Path, **asked: Any) -> Recommendation:
    """The answer for the run that a profile left."""
    return _recommended(folder, *_asked(**asked))


def _recommended(folder: Path, question: CommandQuestion, offers: Sequence[Offer]) -> Recommendation:
    from vramprobe.profile.recommended import recommended

    return recommended(folder, question, offers, today=date.today())


def _asked(
    *,
    steps: int | None,
    tokens: str | None,
    epochs: float | None,
    deadline: str | None,
    budget: float | None,
    gpu: Sequence[str] | None,
    max_gpus: int,
    prices: str | None,
    **terms: Any,
) -> tuple[CommandQuestion, Sequence[Offer]]:
    """The verb's options, as they were typed → what is asked, and the offers on these terms."""
    from vramprobe.catalog import find_gpu
    from vramprobe.profile.recommended import CommandQuestion
    from vramprobe.recommend.options import Limits
    from vramprobe.recommend.prices import chosen
    from vramprobe.recommend.questions import offers_from
    from vramprobe.units import parse_count, parse_duration

    if budget is not None and budget <= 0:
        raise SpecError(f"--budget {budget}: an amount of dollars above 0 is needed")
    seconds = None if deadline is None else parse_duration(deadline)
    question = CommandQuestion(
        limits=Limits(deadline_seconds=seconds, budget_usd=budget),
        steps=steps,
        tokens=None if tokens is None else parse_count(tokens),
        epochs=epochs,
        gpus=tuple(find_gpu(name).short_name for name in gpu or ()),
        max_gpus=max_gpus,
    )
    return question, chosen(offers_from(prices), **terms)


def _run(command: list[str], home: Path, emulate: str, max_gpus: int, seq_len: int | None) -> None:
    """One emulated run of one rank. Raises StoreError where it left nothing, what the launch raises."""
    from vramprobe.profile import launch
    from vramprobe.profile.replicas import launcher_of
    from vramprobe.profile.stand_ins import stand_ins
    from vramprobe.profile.this_process import redirected

    launcher = launcher_of(command)
    ranks = 1 if launcher is None else launcher.num_ranks or min(_REPLICAS, max_gpus)
    options = launch.Options(
        trace="all",
        steps=_NUM_STEPS,
        phases=True,
        one_rank=(0, ranks) if ranks > 1 else None,
        stand_ins=stand_ins(seq_len),
    )
    with redirected((1,), 2):  # the command's output is not the answer, which a pipe gets
        launch.run(command, home, options, emulate=emulate, say=say)
    if not any(home.glob("*.jsonl")):
        raise StoreError("the command left nothing to look at: no process of it used a GPU through torch")
