"""Find what fits a GPU: the largest batch, length or model of a cell, and the fewest GPUs, for cells in words.

In: a cell's words without the one that is asked for, and a GPU. Out: a Largest, a MinGpus. On one GPU by recipes at
hand, or by recordings; on several by recordings, but the largest model, which is near.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from vramprobe import catalog
from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.choices import Offload, Sharding, meant
from vramprobe.errors import SpecError
from vramprobe.predict.questions import (
    SHARDING,
    cell,
    cell_on_ranks,
    engine_for,
    given_fit,
    one_gpu_alone,
    predicted,
    require_cuda,
)
from vramprobe.rules.images import BESIDE_AN_IMAGE
from vramprobe.rules.not_sharded import cannot_shard
from vramprobe.rules.sharding import SHARDINGS
from vramprobe.spec import CellSpec

if TYPE_CHECKING:
    from pathlib import Path

    from vramprobe.model.card_fit import CardFit
    from vramprobe.predict.fewest import MinGpus
    from vramprobe.predict.largest import Judge, Judged, Largest
    from vramprobe.predict.prediction import Prediction


def max_batch_size(*, gpu: str, seq_len: int, **options: Any) -> Largest:
    """The largest batch of a cell that fits on ``gpu``; ``options`` are those of :func:`predict`.

    Exact, by bisection, with the verdicts of :func:`predict`, by a recipe at hand. ``widen``: the verdicts hold what
    nobody named, too, as on the command line. Of a rank of several, and without a recipe, by recordings on an emulated
    ``gpu``: about a minute, of which ``say`` hears. Raises VramprobeError where not even 1 fits.
    """
    return _largest_count("batch_size", gpu, 1, seq_len=seq_len, batch_size=1, **options)


def max_seq_len(*, gpu: str, batch_size: int, **options: Any) -> Largest:
    """The largest length of a cell that fits on ``gpu``, within learned positions; as :func:`max_batch_size`.

    ``patient`` false: raises NotOneBranch where each length would have to be recorded by itself.
    """
    if (options.get("cp_size") or 1) > 1:
        raise SpecError(
            f"cp_size {options['cp_size']}: the longest sequence is not looked for where ranks share each; predict "
            "lengths one by one"
        )
    least = max(1, BESIDE_AN_IMAGE * (options.get("images") or 0))
    return _largest_count("seq_len", gpu, least, seq_len=least, batch_size=batch_size, **options)


def largest_model(*, gpu: str, **options: Any) -> Largest:
    """The largest model of the catalog that fits on ``gpu``; ``options`` are those of :func:`predict` but the model.

    Models that may be the answer and have no recipe at hand are named and not judged; with engine recipe they are
    recorded, seconds to a minute each, of which ``say`` hears. On several GPUs near, unless by engine recipe.
    """
    from vramprobe.predict import largest

    card, several = catalog.gpu_or_size(gpu), (options.get("num_gpus") or 1) > 1
    records = options.pop("engine", "auto") == "recipe"
    asked = _asked(gpu, options, records=records)
    judge = _nearly(card) if several and not records else asked.judge

    def named(slug: str) -> CellSpec | str:
        try:
            one = cell_on_ranks(model=slug, **asked.words)
        except SpecError as error:
            return str(error)
        return (cannot_shard(one) if several else None) or one

    entries = catalog.list_vision_models() if options.get("images") else catalog.list_models()
    cells = [(entry.name, named(entry.name)) for entry in entries]
    if all(isinstance(one, str) for _, one in cells):
        raise SpecError(str(cells[0][1]))
    return largest.largest_model(cells, judge, card)


def _nearly(card: catalog.Gpu) -> Judge:
    """Judge one rank of several, near."""
    from vramprobe.predict.largest import Judged
    from vramprobe.predict.shares import near
    from vramprobe.predict.verdict import verdict

    def judge(one: CellSpec) -> Judged:
        prediction = near(one, card)
        return Judged(prediction, verdict(prediction, card))

    return judge


def min_gpus(
    *,
    gpu: str,
    sharding: Sharding,
    fit: str | Path | CardFit | None = None,
    offload: Offload | None = None,
    engine: Literal["auto", "recipe"] = "auto",
    say: Callable[[str], None] = lambda words: None,
    widen: bool = False,
    **options: Any,
) -> MinGpus:
    """The fewest of ``gpu``, a power of two, on which the first rank of a cell fits under ``sharding``.

    By recordings on the emulated ``gpu``, of which ``say`` hears: seconds to a minute each, two to five of them.
    ``widen`` is :func:`max_batch_size`'s.
    """
    from vramprobe.predict import fewest

    sharding, offload = meant("sharding", sharding), _known_offload(offload)
    one = _sharded_cell(options).model_copy(update={"sharding": sharding, "offload": offload or "none"})
    card, model = catalog.gpu_or_size(gpu), given_fit(fit)
    engine_for(engine, {"num_gpus": 2})
    return fewest.min_gpus(one, card, model, say, _judging(card, options.get("loop"), widen=widen))


def _sharded_cell(options: dict[str, Any]) -> CellSpec:
    """The cell whose number of GPUs is looked for. Raises UnsupportedArchitecture for one of one GPU alone."""
    one = cell(**{"device": "cuda"} | {name: it for name, it in options.items() if it is not None})
    if reason := one_gpu_alone(one):
        raise UnsupportedArchitecture(f"{reason}, so no number of GPUs is looked for")
    return one


def _known_offload(offload: str | None) -> Offload | None:
    """The kind that is meant. Raises SpecError."""
    found = meant("offload", offload)
    if found not in (None, *get_args(Offload)):
        raise SpecError(f"offload: {offload!r} given; allowed: {', '.join(get_args(Offload))}")
    return found


class Fewest(NamedTuple):
    """``left_out``: why some kinds of sharding are not answered for -> which."""

    answers: list[MinGpus]
    left_out: dict[str, list[str]]


def min_gpus_by_sharding(*, gpu: str, offload: Offload | None = None, **options: Any) -> Fewest:
    """The fewest of ``gpu`` under fsdp, or under the first kind of sharding that divides a model and can do this.

    ``options`` are those of min_gpus but the sharding. Raises SpecError where no kind does it, and as min_gpus.
    """
    from vramprobe.predict.fewest import why_not

    offload = _known_offload(offload)
    one = _sharded_cell({name: it for name, it in options.items() if name not in ("fit", "engine", "say", "widen")})
    able, left_out = [], {}
    for kind in sorted(
        (name for name, row in SHARDINGS.items() if row.answers_min_gpus), key=lambda it: it != SHARDING
    ):
        reason = why_not(one.model_copy(update={"sharding": kind, "offload": offload or "none"}))
        if reason is None:
            able.append(kind)
        else:
            left_out.setdefault(reason.replace(f" under {kind}", ""), []).append(kind)
    if not able:
        raise SpecError(f"no kind of sharding that divides a model does this: {next(iter(left_out))}")
    first, *others = able
    if others:
        left_out["each is recorded where it is named: --sharding"] = others
    return Fewest([min_gpus(gpu=gpu, sharding=first, offload=offload, **options)], left_out)


def _largest_count(question: Literal["batch_size", "seq_len"], gpu: str, least: int, **options: Any) -> Largest:
    asked = _asked(gpu, options)
    one, card = cell_on_ranks(**asked.words), catalog.gpu_or_size(gpu)
    if engine_for(options.get("engine", "auto"), options) == "auto":
        found = _largest_shipped(question, one, card, asked, least)
        if found is not None:
            return found
    say, patient = options.get("say", lambda words: None), options.get("patient", True)
    return _largest_recorded(question, one, card, asked, say, patient=patient)


def _largest_shipped(
    question: Literal["batch_size", "seq_len"], one: CellSpec, card: catalog.Gpu, asked: _Asked, least: int
) -> Largest | None:
    """By recipes that ship, exact at the shapes around which they were recorded and near elsewhere; None without."""
    from vramprobe.predict.at_hand import replay_shipped_near
    from vramprobe.predict.largest import largest_shipped
    from vramprobe.predict.recorded import predict_replay

    def judge(other: CellSpec) -> Judged:
        replay = replay_shipped_near(other, gpu=card)
        return asked.judged(other, predict_replay(replay, other, gpu=card, model=asked.model))

    return largest_shipped(question, one, judge, least=least)


def _largest_recorded(
    question: Literal["batch_size", "seq_len"],
    one: CellSpec,
    card: catalog.Gpu,
    asked: _Asked,
    say: Callable[[str], None],
    *,
    patient: bool,
) -> Largest:
    """By recordings, few of them: near what one recipe of several shapes says of all."""
    from vramprobe.predict import largest, recorded
    from vramprobe.predict.at_hand import CANNOT_EMULATE
    from vramprobe.recipe.recipe import CannotRecord, NotOneBranch

    try:
        rough = recorded.over_shapes(one, question, gpu=card, model=asked.model, say=say)
    except (CannotRecord, *CANNOT_EMULATE) as error:  # other events from shape to shape, or what ships knows shapes
        if isinstance(error, NotOneBranch) and not patient:
            raise
        least = _least_that_ships(one, asked.judge) if question == "batch_size" else 1
        return largest.largest_count(question, one, asked.judge, least=least)

    return largest.largest_count(question, one, asked.judge, rough=lambda other: asked.judged(other, rough(other)))


def _least_that_ships(one: CellSpec, judge: Judge) -> int:
    """Return 1 row, or 2 where the recipes that ship know several alone."""
    from vramprobe.predict.at_hand import CANNOT_EMULATE

    try:
        judge(one.model_copy(update={"batch_size": 1}))
    except CANNOT_EMULATE:
        return 2
    return 1


class _Asked(NamedTuple):
    """Basis of an inverse question."""

    words: dict[str, Any]  # of the cell
    judge: Judge
    model: CardFit | None
    judged: Callable[[CellSpec, Prediction], Judged]


def _asked(gpu: str, options: dict[str, Any], *, records: bool = True) -> _Asked:
    """Build the functions that judge a cell on ``gpu`` from predict's options; without ``records`` of what is at hand
    alone."""
    words, card = dict(options), catalog.gpu_or_size(gpu)
    model, device = given_fit(words.pop("fit", None)), words.pop("device", None)
    require_cuda(device)
    engine = engine_for(words.pop("engine", "auto"), words)
    say, _ = words.pop("say", lambda words: None), words.pop("patient", None)
    judged = _judging(card, words.get("loop"), widen=words.pop("widen", False))

    def judge(one: CellSpec) -> Judged:
        return judged(one, predicted(one, model, engine=engine, gpu=card, say=say, records=records))

    return _Asked(words | {"device": "cuda"}, judge, model, judged)


def _judging(card: catalog.Gpu, loop: str | None, *, widen: bool) -> Callable[[CellSpec, Prediction], Judged]:
    """Return what judges a predicted cell; with ``widen`` as ``vramprobe predict`` does, whose verdict holds what
    nobody named, the loop among it where ``loop`` is None."""
    from vramprobe.predict.largest import Judged
    from vramprobe.predict.unknowns import deciding, unknowns, wide_verdict

    def judged(one: CellSpec, prediction: Prediction) -> Judged:
        by = deciding(unknowns(one, prediction, ["loop"] if loop else [])) if widen else []
        said = [f"verdicts leave room for what nobody named, most for {by[0].name}: {by[0].tell}"] if by else []
        noted = prediction.model_copy(update={"warnings": [*prediction.warnings, *said]})
        return Judged(noted, wide_verdict(prediction, by, card))

    return judged
