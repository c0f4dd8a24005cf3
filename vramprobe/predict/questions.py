"""Predict a cell, and what other options would save, for cells in words.

In: a cell's words (resolve.option_names()), with those of its ranks, a fit, a GPU. Out: a Prediction, Changes. By a
recipe at hand, of one GPU, else by a recording. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from vramprobe import catalog
from vramprobe.architecture.images import has_images
from vramprobe.choices import RECIPES, CpRotation, Offload, Sharding, meant
from vramprobe.errors import SpecError, VramprobeError
from vramprobe.resolve import resolve
from vramprobe.rules.not_sharded import offloads_alone, reasons_not_run
from vramprobe.rules.sharding import HYBRID, with_group_size
from vramprobe.spec import CellSpec
from vramprobe.trainers import USUAL_LOOP, other_loop
from vramprobe.units import format_bytes

if TYPE_CHECKING:
    from vramprobe.model.card_fit import CardFit
    from vramprobe.predict.changes import Change, Options
    from vramprobe.predict.prediction import Prediction
    from vramprobe.recipe.recorder import Surroundings


#: Of several GPUs by default.
SHARDING: Sharding = "fsdp"
#: The words of a cell's ranks; of a count no value is named.
_RANKS = {
    "sharding": get_args(Sharding),
    "num_gpus": None,
    "shard_size": None,
    "cp_size": None,
    "cp_rotation": get_args(CpRotation),
    "offload": get_args(Offload),
    "only_rank": None,
}
_MOST_RANKS = 2**20
#: What else is needed by those that are of ranks.
_BESIDE = {
    "offload": "sharding and num_gpus: zero3 on 1, say",
    "shard_size": f"sharding {' or '.join(HYBRID)}, and num_gpus",
    "cp_size": "sharding fsdp, and num_gpus",
    "cp_rotation": "sharding fsdp, num_gpus and cp_size",
    "only_rank": "sharding and num_gpus",
}


def cell(*, device: str = "auto", **options: Any) -> CellSpec:
    """A resolved cell from its words; ``device`` auto is CUDA where a GPU is visible, else the CPU."""
    if device == "auto":
        from vramprobe.measure.environment import device_to_use

        device = device_to_use(device)
    return resolve(device=device, **options)


def cell_on_ranks(*, device: str, **options: Any) -> CellSpec:
    """Return the cell with its ranks; more of them can be predicted than run. Raises SpecError."""
    ranks = {name: meant(name, value) for name in _RANKS if (value := options.pop(name, None)) is not None}
    if ranks.get("offload") == "none":
        del ranks["offload"]
    one = cell(device=device, **options)
    for name, value in ranks.items():
        least = 0 if name == "only_rank" else 1
        if (allowed := _RANKS[name]) is None and not least <= value <= _MOST_RANKS:
            raise SpecError(f"{name}: {value} given; must be from {least} to {_MOST_RANKS:,}")
        if allowed is not None and value not in allowed:
            raise SpecError(f"{name}: {value!r} given; allowed: {', '.join(allowed)}")
        if name in _BESIDE and "sharding" not in ranks:
            raise SpecError(f"{name} {value} needs {_BESIDE[name]}")
    if ranks and (reason := one_gpu_alone(one)):
        raise SpecError(f"{reason}; leave {', '.join(ranks)} out")
    if ("sharding" in ranks) != ("num_gpus" in ranks):
        raise SpecError("sharding and num_gpus belong together: zero3 over 8 GPUs, say; give both or neither")
    if ranks.get("num_gpus") == 1 and not offloads_alone(one.model_copy(update=ranks)):
        del ranks["sharding"]  # nothing is sharded
        if reasons := reasons_not_run(one.model_copy(update=ranks)):
            raise SpecError("; ".join(reasons))
    return one.model_copy(update=ranks)


def one_gpu_alone(one: CellSpec) -> str | None:
    """Return why no ranks of a cell are predicted; None where they are."""
    if one.loop != USUAL_LOOP:
        return f"loop {one.loop} is known of one GPU"
    return f"{one.model} has a vision tower, which is predicted on one GPU" if has_images(one.architecture) else None


def given_fit(fit: str | Path | CardFit | None) -> CardFit | None:
    """The fit that is meant: a file is read, None stays None. Raises FitError for a file that is none."""
    if isinstance(fit, str | Path):
        from vramprobe.model.card_fit import load_fit

        return load_fit(fit)
    return fit


Engine = Literal["auto", "recipe", "measured"]


def predict(
    *,
    fit: str | Path | CardFit | None = None,
    device: str | None = None,
    engine: Engine = "auto",
    gpu: str | None = None,
    python: str | Path | None = None,
    say: Callable[[str], None] = lambda words: None,
    records: bool = True,
    **options: Any,
) -> Prediction:
    """The memory of a cell that nobody ran, on CUDA; ``options`` are the cell's words.

    ``auto`` takes a recipe at hand (recorded here before, or shipped), else records the cell on the emulated ``gpu``,
    of which ``say`` hears, and keeps that; ``recipe`` has this very cell recorded, ``measured`` on this machine's own
    GPU. With ``sharding`` and ``num_gpus``: the memory of one rank, whose batch is the cell's, by a recording of rank
    0, or of ``only_rank``. ``fit``: a file or a model of what measured runs of a card took beside recordings.
    ``python``: an interpreter with whose libraries the cell is recorded. ``records``: False takes the nearest recipe
    that ships where ``auto`` would record, or raises NotAtHand. No interval holds what the words leave open
    (unknowns.py).
    """
    require_cuda(device)
    spec = cell_on_ranks(device="cuda", **options)
    where, engine = _surroundings(engine, python)
    engine = engine_for(engine, options)
    card = catalog.gpu_or_size(gpu) if gpu is not None else None
    found = predicted(spec, given_fit(fit), engine=engine, gpu=card, say=say, where=where, records=records)
    if options.get("loop") is not None:
        return found
    from vramprobe.predict.unknowns import other_loop_bytes

    said = other_loop(spec, found.peak_allocated_bytes.value, other_loop_bytes(spec))
    return found.model_copy(update={"warnings": [*found.warnings, *said]}) if said else found


def require_cuda(device: str | None) -> None:
    """Raise SpecError for another device: what runs on a CPU is measured."""
    if device not in (None, "cuda"):
        raise SpecError(
            f"device: {device!r} given; predicted is memory of GPUs (cuda). Measure the cell on this machine's CPU: "
            "vramprobe measure --device cpu"
        )


def _surroundings(engine: str, python: str | Path | None) -> tuple[Surroundings | None, Any]:
    """(the libraries and the GPU to record with where they are not the usual ones, the engine). Raises SpecError."""
    if python is None and engine != "measured":
        return None, engine
    if python is not None and engine not in ("auto", "recipe"):
        raise SpecError(f"python is an interpreter to record with, and {engine} was given beside it; drop one of them")
    from vramprobe.recipe.recorder import Surroundings

    interpreter = Path(python).absolute() if python is not None else None
    return Surroundings(python=interpreter, measured=engine == "measured"), "recipe"


def changes(
    *,
    gpu: str | None = None,
    fit: str | Path | CardFit | None = None,
    device: str | None = None,
    engine: Literal["auto", "recipe"] = "auto",
    records: bool = False,
    say: Callable[[str], None] = lambda words: None,
    left_out: list[Options] | None = None,
    **options: Any,
) -> list[Change]:
    """Return what other options of a cell would save, and whether it fits ``gpu`` then.

    Each by itself, the one that saves most first; before them several together, where none is enough. The options are
    those of :func:`predict`. Of one GPU as predict answers; what would take a recording is left out unless ``records``
    (``engine`` recipe: each is recorded, seconds each, of which ``say`` hears); ``left_out`` takes those options. Of
    several GPUs near (predict/shares.py), other numbers of them and other kinds of sharding included. Raises NotAtHand
    where the cell itself would take one.
    """
    from vramprobe.predict.at_hand import NotAtHand
    from vramprobe.predict.changes import candidates, smaller_images, what_would_save

    words, spec = without_recipe(options) | {"device": device}, cell_on_ranks(device=device or "cuda", **options)
    own = {"fit": fit, "gpu": gpu, "say": say, "records": records or engine == "recipe"}
    card = catalog.gpu_or_size(gpu) if gpu is not None else None

    def with_options(others: Options) -> Prediction:
        if own["records"] and others in tried:
            words_of = ", ".join(f"{name} {value}" for name, value in others.items())
            say(f"trying {words_of}, {tried.index(others) + 1} of {len(tried)}")
        try:
            if spec.is_sharded:
                return _near(words | others, card, records=own["records"], say=say)
            return predict(**own, engine=engine, **words | others)
        except NotAtHand:
            if left_out is not None and others in tried:
                left_out.append(others)
            raise

    tried = [*candidates(spec), *smaller_images(spec)]
    return what_would_save(with_options({}), tried, with_options, card)


def _near(words: dict[str, Any], card: catalog.Gpu | None, *, records: bool, say: Callable[[str], None]) -> Prediction:
    """Raises what near raises, SpecError for what the libraries do not run."""
    from vramprobe.predict.shares import near

    words = {name: value for name, value in words.items() if value is not None}
    if words["sharding"] not in HYBRID:
        words.pop("shard_size", None)
    one = cell_on_ranks(**{"device": "cuda"} | words)
    if reasons := reasons_not_run(with_group_size(one)):
        raise SpecError("; ".join(reasons))
    return near(one, card, records=records, say=say)


def without_recipe(options: dict[str, Any]) -> dict[str, Any]:
    """A recipe as the words that it stands for, so that each of them can be another."""
    named = RECIPES.get(options.get("recipe", ""), {})
    return {name: value for name, value in (named | options).items() if name != "recipe"}


def engine_for(engine: str, options: dict[str, Any]) -> Any:
    """The engine that is asked for, or needed: a rank of several is recorded. Raises SpecError."""
    if engine not in get_args(Engine):
        raise SpecError(f"engine: {engine!r} given; allowed: {', '.join(get_args(Engine))}")
    return engine if (options.get("num_gpus") or 1) == 1 else "recipe"


def predicted(
    one: CellSpec,
    model: CardFit | None = None,
    *,
    engine: str = "auto",
    gpu: catalog.Gpu | None,
    where: Surroundings | None = None,
    say: Callable[[str], None] = lambda words: None,
    records: bool = True,
) -> Prediction:
    """By a recipe at hand where ``engine`` is auto, else by one of this very cell; ``say`` hears what a recording does.

    ``where``: what a recording runs with, if not the usual. ``records``: False takes the nearest recipe that ships in
    place of recording, or raises NotAtHand.
    """
    from vramprobe.predict import at_hand, recorded
    from vramprobe.predict.host_memory import HostTooSmall
    from vramprobe.predict.shares import near

    if engine == "auto" and where is None:
        replay = at_hand.replay_at_hand(one, gpu=gpu, near=not records)
        if replay is not None:
            return recorded.predict_replay(replay, one, gpu=gpu, model=model)
        if not records:
            raise at_hand.NotAtHand(f"no recipe of {one.cell_id} is at hand: vramprobe predict records one")
    try:
        return recorded.predict(one, gpu=gpu, model=model, say=say, where=where or recorded.USUAL)
    except HostTooSmall as reason:
        if where is not None:
            raise
        found = recorded.with_host(near(one, gpu, records=True, say=say), one)
        return found.model_copy(update={"warnings": [*found.warnings, f"near, not recorded: {reason}"]})
    except at_hand.CANNOT_EMULATE as error:
        if least := _least_bytes(one, gpu):
            raise type(error)(f"{error} A rank allocates at least about {format_bytes(least)}, near") from None
        raise


def _least_bytes(one: CellSpec, gpu: catalog.Gpu | None) -> int:
    """The lower end of what one of several ranks allocates; 0 where nothing is known of it."""
    from vramprobe.predict.shares import near

    if not one.is_sharded:
        return 0
    try:
        return near(one, gpu).peak_allocated_bytes.low
    except VramprobeError:
        return 0
