"""Cells that no run was kept of, chosen by rule: the page's random ones, and one for each value of each option.

In: the code's own lists, a seed. Out: (kind, GPU, cell), those that resolve. Used by freeze.py alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import cycle, islice, product
from typing import Any, get_args

from page_cells import some_of_one_batch, some_options, some_ranks, some_replayed_rank

from vramprobe import catalog
from vramprobe.choices import (
    DEVICE_MAP,
    RECIPES,
    TENSOR_PARALLEL,
    Attention,
    KbitPrep,
    Loss,
    Offload,
    Optim,
    Quant,
    Sharding,
    Trainer,
)
from vramprobe.errors import VramprobeError
from vramprobe.predict.questions import cell_on_ranks
from vramprobe.predict.stack import on_stack
from vramprobe.report.page.engine import STACKS
from vramprobe.spec import CellSpec

SEED = 45
#: Random cells of the page that predict answers: draws of page_cells.py, how many.
RANDOM: dict[str, tuple[Callable[[random.Random], dict[str, Any]], int]] = {
    "page": (some_options, 160),
    "page, ranks": (some_ranks, 60),
    "page, whole steps of ranks": (some_replayed_rank, 60),
    "page, tensor parallel": (lambda rng: some_of_one_batch(rng, TENSOR_PARALLEL), 30),
    "page, device map": (lambda rng: some_of_one_batch(rng, DEVICE_MAP), 20),
}
MODELS = ("llama-3.1-8b", "qwen2.5-0.5b", "gemma-2-2b", "mixtral-8x7b")
CKPT: dict[str, Any] = {"gradient_checkpointing": True}
Words = dict[str, Any]
Asked = tuple[str, str | None, CellSpec]


def drawn(is_answered: Callable[[CellSpec, str | None], bool]) -> Iterator[Asked]:
    """The page's random cells, those that predict answers."""
    cards = [gpu.short_name for gpu in catalog.list_gpus() if gpu.total_bytes]
    for kind, (some, count) in RANDOM.items():
        rng = random.Random(f"{SEED} {kind}")
        draws = ((some(rng), rng.choice(cards)) for _ in cycle([None]))
        found = ((kind, *one) for one in map(_drawn, draws) if one is not None and is_answered(one[1], one[0]))
        yield from islice(found, count)


def _drawn(draw: tuple[Words, str]) -> tuple[str | None, CellSpec] | None:
    spec = _resolved(draw[0])
    return None if spec is None else (draw[1] if spec.device == "cuda" else None, spec)


def listed() -> Iterator[Asked]:
    """A cell for each value of each option, each trainer and loss, each kind of sharding, each older release."""
    cards = cycle(("RTX-4090", "H100-SXM", "A100-80GB-SXM", "B200"))
    for (kind, words), card in zip(_listed(), cards, strict=False):
        if (spec := _resolved(words)) is not None:
            yield kind, card, spec
    for names, model, method in product(STACKS, MODELS, ("full", "lora", "qlora")):
        spec = _resolved({"model": model, "method": method, "batch_size": 1, "seq_len": 1024} | CKPT)
        try:
            assert spec is not None
            yield "older libraries", "H100-SXM", on_stack(spec, names)
        except VramprobeError:
            continue  # of which nothing was read


def _listed() -> Iterator[tuple[str, Words]]:
    usual: Words = {"batch_size": 2, "seq_len": 1024}
    for model, optim in product(MODELS[:2], get_args(Optim)):
        yield "optimizers", usual | {"model": model, "method": "full", "optim": optim} | CKPT
    for model, quant, prep in product(MODELS[:2], get_args(Quant), get_args(KbitPrep)):
        yield "quantization", usual | {"model": model, "method": "qlora", "quant": quant, "kbit_prep": prep} | CKPT
    for model, more in product(MODELS[:3], _adapters()):
        yield "adapters", usual | {"model": model, "method": "lora"} | more
    for model, more in product(MODELS[1:], _steps()):
        yield "steps", usual | {"model": model, "num_layers": 4} | more
    for trainer, loss, method in product(get_args(Trainer), get_args(Loss), ("full", "lora", "qlora")):
        for model in MODELS[:2]:
            yield "trainers", usual | {"model": model, "method": method, "trainer": trainer, "loss": loss} | CKPT
    for sharding, offload, method in product(get_args(Sharding), get_args(Offload), ("full", "lora", "qlora")):
        words = usual | {"model": MODELS[0], "method": method, "sharding": sharding, "num_gpus": 8, "offload": offload}
        yield "shardings", words | CKPT | ({"kbit_prep": "none"} if method == "qlora" else {})


def _adapters() -> Iterator[Words]:
    yield from ({"lora_r": rank} for rank in (4, 64))
    yield from ({"lora_targets": names} for names in ("all-linear", "q_v", "q_proj,v_proj,o_proj"))
    yield from ({"lora_dtype": "bf16"}, {"lora_dropout": 0.05}, {"dora": True}, {"dora": True} | CKPT)


def _steps() -> Iterator[Words]:
    for method in ("full", "lora"):
        yield from ({"method": method, "recipe": recipe} for recipe in RECIPES)
        yield from ({"method": method, "attn": attn} for attn in get_args(Attention))
        yield from ({"method": method, name: True} for name in ("padding", "fused_linear_cross_entropy"))
        yield {"method": method, "grad_accum": 4}
        yield {"method": method, "alloc_conf": "expandable_segments:True"}
        yield from ({"method": method, "batch_size": rows, "seq_len": length} for rows, length in ((1, 96), (1, 6144)))


def _resolved(words: Words) -> CellSpec | None:
    """The cell with its ranks; None for what cannot be."""
    try:
        return cell_on_ranks(**{"device": "cuda"} | words)
    except VramprobeError:
        return None
