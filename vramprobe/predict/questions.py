"""What a cell needs, and what fits a GPU: predict, and its inverse questions, for cells in words.

In: a cell's words (spec.option_names()), a fit, a GPU. Out: a Prediction, a Largest, a MinGpus. By arithmetic, or by
simulation where that is asked for or a family has no arithmetic. Imports no torch until it simulates.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from vramprobe import catalog, spec
from vramprobe.choices import DEVICE_MAP, HYBRID, TENSOR_PARALLEL, CpRotation, Offload, Sharding
from vramprobe.errors import OutOfRange, SpecError

if TYPE_CHECKING:
    from vramprobe.model.memory_model import MemoryModel
    from vramprobe.predict.changes import Change, Options
    from vramprobe.predict.largest import Judge, Largest
    from vramprobe.predict.prediction import Engine, Prediction
    from vramprobe.predict.sharding import MinGpus


#: Of several GPUs, unless told.
SHARDING: Sharding = "fsdp"


class _Ranks(NamedTuple):
    """Of which kind, how many, to a group, to a sequence and its rotation, what is offloaded; null: one GPU, or what is
    usual."""

    sharding: Sharding | None = None
    num_gpus: int | None = None
    shard_size: int | None = None
    cp_size: int | None = None
    cp_rotation: CpRotation | None = None
    offload: Offload | None = None


def cell(*, device: str = "auto", **options: Any) -> spec.CellSpec:
    """A resolved cell from its words; ``device`` auto is CUDA where a GPU is visible, else the CPU."""
    if device == "auto":
        from vramprobe.measure.environment import device_to_use

        device = device_to_use(device)
    return spec.resolve(device=device, **options)


def given_fit(fit: str | Path | MemoryModel | None) -> MemoryModel | None:
    """The fit that is meant: a file is read, None stays None. Raises FitError for a file that is none."""
    if isinstance(fit, str | Path):
        from vramprobe.model.memory_model import load_fit

        return load_fit(fit)
    return fit


def predict(
    *,
    fit: str | Path | MemoryModel | None = None,
    device: str | None = None,
    engine: Engine | Literal["auto"] = "auto",
    gpu: str | None = None,
    sharding: Sharding | None = None,
    num_gpus: int | None = None,
    shard_size: int | None = None,
    cp_size: int | None = None,
    cp_rotation: CpRotation | None = None,
    offload: Offload | None = None,
    allow_extrapolation: bool = False,
    replays: bool = True,
    stack: str | None = None,
    **options: Any,
) -> Prediction:
    """The memory of a cell that nobody ran; ``fit`` is a file, a model, ``none``, or None for what ships.

    The cell is for the device of the fit, or for CUDA without one, unless ``device`` says otherwise. Without arithmetic
    for the architecture, ``auto`` takes the trace engine (seconds, with torch), which chooses kernels as on ``gpu``.
    ``sharding`` over ``num_gpus``: the memory of one rank, by arithmetic, whose batch is the cell's; ``shard_size`` of
    them to a group, under a hybrid; ``cp_size`` to a sequence, whose keys and values come by ``cp_rotation``;
    ``offload``: what they keep in host memory. ``replays``: on CUDA by the allocator's
    replay, where the fit knows how far off that is; else by arithmetic alone.
    ``stack``: under another release, ``transformers-4.48``, by arithmetic alone.
    """
    from vramprobe.model.memory_model import shipped_fit
    from vramprobe.predict.prediction import with_retries

    ranks = _Ranks(sharding, num_gpus, shard_size, cp_size, cp_rotation, offload)
    model = given_fit(None if str(fit) == "none" else fit)
    spec = cell(device=device or (model.device if model else "cuda"), **options)
    if stack is not None:
        from vramprobe.predict.stack import on_stack

        if sharding is not None or engine == "trace":
            given = "sharding" if sharding is not None else "engine trace"
            raise SpecError(f"stack is by arithmetic, of one GPU: drop {given}, or stack")
        spec, engine = on_stack(spec, stack), "formula"
    if fit is None and sharding is None:
        card = catalog.find_gpu(gpu) if gpu is not None else None
        model = shipped_fit(spec.device, card, of_one_card=not replays)
    replays = replays and (sharding is None or fit is None)  # whoever asks for no fit asks for arithmetic alone
    try:
        found = _engine(model, engine, gpu, ranks, allow_extrapolation, replays=replays)(spec)
        if not replays or gpu is None or found.engine == "trace" or sharding is not None:
            return found
        return with_retries(found, spec, catalog.find_gpu(gpu))
    except OutOfRange as error:
        if fit is not None:
            raise
        found = _engine(None, engine, gpu, ranks, allow_extrapolation)(spec)
        note = f"the fit that ships for {spec.device} does not reach so far: {error.prediction.warnings[0]}"
        return found.model_copy(update={"warnings": [*found.warnings, note]})


def changes(
    *,
    gpu: str | None = None,
    fit: str | Path | MemoryModel | None = None,
    device: str | None = None,
    sharding: Sharding | None = None,
    num_gpus: int | None = None,
    shard_size: int | None = None,
    cp_size: int | None = None,
    cp_rotation: CpRotation | None = None,
    offload: Offload | None = None,
    allow_extrapolation: bool = False,
    replays: bool = True,
    **options: Any,
) -> list[Change]:
    """What other options of a cell would save, by arithmetic, and whether it fits ``gpu`` then.

    Each by itself, the one that saves most first; before them several together, where none is enough. The options are
    those of :func:`predict`, of which ``replays`` is for several GPUs alone; these shard as ``sharding`` says, else as
    fsdp. Raises UnsupportedArchitecture where there is no arithmetic.
    """
    from vramprobe.predict.changes import candidates, what_would_save

    ranks = _Ranks(sharding, num_gpus, shard_size, cp_size, cp_rotation, offload)._asdict()
    words = _without_recipe(options) | {"device": device} | ranks
    own = {
        "fit": fit, "gpu": gpu, "engine": "formula", "allow_extrapolation": allow_extrapolation,
        "replays": replays and num_gpus is not None,  # what is compared is of one tier
    }  # fmt: skip

    def predicted(others: Options) -> Prediction:
        asked = words | others
        if (asked["num_gpus"] or 1) > 1:
            asked = {"sharding": SHARDING} | {name: value for name, value in asked.items() if value is not None}
            if asked["sharding"] not in HYBRID:
                asked.pop("shard_size", None)
        return predict(**own, **asked)

    spec = cell(device=device or "cuda", **options)
    found = what_would_save(
        predicted({}), candidates(spec, num_gpus or 1), predicted, catalog.find_gpu(gpu) if gpu is not None else None
    )
    if num_gpus is not None:
        return found
    return [
        one.model_copy(update={"options": one.options | {"sharding": SHARDING}}) if "num_gpus" in one.options else one
        for one in found
    ]


def _without_recipe(options: dict[str, Any]) -> dict[str, Any]:
    """A recipe as the words that it stands for, so that each of them can be another."""
    named = spec.RECIPES.get(options.get("recipe"), {})
    return {name: value for name, value in (named | options).items() if name != "recipe"}


def _engine(
    model: MemoryModel | None, engine: str, gpu: str | None, ranks: _Ranks, allow_extrapolation: bool, *,
    replays: bool = False,
) -> Callable[[spec.CellSpec], Prediction]:  # fmt: skip
    """What predicts a cell: the arithmetic, for one rank of several with a sharding, or the simulation.

    ``replays``: the arithmetic's reserved memory by the allocator's replay, for one answer and not for dozens.
    """
    from vramprobe.architecture import UnsupportedArchitecture
    from vramprobe.predict.prediction import Engine
    from vramprobe.predict.prediction import predict as predict_cell

    if engine not in (known := ("auto", *get_args(Engine))):
        raise SpecError(f"engine: {engine!r} given; allowed: {', '.join(known)}")
    sharding, num_gpus, shard_size, cp_size, cp_rotation, offload = ranks
    if offload not in (None, "none") and sharding is None:
        raise SpecError(f"offload {offload} is for several GPUs; give sharding and num_gpus")
    if shard_size is not None and sharding is None:
        raise SpecError(
            f"shard_size {shard_size} is for several GPUs; give sharding {' or '.join(HYBRID)}, and num_gpus"
        )
    if cp_size is not None and sharding is None:
        raise SpecError(f"cp_size {cp_size} is for several GPUs; give sharding fsdp, and num_gpus")
    if cp_rotation is not None and cp_rotation not in get_args(CpRotation):
        raise SpecError(f"cp_rotation: {cp_rotation!r} given; allowed: {', '.join(get_args(CpRotation))}")
    if cp_rotation is not None and sharding is None:
        raise SpecError(f"cp_rotation {cp_rotation} is for several GPUs; give sharding fsdp, num_gpus and cp_size")
    if (sharding is None) != (num_gpus is None):
        raise SpecError("sharding and num_gpus belong together: zero3 over 8 GPUs, say; give both or neither")
    if sharding is not None and engine == "trace":
        raise SpecError("sharding is by arithmetic, and the trace engine simulates one GPU; use engine formula")
    card = catalog.find_gpu(gpu) if gpu is not None else None
    extra = {"allow_extrapolation": allow_extrapolation, "gpu": card}

    def predict_one(one: spec.CellSpec) -> Prediction:
        if engine != "trace":
            try:
                if sharding is not None and num_gpus is not None:
                    from vramprobe.predict.cards import predict_several

                    return predict_several(
                        one, num_gpus, sharding, model, shard_size=shard_size, cp_size=cp_size or 1,
                        cp_rotation=cp_rotation or "allgather", offload=offload or "none",
                        replays=replays and model is None, **extra,
                    )  # fmt: skip
                return predict_cell(one, model, replays=replays, **extra)
            except UnsupportedArchitecture:
                if engine == "formula" or sharding is not None:
                    raise
        from vramprobe.predict import trace_engine as trace  # loads torch

        return trace.predict(one, gpu=card, model=model)

    return predict_one


def max_batch_size(*, gpu: str, seq_len: int, **options: Any) -> Largest:
    """The largest batch of a cell that fits on ``gpu``; ``options`` are those of :func:`predict`.

    Exact, by bisection; on CUDA by the allocator's replay, near what arithmetic alone says. Raises VramprobeError where
    not even 1 fits. Without arithmetic for the architecture it asks for ``engine="trace"``, which takes about a dozen
    simulations of some seconds each.
    """
    return _largest_count("batch_size", gpu, seq_len=seq_len, batch_size=1, **options)


def max_seq_len(*, gpu: str, batch_size: int, **options: Any) -> Largest:
    """The largest length of a cell that fits on ``gpu``, within learned positions; as :func:`max_batch_size`."""
    if (options.get("cp_size") or 1) > 1:
        raise SpecError(
            f"cp_size {options['cp_size']}: the longest sequence is not looked for where ranks share each; predict "
            "lengths one by one"
        )
    return _largest_count("seq_len", gpu, seq_len=1, batch_size=batch_size, **options)


def largest_model(*, gpu: str, **options: Any) -> Largest:
    """The largest model of the catalog that fits on ``gpu``; ``options`` are those of :func:`predict` but the model.

    Models without arithmetic are named and not judged.
    """
    from vramprobe.predict import largest

    words, judge, *_ = _asked(gpu, options, engine="formula")
    device = words.pop("device", None) or "cuda"

    def named(slug: str) -> spec.CellSpec | str:
        try:
            one = cell(model=slug, device=device, **words)
        except SpecError as error:
            return str(error)
        if options.get("sharding") != TENSOR_PARALLEL:
            return one
        ranks = {"sharding": TENSOR_PARALLEL, "num_gpus": options["num_gpus"]}
        return spec.cannot_divide_layers(one.model_copy(update=ranks)) or one

    cells = [(entry.name, named(entry.name)) for entry in catalog.list_models()]
    if all(isinstance(one, str) for _, one in cells):
        raise SpecError(str(cells[0][1]))
    return largest.largest_model(cells, judge, catalog.find_gpu(gpu).name)


def min_gpus(
    *,
    gpu: str,
    sharding: Sharding,
    fit: str | Path | MemoryModel | None = None,
    offload: Offload | None = None,
    allow_extrapolation: bool = False,
    **options: Any,
) -> MinGpus:
    """The fewest of ``gpu`` on which each rank of a cell fits under ``sharding``, by arithmetic, not measured."""
    from vramprobe.predict import sharding as ranks

    one = cell(device=options.pop("device", None) or "cuda", **options)
    card, model = catalog.find_gpu(gpu), given_fit(None if str(fit) == "none" else fit)
    if sharding in (TENSOR_PARALLEL, DEVICE_MAP):
        from vramprobe.predict.cards import min_cards
        from vramprobe.predict.layers import min_ranks

        ranks.require_offload(one, sharding, offload or "none")
        fewest = min_ranks if sharding == TENSOR_PARALLEL else min_cards
        return fewest(one, card, model, allow_extrapolation=allow_extrapolation)
    counted = ranks.require_arithmetic(sharding)
    return ranks.min_gpus(
        one, card, counted, model, offload=offload or "none", allow_extrapolation=allow_extrapolation,
        replays=fit is None,
    )  # fmt: skip


def _largest_count(question: Literal["batch_size", "seq_len"], gpu: str, **options: Any) -> Largest:
    from vramprobe.architecture import UnsupportedArchitecture, architecture
    from vramprobe.predict import largest

    allow, engine = options.get("allow_extrapolation", False), options.get("engine", "auto")
    # An inverse question of the simulation takes a minute, so nobody falls into it by chance.
    asked = _asked(gpu, options, engine="trace" if engine == "trace" else "formula")
    one = cell(device=asked.words.pop("device", None) or "cuda", **asked.words)
    if engine != "trace":
        try:
            architecture(one.architecture)
        except UnsupportedArchitecture as error:
            raise UnsupportedArchitecture(
                f"{error}. The trace engine can answer, by about a dozen simulations of some seconds each: engine trace"
            ) from None
    if asked.replay is not None:
        try:
            return largest.largest_replayed(
                question, one, asked.replay, asked.judge, model=asked.replays, allow_extrapolation=allow
            )
        except OutOfRange:
            if options.get("fit") is not None:
                raise  # the fit that ships does not reach so far, and arithmetic does
    return largest.largest_count(
        question, one, asked.judge, model=None if engine == "trace" else asked.model, allow_extrapolation=allow,
    )  # fmt: skip


class _Asked(NamedTuple):
    """What an inverse question rests on; ``replay`` is null where nothing is replayed, ``replays`` without a fit."""

    words: dict[str, Any]  # of the cell
    judge: Judge
    model: MemoryModel | None
    replay: Judge | None = None
    replays: MemoryModel | None = None


def _asked(gpu: str, options: dict[str, Any], engine: str) -> _Asked:
    """What judges a cell on ``gpu``, from predict's options."""
    from vramprobe.model.memory_model import shipped_fit
    from vramprobe.predict.largest import Judged
    from vramprobe.predict.prediction import verdict

    words, card = dict(options), catalog.find_gpu(gpu)
    fit = words.pop("fit", None)
    model = replays = given_fit(None if str(fit) == "none" else fit)
    if fit is None and words.get("device") != "cpu" and words.get("sharding") is None:
        model, replays = shipped_fit("cuda", card, of_one_card=True), shipped_fit("cuda", card)
    words.pop("engine", None)
    ranks = _Ranks(*(words.pop(name, None) for name in _Ranks._fields))
    allow = words.pop("allow_extrapolation", False)

    def judge_by(predict_one: Callable[[spec.CellSpec], Prediction]) -> Judge:
        def judge(one: spec.CellSpec) -> Judged:
            try:
                prediction, refusal = predict_one(one), None
            except OutOfRange as error:
                prediction, refusal = error.prediction, error
            return Judged(prediction, verdict(prediction, card), refusal)

        return judge

    rough = judge_by(_engine(model, engine, gpu, ranks, allow))
    is_replayed = engine != "trace" and words.get("device") != "cpu"
    by_fit = ranks.sharding is None and replays is not None and replays.reserved_over_replayed is not None
    if not is_replayed or not (by_fit or (ranks.sharding is not None and fit is None)):
        return _Asked(words, rough, model)
    return _Asked(words, rough, model, judge_by(_engine(replays, engine, gpu, ranks, allow, replays=True)), replays)
