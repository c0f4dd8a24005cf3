"""Questions of those who hold transformers' objects: predict, recommend, techniques.

In: a model, TrainingArguments, a LoraConfig, further options of a cell. Out: what predict/, recommend/ and techniques/
answer, with the verdict for the GPU. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

from pydantic import Field

from vramprobe import catalog
from vramprobe.errors import SpecError
from vramprobe.interop import Words
from vramprobe.interop.models import is_training_file, read_model
from vramprobe.predict import questions
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.reasons import largest_part, parts
from vramprobe.predict.unknowns import Unknown, unknowns, wide_verdict, with_unknowns
from vramprobe.predict.verdict import Verdict, usable_bytes
from vramprobe.recommend.step_cost import StepCost, slower_share, speed_at_hand, step_cost
from vramprobe.records.shown import Shown
from vramprobe.resolve import option_names, understood
from vramprobe.units import format_bytes

if TYPE_CHECKING:
    from vramprobe.predict.changes import Change
    from vramprobe.recommend.answer import Recommendation
    from vramprobe.recommend.inverse import Most
    from vramprobe.recommend.ranking import Ranking
    from vramprobe.techniques.savings import TechniqueList

#: What recommend is asked beside a cell's options.
_OF_RECOMMEND = (
    "tokens", "deadline", "budget", "gpus", "max_gpus", "global_batch", "sharding", "provider", "region", "terms",
    "prices", "records", "most", "today", "say",
)  # fmt: skip
_DEFAULT_DTYPE_NOTE = "dtype bf16 is assumed for the weights: give dtype, or the loaded model"


class JudgedPrediction(Prediction, Shown):
    """A Prediction, the verdict for the GPU (None without one), and the cell's options as they were understood.

    ``step``: its time and cost there, where it fits and they are known at once. As on the command line: what its
    intervals were widened by, the largest part and each part in words.
    """

    verdict: Verdict | None = None
    step: StepCost | None = None
    unknowns: list[Unknown] = Field([])
    largest_part: str = ""
    parts: dict[str, str] = Field({})
    options: dict[str, Any] = Field({})

    def headline(self) -> str:
        """Return the verdict and the bytes, in one sentence."""
        peak = format_bytes(self.peak_allocated_bytes.value)
        if self.verdict is None:
            return f"{self.cell_id}: {peak} allocated at the peak ({self.peak_label})"
        return f"{self.verdict.verdict} on {self.verdict.gpu}: {self.verdict.reason}"

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per cause at the peak, the largest first, in bytes."""
        parts = self.terms | ({"constant": self.constant_bytes} if self.constant_bytes else {})
        return [{"cause": name, "num_bytes": size} for name, size in sorted(parts.items(), key=lambda one: -one[1])]

    def remarks(self) -> list[str]:
        """Return the notes."""
        return self.warnings


def predict(
    model: Any = None,
    args: Any = None,
    peft_config: Any = None,
    *,
    gpu: str | None = None,
    widen: bool = False,
    **options: Any,
) -> JudgedPrediction:
    """Return the memory of a training run that nobody ran, and whether it fits ``gpu``.

    ``model``: a hub id, a slug, a path (a config.json, an adapter_config.json, an Axolotl or LLaMA-Factory YAML), a
    PretrainedConfig, its dict, or a model, with peft's adapters or without. ``args``: TrainingArguments, SFTConfig,
    DPOConfig, KTOConfig, ORPOConfig, RewardConfig, or a dict of their fields. ``peft_config``: a LoraConfig.
    ``options``: a cell's (:func:`vramprobe.resolve.option_names`), such as ``seq_len=2048`` or ``num_gpus=8``, and
    those of :func:`vramprobe.predict.questions.predict`, such as ``fit`` and ``engine``. ``widen``: intervals, and the
    verdict, hold the loop and the releases that nobody named, too, as on the command line. Bytes are ints.

    Raises SpecError, a ValueError, for an object that is not read, for arguments that contradict one another and for
    what is not counted; UnknownName for a model or GPU.
    """
    words = words_of(model, args, peft_config, options)
    options = words.options
    found = questions.predict(gpu=gpu, **options)
    card = catalog.gpu_or_size(gpu) if gpu is not None else None
    said = {name: value for name, value in options.items() if name in option_names() and value is not None}
    spec = questions.cell_on_ranks(**{"device": "cuda"} | said)
    has_versions = bool(options.get("python")) or options.get("engine") == "measured"
    given = {"loop": options.get("loop") is not None, "versions": has_versions}
    open_words = unknowns(spec, found, [name for name, is_given in given.items() if is_given]) if widen else []
    judged = wide_verdict(found, open_words, card) if card is not None else None
    found = with_unknowns(found, open_words)
    holds = judged is not None and judged.verdict != "does not fit"
    fields = {name: getattr(found, name) for name in type(found).model_fields}
    return JudgedPrediction(
        **fields
        | {
            "warnings": [*found.warnings, *words.notes, *_copies_while_loading(found, card)],
            "verdict": judged,
            "step": step_cost(spec, card) if card is not None and holds and not has_versions else None,
            "unknowns": open_words,
            "largest_part": largest_part(spec, found) if widen else "",
            "parts": parts(spec, found) if widen else {},
            "options": said,
        }
    )


