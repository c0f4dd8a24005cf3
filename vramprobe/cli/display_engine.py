"""Print an inference engine's own account of its memory, and its answers.

In: an EngineMemory, a ServedOn, Answers. Out: lines on the terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from vramprobe.units import requests_at_once

if TYPE_CHECKING:
    from vramprobe.records.engine import EngineMemory, RequestAnswer, ServedOn


def print_engine(console: Console, engine: EngineMemory) -> None:
    """An inference engine's own account, as it rounds it."""
    console.print(f"\nas {engine.engine} {engine.version or ''} logged it:")
    for what, gib in (
        ("weights", engine.weights_gib),
        ("weights and buffers", engine.consumed_gib),
        ("non-torch", engine.non_torch_gib),
        ("activation peak", engine.activation_peak_gib),
        ("CUDA graphs", engine.graph_gib),
        ("CUDA graphs, estimated", engine.graph_estimated_gib),
        ("KV cache", engine.kv_cache_gib),
    ):
        if gib is not None:
            console.print(f"  {what:<22} {gib:8.2f} GiB")
    if engine.kv_cache_tokens is not None:
        console.print(f"  {'KV cache':<22} {engine.kv_cache_tokens:,} tokens")
    if engine.kv_cache_blocks is not None:
        console.print(f"  {'KV cache':<22} {engine.kv_cache_blocks:,} blocks")
    if engine.max_concurrency is not None and engine.length_tokens is not None:
        console.print(f"  {'concurrency':<22} {requests_at_once(engine.max_concurrency, engine.length_tokens)}")


def print_workers(console: Console, workers: Sequence[EngineMemory]) -> None:
    """A line for each worker where they differ, as pipeline ranks do: the account of all has the most of any."""
    if len({(one.weights_gib, one.activation_peak_gib) for one in workers}) < 2:
        return
    for number, one in enumerate(workers):
        parts = (
            ("weights", one.weights_gib), ("activation peak", one.activation_peak_gib), ("KV cache", one.kv_cache_gib)
        )  # fmt: skip
        said = ", ".join(f"{what} {gib:.2f}" for what, gib in parts if gib is not None)
        console.print(f"  worker {number if one.worker is None else one.worker}: {said} GiB")


def print_served(console: Console, one: ServedOn) -> None:
    """Print whether a request fits, the longest that does, and the options that would make it fit."""
    if one.verdict == "fits":
        longest = one.longest_request_tokens
        console.print(f"fits on {one.gpu}" + (f": longest request {longest:,} tokens" if longest else ""))
        return
    requests = requests_at_once(one.max_concurrency, one.length_tokens)
    settings = (
        f"each of these makes one fit: {', '.join(one.settings)}" if one.settings else "no one option makes one fit"
    )
    console.print(f"[red]does not fit[/] on {one.gpu}: {requests}; {escape(settings)}")


def print_answers(console: Console, answers: Sequence[RequestAnswer]) -> None:
    """Print the number of requests answered, their tokens, and each error once."""
    tokens = [one.completion_tokens for one in answers if one.completion_tokens is not None]
    console.print(f"ended after {len(tokens)} of {len(answers)} requests, {sum(tokens):,} tokens generated")
    for why in dict.fromkeys(one.error for one in answers if one.error):
        console.print(f"[red]error[/] of a request: {escape(why)}")
