"""Predict a cell, and what other options would save, for cells in words.

In: a cell's words (spec.option_names()), with those of its ranks, a fit, a GPU. Out: a Prediction, Changes. One
GPU by a recipe at hand, by arithmetic, or by a recording where that is asked for or a family has no arithmetic; one
rank of several by a recording. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from vramprobe import catalog, spec
from vramprobe.architecture import RunFails, UnsupportedArchitecture, architecture
from vramprobe.architecture.images import has_images
from vramprobe.choices import CpRotation, Offload, Sharding, meant
from vramprobe.errors import SpecError, VramprobeError
from vramprobe.rules.arithmetic import counted_architecture
from vramprobe.rules.not_sharded import reasons_not_run
from vramprobe.rules.sharding import HYBRID, with_group_size
from vramprobe.trainers import COMMONEST_OTHER, USUAL_LOOP, other_loop
from vramprobe.units import format_bytes

if TYPE_CHECKING:
    from vramprobe.model.card_fit import CardFit
    from vramprobe.predict.changes import Change, Options
    from vramprobe.predict.prediction import Engine, Prediction
    from vramprobe.predict.unknowns import Unknown
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
_OFFLOADED_ALONE = (
    "DeepSpeed's offload on a single GPU is not predicted: vramprobe profile --emulate GPU --empty-weights -- COMMAND "
    "runs it"
)
#: What else is needed by those that are for several GPUs.
_BESIDE = {
    "offload": f"sharding and num_gpus. {_OFFLOADED_ALONE}",
    "shard_size": f"sharding {' or '.join(HYBRID)}, and num_gpus",
    "cp_size": "sharding fsdp, and num_gpus",
    "cp_rotation": "sharding fsdp, num_gpus and cp_size",
    "only_rank": "sharding and num_gpus",
}


def cell(*, device: str = "auto", **options: Any) -> spec.CellSpec:
    """A resolved cell from its words; ``device`` auto is CUDA where a GPU is visible, else the CPU."""
    if device == "auto":
        from vramprobe.measure.environment import device_to_use

        device = device_to_use(device)
    return spec.resolve(device=device, **options)


def cell_on_ranks(*, device: str, **options: Any) -> spec.CellSpec:
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
            raise SpecError(f"{name} {value} is for several GPUs; give {_BESIDE[name]}")
    if ranks and (reason := one_gpu_alone(one)):
        raise SpecError(f"{reason}; leave {', '.join(ranks)} out")
    if ("sharding" in ranks) != ("num_gpus" in ranks):
        raise SpecError("sharding and num_gpus belong together: zero3 over 8 GPUs, say; give both or neither")
    if ranks.get("num_gpus") == 1:
        del ranks["sharding"]  # nothing is sharded
        if reasons := reasons_not_run(one.model_copy(update=ranks)):
            raise SpecError("; ".join([*reasons, *([_OFFLOADED_ALONE] if "offload" in ranks else [])]))
    return one.model_copy(update=ranks)


def one_gpu_alone(one: spec.CellSpec) -> str | None:
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


def predict(
    *,
    fit: str | Path | CardFit | None = None,
    device: str | None = None,
    engine: Engine | Literal["auto", "measured"] = "auto",
    gpu: str | None = None,
    replays: bool = True,
    python: str | Path | None = None,
    say: Callable[[str], None] = lambda words: None,
    open_words: list[Unknown] | None = None,
    records: bool = True,
    **options: Any,
) -> Prediction:
    """The memory of a cell that nobody ran; ``fit`` is a file, a model, ``none``, or None for what ships.

    The cell is for the device of the fit, or for CUDA without one, unless ``device`` says otherwise. ``auto`` takes a
    recipe at hand (recorded here before, or shipped), else arithmetic, and where an architecture has none the recipe
    engine (a recording on the emulated ``gpu``, kept); ``say`` hears what a recording does. ``options`` are the cell's
    words. With ``sharding`` and ``num_gpus``: the memory of one rank, whose batch is the cell's, by a recording of rank
    0, or of ``only_rank``. ``replays``: on CUDA by the allocator's replay, where the fit knows how far off that is;
    else by arithmetic alone, where there is some. ``python``: an interpreter with whose libraries the cell is recorded.
    ``engine`` measured: a recording on this machine's own GPU. ``open_words``: a list that takes what the words leave
    open (unknowns.py); no interval holds that. ``records``: False raises UnsupportedArchitecture where ``auto`` would
    record.
    """
    from vramprobe.model.card_fit import shipped_fit

    model = given_fit(None if str(fit) == "none" else fit)
    spec = cell_on_ranks(device=device or (model.device if model else "cuda"), **options)
    where, engine = _surroundings(engine, python)
    engine = engine_for(engine, options)
    card = catalog.gpu_or_size(gpu) if gpu is not None else None
    beyond = shipped_fit(spec.device, card, of_one_card=not replays) if fit is None else model
    if spec.num_gpus == 1:
        model = beyond
    words = {"engine": engine, "gpu": card, "say": say, "beyond": beyond, "where": where, "records": records}
    found = predicted(spec, model, **words, replays=replays, retries=replays)
    if open_words is not None:
        from vramprobe.predict.unknowns import unknowns

        told = {"loop": options.get("loop"), "versions": where}
        given = [name for name, value in told.items() if value is not None]
        by_formula = words | {"engine": "formula"}
        open_words += unknowns(spec, found, card, given, lambda one: predicted(one, model, **by_formula))
    if options.get("loop") is not None:
        return found
    said = other_loop(spec.num_gpus, found.peak_allocated_bytes.value, _outputs_bytes(spec, found.engine))
    return found.model_copy(update={"warnings": [*found.warnings, *said]}) if said else found


def _surroundings(engine: str, python: str | Path | None) -> tuple[Surroundings | None, Any]:
    """(the libraries and the GPU to record with where they are not the usual ones, the engine). Raises SpecError."""
    if python is None and engine != "measured":
        return None, engine
    if python is not None and engine not in ("auto", "recipe"):
        raise SpecError(f"python is an interpreter to record with, and {engine} was given beside it; drop one of them")
    from vramprobe.recipe.recorder import Surroundings

    return Surroundings(python=python and Path(python).absolute(), measured=engine == "measured"), "recipe"


def _outputs_bytes(one: spec.CellSpec, engine: Engine) -> int:
    """Bytes that the commonest other loop keeps; of a recording's model only the vocabulary is known."""
    if engine == "formula":
        from vramprobe.terms.step.moments import kept_outputs_bytes

        return kept_outputs_bytes(one, architecture(one.architecture), COMMONEST_OTHER)
    from vramprobe.predict.unknowns import other_loop_bytes

    return other_loop_bytes(one)


