"""The options that several verbs share: those of a cell, in the spec's own words (choices.py), and those of a sweep.

In: a command that takes a cell or a job as one mapping. Out: the same with every option in its signature, for typer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_args

import typer

from vramprobe import choices
from vramprobe.units import parse_share

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of text.")]


def _words(kind: Any) -> str:
    return " | ".join(get_args(kind))


#: Option → (type, help). The names are spec.option_names(); a test holds the two together.
CELL_OPTIONS: dict[str, tuple[Any, str]] = {
    "model": (str, "A slug of `vramprobe models`, a path to a config.json or checkpoint folder, or a hub id."),
    "method": (str, _words(choices.Method)),
    "batch_size": (int, "Sequences per micro-batch."),
    "seq_len": (int, "Tokens per sequence."),
    "recipe": (str, f"Names dtype and autocast together: {' | '.join(choices.RECIPES)}."),
    "dtype": (str, f"Of the weights as loaded: {_words(choices.Dtype)} (bf16 unless told)."),
    "autocast": (str, f"{_words(choices.Autocast)} (none for full, else bf16)."),
    "quant": (str, f"{_words(choices.Quant)} (nf4 for qlora)."),
    "kbit_prep": (str, f"How a quantised model is prepared: {_words(choices.KbitPrep)} (peft for qlora)."),
    "optim": (str, f"{_words(choices.Optim)} (adamw_torch_fused)."),
    "gradient_checkpointing": (bool, "Recompute each layer in backward instead of keeping it."),
    "grad_accum": (int, "Micro-batches per optimizer step (1)."),
    "attn": (str, f"{_words(choices.Attention)} (sdpa where transformers has it for the family)."),
    "padding": (bool, "Pad an eighth of each sequence, so that the model is passed a mask."),
    "torch_compile": (bool, "Compile the model with torch.compile."),
    "fused_linear_cross_entropy": (bool, "Liger's head and loss in one kernel: the logits are never whole."),
    "lora_r": (int, "Rank (16)."),
    "lora_alpha": (float, "Scale (2 × rank)."),
    "lora_dropout": (float, "In [0, 1) (0)."),
    "lora_targets": (str, "all-linear | q_v | names such as q_proj,v_proj (all-linear)."),
    "lora_dtype": (str, f"Of the adapters: {_words(choices.Dtype)} (fp32; bf16 under kbit-prep trl)."),
    "dora": (bool, "Weight-decomposed adapters (DoRA)."),
    "num_layers": (int, "Cut the architecture to its first layers; the record says so."),
    "weights": (str, f"{_words(choices.Weights)} (random: memory does not depend on the values)."),
    "trust_remote_code": (bool, "Let a pretrained checkpoint run its own code."),
    "num_gpus": (int, "A rank on each, with the batch of the cell (1); under device-map, one process has all."),
    "sharding": (str, f"How GPUs share the model: {_words(choices.Sharding)}."),
    "shard_size": (
        int,
        f"Ranks that share one model under {' and '.join(choices.HYBRID)}, which keep it in each group so made "
        f"({choices.SHARD_SIZE}: a machine's cards).",
    ),
    "cp_size": (int, "Ranks that share each sequence, by context parallelism under fsdp (1)."),
    "cp_rotation": (str, f"Of keys and values among those: {_words(choices.CpRotation)} (allgather)."),
    "offload": (str, f"What the ranks keep in host memory: {_words(choices.Offload)}."),
    "only_rank": (int, "Run this rank alone, as one of --num-gpus (emulated; from 0)."),
    "device": (str, "auto | cuda | cpu (auto; simulate: cuda; predict: cuda, or the fit's own)."),
    "alloc_conf": (str, "PYTORCH_ALLOC_CONF for the cell's process, e.g. expandable_segments:True."),
    "limit_vram": (str, "Hold the rest of the card: a size such as 24GiB, or a GPU such as RTX-4090."),
    "steps": (int, "Traced steps, at least 3 (3)."),
    "timing_steps": (int, "Further steps, timed and not traced (2)."),
    "seed": (int, "Of weights and tokens (0)."),
}
#: Those of several ranks, for verbs that say so in words of their own, or run one GPU alone.
RANK_OPTIONS = ("num_gpus", "sharding", "shard_size", "cp_size", "cp_rotation", "offload", "only_rank")
_REQUIRED = ("model", "method", "batch_size", "seq_len")

#: Option → (type, default, its flags where they are not its name, help); in the words of api.plan and api.run.
SWEEP_OPTIONS: dict[str, tuple[Any, Any, tuple[str, ...], str]] = {
    "out": (Path | None, None, ("--out", "-o"), "Results folder (results/<device>/<sweep>)."),
    "device": (str, "auto", (), "auto | cuda | cpu"),
    "fit": (Path | None, None, (), "What predicts (the folder's fit.json, else arithmetic)."),
    "usd_per_hour": (
        float | None,
        None,
        ("--price",),
        "Dollars per hour of the GPU (the catalog's cheapest on demand).",
    ),
    "provider": (str | None, None, (), "Take the price of this provider from the catalog."),
    "only": (list[str] | None, None, (), "Only cells whose id has this in it, or fits it with * and ?."),
    "skip": (list[str] | None, None, (), "No cell whose id has this in it, or fits it with * and ?."),
    "shard": (str | None, None, (), "i/n: every n-th cell from the i-th on, to share a sweep."),
    "limit_vram": (str | None, None, (), "Hold the rest of the card: 24GiB, or a GPU such as RTX-4090."),
    "engine": (
        str | None,
        None,
        (),
        "auto: simulate cells without arithmetic (plan, dry run) | formula: do not (run).",
    ),
    "audit": (str, "5%", (), "Share of the cells to skip that are run all the same."),
    "no_skip": (bool, False, ("--no-skip",), "Run cells that would certainly run out of memory, too."),
    "replicate": (str, "0%", (), "Share of the cells that are measured a second time, to compare."),
    "retry_quarantined": (bool, False, ("--retry-quarantined",), "Run cells that never ended, too."),
    "verify": (bool, False, ("--verify",), "Emulated alone: compare a step's allocations under other values."),
}


def takes_a_cell(
    command: Callable[..., None] | None = None, *, asks: Mapping[str, str] = MappingProxyType({}),
    optional: Collection[str] = (), without: Collection[str] = (),
) -> Callable[..., Any]:  # fmt: skip
    """Give ``command(cell, …)`` every option of a cell, as ``--batch-size`` and so on.

    ``asks``: flag of the command → the option that it asks for, which cannot be given with it. ``optional``: options
    that the command does without; ``without``: those that it does not have.
    """
    if command is None:
        return functools.partial(takes_a_cell, asks=asks, optional=optional, without=without)

    def parameter(name: str, kind: Any, text: str) -> inspect.Parameter:
        flags = (f"{_flag(name)}/--no-{_flag(name)[2:]}",) if kind is bool else (_flag(name),)
        required = name in _REQUIRED and name not in asks.values() and name not in optional
        if name in asks.values():
            text += f" Not with {next(_flag(asking) for asking, asked in asks.items() if asked == name)}."
        annotation = Annotated[kind if required else kind | None, typer.Option(*flags, help=text, show_default=False)]
        default = inspect.Parameter.empty if required else None
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def gather(given: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
        _require_one_question(given, [name for name in asks if others[name]], asks)
        return {name: value for name, value in given.items() if value is not None}

    own = [parameter(name, *what) for name, what in CELL_OPTIONS.items() if name not in without]
    return _with_options(command, "cell", own, gather)


def takes_a_sweep(command: Callable[..., None]) -> Callable[..., Any]:
    """Give ``command(job, …)`` every option of a sweep; ``job`` are the keywords of api.plan and api.run."""

    def gather(given: dict[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
        from vramprobe.sweep.plan import Policy

        policy = Policy(
            skip=not given.pop("no_skip"), audit_share=parse_share(given.pop("audit")),
            replicate_share=parse_share(given.pop("replicate")), retry_quarantined=given.pop("retry_quarantined"),
            verify=given.pop("verify"),
        )  # fmt: skip
        engine = {name: value for name in ("engine",) if (value := given.pop(name)) is not None}
        lists = {name: given[name] or () for name in ("only", "skip")}
        return given | lists | engine | {"policy": policy}

    options = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default,
            annotation=Annotated[kind, typer.Option(*(flags or (_flag(name),)), help=text)],
        )
        for name, (kind, default, flags, text) in SWEEP_OPTIONS.items()
    ]  # fmt: skip
    return _with_options(command, "job", options, gather)


def _with_options(
    command: Callable[..., None], mapping: str, options: list[inspect.Parameter],
    gather: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]],
) -> Callable[..., Any]:  # fmt: skip
    """``command`` with ``options`` in the place of its parameter ``mapping``; that gets what ``gather`` makes."""
    own = [p for name, p in inspect.signature(command, eval_str=True).parameters.items() if name != mapping]

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        given = {option.name: values.pop(option.name) for option in options}
        command(**{mapping: gather(given, values)}, **values)

    first = [p for p in own if p.default is inspect.Parameter.empty]
    last = [p for p in own if p.default is not inspect.Parameter.empty]
    every = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*first, *options, *last)]
    with_options.__signature__ = inspect.Signature(every)
    with_options.__annotations__ = {p.name: p.annotation for p in every}
    return with_options


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _require_one_question(cell: dict[str, Any], asking: list[str], asks: Mapping[str, str]) -> None:
    """Raise wrong usage for two questions at once, for one whose answer is given, and for what neither gives."""
    if len(asking) > 1:
        raise typer.BadParameter(f"{' and '.join(map(_flag, asking))} are different questions; ask one at a time.")
    open_option = asks[asking[0]] if asking else None
    for name in asks.values():
        if name == open_option and cell[name] is not None:
            raise typer.BadParameter(f"{_flag(asking[0])} asks for the {_flag(name)} that fits, so drop {_flag(name)}.")
        if name != open_option and cell[name] is None:
            asker = next(_flag(asking) for asking, asked in asks.items() if asked == name)
            raise typer.BadParameter(f"Missing option '{_flag(name)}'; or ask for it: {asker} --gpu GPU.")
