"""Questions whose answers are frozen beside the cells: inverse ones, changes, recommendations, plans, GRPO, vLLM.

In: a name of ``vramprobe.api`` and its words. Out: the answer as JSON, cut to what a person reads first. Used by
freeze.py and the test.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from datetime import date
from itertools import product
from typing import Any
from unittest import mock

from vramprobe import api
from vramprobe.catalog.own import CACHE_VARIABLE
from vramprobe.errors import VramprobeError
from vramprobe.predict.at_hand import CANNOT_EMULATE

Words = dict[str, Any]
CKPT: Words = {"gradient_checkpointing": True}
MODELS = ("qwen2.5-0.5b", "llama-3.2-1b", "llama-3.1-8b", "gemma-3-4b", "qwen3-30b-a3b", "llama-3.1-70b")
METHODS: tuple[Words, ...] = ({"method": "full"} | CKPT, {"method": "lora"} | CKPT, {"method": "qlora"} | CKPT)
CARDS = ("RTX-4090", "A100-80GB-SXM", "B200")
#: Prices older than three months are named, so a day is fixed.
_DAY = date(2026, 11, 27)


def asked() -> Iterator[tuple[str, Words]]:
    """Every question: a function of the API, its words."""
    for model, words, gpu in product(MODELS, METHODS, CARDS):
        cell = {"model": model, "gpu": gpu} | words
        yield "max_batch_size", cell | {"seq_len": 2048}
        yield "max_seq_len", cell | {"batch_size": 1}
    for words, gpu in product(METHODS, CARDS):
        yield "largest_model", {"gpu": gpu, "batch_size": 1, "seq_len": 2048} | words
    for model, words, gpu in product(MODELS[1:4], METHODS, CARDS[:2]):
        yield "changes", {"model": model, "gpu": gpu, "batch_size": 1, "seq_len": 8192} | words
    for model in (*MODELS[1:3], MODELS[-1]):
        yield "recommend", {"model": model, "seq_len": 2048, "tokens": "50M"}
    yield "recommend", {"model": MODELS[2], "method": "qlora", "seq_len": 4096, "tokens": "100M", "budget": 20.0}
    yield "recommend", {"model": MODELS[2], "method": "full", "seq_len": 4096, "tokens": "1B", "deadline": "24h"}
    yield "recommend", {"model": MODELS[2], "method": "lora", "seq_len": 2048, "budget": 10.0, "most": "tokens"}
    for sweep, gpu in (("24gb", "RTX-4090"), ("80gb", "H100-SXM"), ("48gb", "L40S"), ("h200", "H200")):
        yield "plan", {"path": sweep, "gpu": gpu}
    for model, sleep in product(MODELS[:3], (False, True)):
        yield "grpo", {"model": model, "gpu": "H100-SXM", "method": "lora", "sleep": sleep, "searches": False} | CKPT
    for model in MODELS[:4]:
        yield "serve", {"model": model, "gpu": "H100-SXM", "max_model_len": 4096}


def answered(ask: str, words: Words) -> Any:
    """Return the product's answer on a machine that has recorded nothing, or the error that it gives in place of it."""
    more: Words = {"today": _DAY} if ask == "recommend" else {}
    with tempfile.TemporaryDirectory() as nothing, mock.patch.dict(os.environ, {CACHE_VARIABLE: nothing}):
        try:
            found = getattr(api, ask)(**words, **more)
        except CANNOT_EMULATE:
            return {"refused": "no recipe ships, and nothing is recorded here"}
        except VramprobeError as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        return _CUT[ask](found)


def _sizes(found: Any) -> Any:
    """The whole numbers of an answer, of GRPO those of its stages, too."""
    whole = found.model_dump(mode="json")
    return {name: value for name, value in whole.items() if type(value) is int or name == "stages"}


def _largest(found: Any) -> Any:
    return {name: one and _of_answer(one) for name, one in (("fits", found.fits), ("tight", found.tight))}


def _of_answer(one: Any) -> Any:
    reserved = one.prediction.reserved_bytes
    allocated = one.prediction.peak_allocated_bytes.value
    sizes = {"allocated_bytes": allocated, "reserved_bytes": reserved and reserved.value}
    return {"value": one.value, **sizes, "verdict": one.verdict.verdict}


def _changes(found: Any) -> Any:
    """Without the flag, and without the time, which follows the fit."""
    return [one.model_dump(mode="json", exclude={"trl", "slower_share"}) for one in found]


def _recommended(found: Any) -> Any:
    """Return GPUs, setting, verdict's bytes, hours and dollars of each answer, or of the most that is asked for."""
    if not hasattr(found, "answers"):
        return {"value": found.value, **_option(found.option)}
    return [{"question": one.question, **_option(one.option)} for one in found.answers if one.option is not None]


def _option(one: Any) -> Any:
    setting = {"sharding", "batch_size", "grad_accum", "gradient_checkpointing"}
    figures = {name: _rounded(figure and figure.value) for name, figure in (("hours", one.hours), ("usd", one.usd))}
    return {
        **one.model_dump(mode="json", include={"method", "gpu", "num_gpus"}),
        **one.setting.model_dump(mode="json", include=setting),
        "verdict": one.setting.verdict.verdict,
        "needed_bytes": one.setting.verdict.needed_bytes.value,
        **figures,
    }


def _rounded(value: float | None) -> float | None:
    """To nine digits, which do not depend on the machine."""
    return None if value is None else float(f"{value:.9g}")


def _planned(found: Any) -> Any:
    return [
        {
            "cell": row.spec.cell_id,
            "action": row.action,
            "verdict": row.verdict,
            "allocated_bytes": row.prediction and row.prediction.peak_allocated_bytes.value,
            "reserved_bytes": row.prediction and row.prediction.reserved_bytes and row.prediction.reserved_bytes.value,
        }
        for row in found.rows
    ]


_CUT: dict[str, Callable[[Any], Any]] = {
    "max_batch_size": _largest,
    "max_seq_len": _largest,
    "largest_model": _largest,
    "changes": _changes,
    "recommend": _recommended,
    "plan": _planned,
    "grpo": _sizes,
    "serve": _sizes,
}