def changes(*, gpu: str | None = None, **options: Any) -> list[Change]:
    """Return what other options of a cell would save, and whether it fits ``gpu`` then, how TRL takes them, and how
    much longer a token takes; the options are those of :func:`vramprobe.predict.questions.changes`.
    """
    from vramprobe.techniques.registry import trl_switches

    found = questions.changes(gpu=gpu, **options)
    card = catalog.gpu_or_size(gpu) if gpu is not None else None
    said = {name: value for name, value in options.items() if name in option_names() and value is not None}
    words = questions.without_recipe({"device": "cuda"} | said)
    now = questions.cell_on_ranks(**words)
    speed = speed_at_hand(now, card) if card is not None and found else None

    def share(one: Change) -> float | None:
        return None if card is None else slower_share(speed, questions.cell_on_ranks(**words | one.options), card)

    return [
        one.model_copy(update={"trl": trl_switches(one.options, now.method), "slower_share": share(one)})
        for one in found
    ]


def _copies_while_loading(found: Prediction, card: Any) -> Iterator[str]:
    """Yield a note on a GPU that shares the host's memory, where the weights twice are more than it has."""
    weights = found.terms.get("weights", 0)
    if card is not None and card.shares_host_memory and 2 * weights > usable_bytes(card, device_is_known=False):
        yield (
            f"loading may not fit: CPU and GPU share one memory, and a loader that reads {format_bytes(weights)} of "
            "weights on the host holds them twice for a moment; device_map={'': 0} loads tensor by tensor"
        )


def recommend(model: Any = None, args: Any = None, peft_config: Any = None, **asked: Any) -> Recommendation | Most:
    """Return which GPUs to rent, how many, for how long and for how much, for a run of ``tokens``.

    ``model``, ``args`` and ``peft_config`` are :func:`predict`'s; of ``args`` the sequences of an optimizer step are
    kept, and how they are divided is left open. ``asked``: :func:`vramprobe.recommend.questions.recommend`'s options.
    """
    from vramprobe.recommend.inverse import Most
    from vramprobe.recommend.questions import recommend as recommend_gpus

    apart = {name: asked.pop(name) for name in _OF_RECOMMEND if name in asked}
    words = words_of(model, args, peft_config, asked)
    options = dict(words.options)
    if args is not None:
        sizes = options.pop("batch_size", 1), options.pop("grad_accum", 1), options.pop("num_gpus", 1)
        apart.setdefault("global_batch", math.prod(sizes))
    found = recommend_gpus(**apart, **options)
    if not words.notes or isinstance(found, Most):
        return found
    return found.model_copy(update={"notes": [*found.notes, *words.notes]})


def techniques(
    model: Any = None,
    args: Any = None,
    peft_config: Any = None,
    *,
    gpu: str | None = None,
    kind: str | None = None,
    records: bool = False,
    say: Callable[[str], None] = lambda words: None,
    **options: Any,
) -> Ranking | TechniqueList:
    """Return the techniques that save memory: ranked for a run on ``gpu``, else all, with what each saved by itself.

    The run is :func:`predict`'s. ``kind``: only techniques of this kind. ``records``: record those that are not at
    hand, of which ``say`` hears. Raises SpecError for a run without a GPU.
    """
    from vramprobe.recommend.ranking import rank
    from vramprobe.techniques.registry import of_kind
    from vramprobe.techniques.savings import TechniqueList

    if gpu is None and model is None and not options:
        return TechniqueList(tuple(of_kind(kind)))
    if gpu is None:
        raise SpecError("a ranking is for one run on one GPU: give gpu, too")
    own = {"gpu": gpu, "kind": kind, "records": records, "say": say}
    return rank(**own, **words_of(model, args, peft_config, options).options)


