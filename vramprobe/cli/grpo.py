"""``vramprobe predict --trainer grpo --rollout vllm``: a GRPO step beside an engine on one GPU.

In: a cell's options, TRL's, and vLLM's share. Out: both accounts by stage, the verdict and what fits, as text or JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import typer

from vramprobe.cli.options import flag, print_json, takes_given
from vramprobe.units import format_bytes

if TYPE_CHECKING:
    from vramprobe.predict.grpo import Grpo

#: The value of a cell's --trainer that means this, and that no cell that runs has.
GRPO = "grpo"
#: Option → (type, help), in TRL's words; the defaults are in predict/grpo.py.
GRPO_OPTIONS: dict[str, tuple[Any, str]] = {
    "rollout": (str, "With --trainer grpo: vllm, the engine that generates, in the trainer's process."),
    "num_generations": (int, "With --trainer grpo: completions per prompt; one group is a micro-batch (default 8)."),
    "max_prompt_length": (int, "With --trainer grpo: longest prompt in tokens (default 512)."),
    "max_completion_length": (int, "With --trainer grpo: longest completion in tokens (default 256)."),
    "beta": (float, "With --trainer grpo: above 0, full training keeps a reference model (default 0)."),
    "sleep": (bool, "With --trainer grpo: vLLM's sleep mode; it gives its memory back while the trainer works."),
}


def takes_grpo(command: Callable[..., None]) -> Callable[..., Any]:
    """Give ``command(rollouts, …)`` the options of GRPO, those that were given."""
    return takes_given(command, "rollouts", GRPO_OPTIONS)


def is_grpo(cell: Mapping[str, Any]) -> bool:
    """Whether this trainer is asked for."""
    return cell.get("trainer") == GRPO


def show(
    *,
    cell: dict[str, Any],
    rollouts: dict[str, Any],
    gpu: str | None,
    json_output: bool,
    gpu_memory_utilization: float | None = None,
    vllm_release: str | None = None,
) -> None:
    """Predict and print. Raises wrong usage for another trainer or engine, and without a model and a GPU."""
    from vramprobe import api

    words, cell = dict(rollouts), dict(cell)
    for name, known, where in (("trainer", GRPO, cell), ("rollout", "vllm", words)):
        given = where.pop(name, None)
        if given != known:
            said = f"{flag(name)} {given}" if given else f"no {flag(name)}"
            raise typer.BadParameter(f"{said} given; --trainer grpo --rollout vllm is what can be predicted.")
    if not {"model", "method"} <= cell.keys() or gpu is None:
        raise typer.BadParameter("--trainer grpo needs --model, --method and --gpu.")
    engine = {"gpu_memory_utilization": gpu_memory_utilization, "vllm_release": vllm_release}
    found = api.grpo(gpu=gpu, **{name: it for name, it in engine.items() if it is not None}, **words, **cell)
    if json_output:
        print_json(found.model_dump(mode="json"))
    else:
        _print(found)


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
    for what, value in (
        ("longest completion", found.largest_completion_length),
        ("largest group", found.largest_num_generations),
        ("largest gpu_memory_utilization", found.largest_gpu_memory_utilization),
    ):
        print(f"{what} that fits, all else as given: {'none' if value is None else f'{value:,}'}")
    for note in found.notes:
        print(f"note: {note}")
