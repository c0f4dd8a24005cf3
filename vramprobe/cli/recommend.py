"""``vramprobe recommend``: which GPU, how many, how long, how much; or the most that a budget or a deadline pays for.

In: a cell's options, tokens, limits. Out: the answers, the cards and what would change, as text or JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vramprobe.cli.options import RANK_OPTIONS, Json, takes_a_cell


@takes_a_cell(optional=("model", "method", "batch_size", "seq_len"), without=RANK_OPTIONS)
def recommend(
    cell: dict[str, Any],
    tokens: Annotated[str | None, typer.Option(help="Tokens to train on, all epochs together: 50M, 1.5B.")] = None,
    deadline: Annotated[str | None, typer.Option(help="The time there is: 12h, 90m, 2d.")] = None,
    budget: Annotated[float | None, typer.Option(help="US dollars there are.")] = None,
    gpu: Annotated[
        list[str] | None, typer.Option(help="Only this GPU, with a price or without; may be repeated.")
    ] = None,
    max_gpus: Annotated[int, typer.Option(min=1, help="Try 1, 2, 4 … GPUs up to so many; 8 are one machine.")] = 8,
    global_batch: Annotated[
        int, typer.Option(min=1, help="Sequences of an optimizer step, on all GPUs together.")
    ] = 16,
    sharding: Annotated[
        str | None,
        typer.Option(help="ddp | zero1 | zero2 | zero3 | fsdp | fsdp-shard-grad-op (what fits, the fastest)."),
    ] = None,
    provider: Annotated[str | None, typer.Option(help="Only this provider's prices.")] = None,
    region: Annotated[str | None, typer.Option(help="Only prices of regions with this in their name.")] = None,
    terms: Annotated[str, typer.Option(help="on-demand | spot | reserved.")] = "on-demand",
    prices: Annotated[
        str | None, typer.Option(help="A CSV file of prices, or skypilot: its catalog, where it is installed.")
    ] = None,
    records: Annotated[
        Path | None, typer.Option(help="Your measured records: their step times scale the estimates of their card.")
    ] = None,
    longest: Annotated[bool, typer.Option("--longest", help="The longest sequences that the limits pay for.")] = False,
    largest_model: Annotated[
        bool, typer.Option("--largest-model", help="The largest model that the limits pay for.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Show every card and number of them, not the best of each.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Say which GPU to rent, how many, how long and for how much; without --tokens, for how many it is enough."""
    from vramprobe import api
    from vramprobe.recommend.inverse import Most

    if longest and largest_model:
        raise typer.BadParameter("--longest and --largest-model are different questions; ask one at a time.")
    most = "seq_len" if longest else "model" if largest_model else "tokens" if tokens is None else None
    if most == "tokens" and budget is None and deadline is None:
        raise typer.BadParameter("Missing option '--tokens'; or ask how many a --budget or a --deadline pays for.")
    found = api.recommend(
        tokens=tokens, deadline=deadline, budget=budget, gpus=gpu or (), max_gpus=max_gpus, global_batch=global_batch,
        sharding=sharding, provider=provider, region=region, terms=terms, prices=prices, records=records, most=most,
        **cell,
    )  # fmt: skip
    if json_output:
        print(found.model_dump_json(indent=2))
        return
    from vramprobe.cli import display_recommend

    if isinstance(found, Most):
        display_recommend.print_most(found)
    else:
        display_recommend.print_recommendation(found, every=every)
