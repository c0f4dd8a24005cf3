"""``vramprobe grpo``: a GRPO step beside an engine, vLLM in the trainer's process, on one GPU.

In: a cell's options, TRL's, and vLLM's share. Out: both accounts by stage, the verdict and what fits, as text or JSON.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vramprobe.cli.options import ExitZero, Gpu, Json, exit_with, show, takes_a_cell, takes_given
from vramprobe.options import MEASURED_OPTIONS, RANK_OPTIONS
from vramprobe.units import format_bytes

if TYPE_CHECKING:
    from vramprobe.predict.grpo import Grpo

#: Option → (type, help), in TRL's words; the defaults are in predict/grpo.py.
GRPO_OPTIONS: dict[str, tuple[Any, str]] = {
    "num_generations": (int, "Completions per prompt; one group is a micro-batch (default 8)."),
    "max_prompt_length": (int, "Longest prompt in tokens (default 512)."),
    "max_completion_length": (int, "Longest completion in tokens (default 256)."),
    "beta": (float, "Above 0, full training keeps a reference model (default 0)."),
    "sleep": (bool, "vLLM's sleep mode; it gives its memory back while the trainer works."),
    "gpu_memory_utilization": (float, "Share of the GPU that the engine takes (default 0.3, as in TRL)."),
    "vllm_release": (str, "0.19 | 0.32: whose formulas (default 0.32)."),
}


@functools.partial(takes_given, mapping="rollouts", options=GRPO_OPTIONS)
@takes_a_cell(
    without=(*RANK_OPTIONS, *MEASURED_OPTIONS, "batch_size", "seq_len", "trainer", "loop", "limit_vram", "device")
)
def grpo(
    cell: dict[str, Any], rollouts: dict[str, Any], gpu: Gpu, exit_zero: ExitZero = False, json_output: Json = False
) -> None:
    """Predict a step of TRL's GRPO beside vLLM on one GPU: both accounts by stage, and what fits."""
    from vramprobe import api
    from vramprobe.cli.emulate import say

    found = api.grpo(gpu=gpu, say=say, **rollouts, **cell)
    show(found, _print, as_json=json_output)
    exit_with(found.verdict, exit_zero=exit_zero)


def _print(found: Grpo) -> None:
    asleep = "with sleep mode" if found.sleep else "without sleep mode"
    print(f"GRPO of {found.model} on {found.gpu}, {found.trainer}, {asleep}: predicted, not measured")
    print(
        f"{found.num_generations} completions of {found.max_completion_length:,} tokens to prompts of "
        f"{found.max_prompt_length:,}, gpu_memory_utilization {found.gpu_memory_utilization:g}\n"
    )
    print(f"  trainer: weights {format_bytes(found.weights_bytes)}", end="")
    print(f", reference model {format_bytes(found.reference_bytes)}" if found.reference_bytes else "", end="")
    print(f", optimizer state {format_bytes(found.optimizer_state_bytes)}")
    print(f"  engine:  weights {format_bytes(found.engine_weights_bytes)}", end="")
    print(f", KV cache {format_bytes(found.kv_cache_bytes)} ({found.kv_cache_tokens:,} tokens)\n")
    print(f"  {'stage':<14} {'trainer':>12} {'engine':>12} {'together':>12}")
    for one in found.stages:
        sizes = (one.trainer_bytes, one.engine_bytes, one.total_bytes)
        print(f"  {one.name:<14} " + " ".join(f"{format_bytes(size):>12}" for size in sizes))
    print(
        f"\n{found.gpu}: {found.verdict} ({found.reason}: {format_bytes(found.peak_bytes)} of "
        f"{format_bytes(found.usable_bytes)})"
    )
    lack = f"not searched ({found.not_searched})" if found.not_searched else "none"
    for what, value, otherwise in (
        ("longest completion", found.largest_completion_length, lack),
        ("largest group", found.largest_num_generations, lack),
        ("largest gpu_memory_utilization", found.largest_gpu_memory_utilization, "none"),
    ):
        print(f"{what} that fits, all else as given: {otherwise if value is None else f'{value:,}'}")
    for note in found.notes:
        print(f"note: {note}")