def words_of(model: Any, args: Any, peft_config: Any, options: Mapping[str, Any]) -> Words:
    """Return one run's options, each said once: those given by name beside those that the objects say.

    Raises SpecError where two of them differ.
    """
    model = str(model) if isinstance(model, PathLike) else model
    if args is None and peft_config is None and (model is None or isinstance(model, str)) and not _is_rich(model):
        return Words({**options} if model is None else {**options, "model": model})
    from vramprobe.interop.arguments import AT_MAX_LENGTH

    found, notes, default_dtype = _read(model, args, peft_config)
    method = options.get("method") or found["method"]
    if found["method"] in (method, "full"):  # without an adapter, objects do not say how they are trained
        del found["method"]
    length = options.get("seq_len")
    if length is not None and AT_MAX_LENGTH in notes and understood("seq_len", length) <= found["seq_len"]:
        notes = tuple(one for one in notes if one != AT_MAX_LENGTH)
        del found["seq_len"]
    different = {
        name: (value, found[name])
        for name, value in options.items()
        if value is not None and name in found and understood(name, value) != understood(name, found[name])
    }
    if different:
        told = "; ".join(f"{name}={mine!r} beside {theirs!r}" for name, (mine, theirs) in different.items())
        raise SpecError(f"{told}, which the objects say: drop one of the two")
    words = found | {name: value for name, value in options.items() if value is not None} | {"method": method}
    if (words.get("num_gpus") or 1) > 1:
        words.setdefault("sharding", "ddp")
    elif words.get("sharding") == "ddp" and "num_gpus" not in words:
        del words["sharding"]
    if "sharding" in words and "num_gpus" not in words:
        raise SpecError(f"args shard the model over several GPUs ({words['sharding']}): say how many, num_gpus=8")
    if "seq_len" not in words:
        raise SpecError(
            "seq_len: missing; plain TrainingArguments and models have no length of rows: give seq_len=2048"
        )
    if default_dtype and "dtype" not in words:
        notes = (*notes, _DEFAULT_DTYPE_NOTE)
    return Words(words, tuple(dict.fromkeys(notes)))


def _is_rich(model: Any) -> bool:
    """Return whether a name says more than a model: a training file, or an adapter."""
    return isinstance(model, str) and (is_training_file(model) or read_model(model).adapter is not None)


def _read(model: Any, args: Any, peft_config: Any) -> tuple[dict[str, Any], tuple[str, ...], bool]:
    """(Options with ``method``, notes, whether nothing says the weights' dtype)."""
    from vramprobe.interop.adapters import read_adapter
    from vramprobe.interop.arguments import read_arguments
    from vramprobe.interop.training_file import read_training_file

    own: dict[str, Any] = {}
    if model is None:
        raise SpecError("model: none given; give it beside args and peft_config")
    if is_training_file(model):
        if args is not None or peft_config is not None:
            raise SpecError(f"{model} says the arguments and the adapter: drop args and peft_config")
        file = read_training_file(str(model))
        model, args, peft_config, own = file.model, file.arguments, file.adapter, file.options
    given = read_model(model)
    if given.adapter is not None and peft_config is not None:
        raise SpecError("model has an adapter already, and peft_config gives another: drop peft_config")
    adapter = given.adapter if peft_config is None else peft_config
    is_name = isinstance(given.model, str)
    arguments = Words({}) if args is None else read_arguments(args, is_name=is_name)
    found = {**arguments.options, **given.options, **own, "model": given.model}
    if given.options.get("gradient_checkpointing"):
        found["gradient_checkpointing"] = True
    notes = [*given.notes, *arguments.notes]
    if adapter is not None:
        named = given.model
        model_type = catalog.find_model(named).model_type if isinstance(named, str) else str(named["model_type"])
        adapted = read_adapter(adapter, model_type)
        found |= adapted.options
        notes += adapted.notes
    is_quantized = found.get("quant", "none") != "none"
    if is_quantized and adapter is None:
        raise SpecError(
            "a quantized model is trained by adapters alone: give peft_config, or leave its quantization out"
        )
    if is_quantized and "trainer" in arguments.options and found.get("autocast") == "bf16":
        found["kbit_prep"] = "trl"
    found["method"] = "full" if adapter is None else "qlora" if is_quantized else "lora"
    return found, tuple(notes), "dtype" not in found