def changes(
    *,
    gpu: str | None = None,
    fit: str | Path | CardFit | None = None,
    device: str | None = None,
    replays: bool = True,
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
    several GPUs near (predict/shares.py), other numbers of them and other kinds of sharding included. Raises
    UnsupportedArchitecture where the cell itself would take one.
    """
    from vramprobe.predict.changes import candidates, smaller_images, what_would_save

    words, num_gpus = without_recipe(options) | {"device": device}, options.get("num_gpus") or 1
    own = {"fit": fit, "gpu": gpu, "say": say, "replays": replays, "records": records or engine == "recipe"}
    card = catalog.gpu_or_size(gpu) if gpu is not None else None

    def with_options(others: Options) -> Prediction:
        if num_gpus > 1:
            return _near(words | others, card)
        if own["records"] and others in tried:
            words_of = ", ".join(f"{name} {value}" for name, value in others.items())
            say(f"trying {words_of}, {tried.index(others) + 1} of {len(tried)}")
        try:
            return predict(**own, engine=engine, **words | others)
        except UnsupportedArchitecture as error:
            if left_out is not None and others in tried and not isinstance(error, RunFails):
                left_out.append(others)
            raise

    alone = {name: value for name, value in options.items() if name not in _RANKS}
    spec = cell(device=device or "cuda", **alone).model_copy(update={"num_gpus": num_gpus})
    tried = [*candidates(spec), *smaller_images(spec)]
    return what_would_save(with_options({}), tried, with_options, card)


def _near(words: dict[str, Any], card: catalog.Gpu | None) -> Prediction:
    """Raises UnsupportedArchitecture for what is recorded alone, SpecError for what the libraries do not run."""
    from vramprobe.predict.shares import near

    words = {name: value for name, value in words.items() if value is not None}
    if words["sharding"] not in HYBRID:
        words.pop("shard_size", None)
    one = cell_on_ranks(**{"device": "cuda"} | words)
    if reasons := reasons_not_run(with_group_size(one)):
        raise SpecError("; ".join(reasons))
    return near(one, card)


def without_recipe(options: dict[str, Any]) -> dict[str, Any]:
    """A recipe as the words that it stands for, so that each of them can be another."""
    named = spec.RECIPES.get(options.get("recipe"), {})
    return {name: value for name, value in (named | options).items() if name != "recipe"}


def engine_for(engine: str, options: dict[str, Any]) -> Any:
    """The engine that is asked for, or needed: a rank of several is recorded. Raises SpecError."""
    from vramprobe.predict.prediction import Engine

    if engine not in (known := ("auto", *(one for one in get_args(Engine) if one != "near"))):
        raise SpecError(f"engine: {engine!r} given; allowed: {', '.join(known)}")
    num_gpus = options.get("num_gpus") or 1
    if num_gpus > 1 and engine == "formula":
        raise SpecError(f"engine formula is arithmetic of one GPU, and num_gpus {num_gpus} was given: drop one of them")
    return engine if num_gpus == 1 else "recipe"


def predicted(
    one: spec.CellSpec,
    model: CardFit | None,
    *,
    engine: str,
    gpu: catalog.Gpu | None,
    replays: bool = False,
    retries: bool = False,
    beyond: CardFit | None = None,
    where: Surroundings | None = None,
    say: Callable[[str], None] = lambda words: None,
    records: bool = True,
) -> Prediction:
    """By a recipe or the arithmetic, as ``engine`` says; ``say`` hears what a recording does.

    ``auto``: by a recipe at hand where ``replays`` asks for its log and a fit for what a real run takes, else by
    arithmetic, and where there is none by a recipe at hand, or one that is recorded now. ``beyond``: the fit that says
    what a recording's device takes beside, where arithmetic is asked without one. ``where``: what a recording runs
    with, if not the usual. ``records``: False raises UnsupportedArchitecture in place of recording for ``auto``.
    """
    may_be_kept, fit = engine == "auto" and where is None, model or beyond
    is_first = may_be_kept and replays and fit is not None
    if is_first and (found := _at_hand(one, fit, gpu)) is not None:
        return found
    missing: UnsupportedArchitecture | None = None
    if engine in ("auto", "formula"):
        try:
            counted_architecture(one)  # where there is none, the arithmetic need not be loaded

            from vramprobe.predict.predict import predict as predict_cell

            return predict_cell(one, model, gpu=gpu, replays=replays, retries=retries)
        except UnsupportedArchitecture as error:
            if engine == "formula" or isinstance(error, RunFails):
                raise
            missing = error
        if may_be_kept and not is_first and (found := _at_hand(one, fit, gpu)) is not None:
            return found
        if missing is not None and not records:
            raise missing
    return _recorded(one, fit, gpu, say, missing, where)


def _least_bytes(one: spec.CellSpec, gpu: catalog.Gpu | None) -> int:
    """The lower end of what one of several ranks allocates; 0 where nothing is known of it."""
    from vramprobe.predict.shares import near

    if one.num_gpus == 1:
        return 0
    try:
        return near(one, gpu).peak_allocated_bytes.low
    except VramprobeError:
        return 0


def _at_hand(one: spec.CellSpec, model: CardFit | None, gpu: catalog.Gpu | None) -> Prediction | None:
    """By a recipe that was recorded before, or one that ships; None without either."""
    from vramprobe.predict import at_hand, recorded

    replay = at_hand.replay_at_hand(one, gpu=gpu)
    return None if replay is None else recorded.predict_replay(replay, one, gpu=gpu, model=model)


def _recorded(
    one: spec.CellSpec,
    model: CardFit | None,
    gpu: catalog.Gpu | None,
    say: Callable[[str], None],
    missing: VramprobeError | None,
    where: Surroundings | None,
) -> Prediction:
    """By a recipe, recorded now if it is not in the cache; an error says also why there is no arithmetic
    (``missing``)."""
    from vramprobe.predict import at_hand, recorded

    try:
        return recorded.predict(one, gpu=gpu, model=model, say=say, where=where or recorded.USUAL)
    except (*at_hand.CANNOT_EMULATE, at_hand.NoRecipe) as error:
        if isinstance(error, at_hand.CANNOT_EMULATE) and (least := _least_bytes(one, gpu)):
            raise type(error)(f"{error} A rank allocates at least about {format_bytes(least)}, by arithmetic") from None
        if missing is None:
            raise
        raise type(missing)(f"no recipe: {error}; and no arithmetic: {missing}") from None
