"""Sharding that no library runs: a cell and its ranks -> why not, in words for its user.

In: a cell with sharding, num_gpus and what it offloads. Out: reasons, or None where it runs. Imports no torch.
"""

from typing import Any

from vramprobe import catalog
from vramprobe.optimizers import OPTIMIZERS
from vramprobe.rules import Cell
from vramprobe.rules.cell import lora_target_names
from vramprobe.rules.sharding import FSDP2, HYBRID, SHARDINGS, rules_of, sharing_ranks

#: The emulated NCCL has buffers for so many ranks.
MAX_RANKS = 960
#: Layers that transformers' plans divide by their inputs, by the last word of their names.
ROW_WISE = ("o_proj", "down_proj", "dense", "dense_4h_to_h", "fc2", "c_proj")
#: Families whose attention modules transformers does not name ``self_attn``. accelerate drops the mask, which ring
#: attention does not take, from modules of that name alone; without it all ranks but the last ended in torch's error.
_NO_RING = ("bloom", "falcon", "gpt2", "gpt_neox", "t5")


def reasons_not_run(spec: Cell) -> list[str]:
    """Return the reasons why vramprobe does not run the cell on its GPUs; empty where it does."""
    if spec.num_gpus == 1 and not offloads_alone(spec):
        return _reasons_alone(spec)
    if spec.sharding is None:
        kinds = ", ".join(SHARDINGS)
        return [f"num_gpus {spec.num_gpus} needs a sharding, which says how the ranks share the model: {kinds}"]
    judged = (
        cannot_group(spec),
        cannot_step(spec),
        cannot_quantize(spec),
        cannot_divide_layers(spec),
        cannot_share_sequences(spec),
        cannot_offload(spec),
        cannot_rotate(spec),
    )
    unsupported = [reason for broken, reason in _run_rules(spec) if broken]
    return [*unsupported, *(reason for reason in judged if reason is not None)]


def offloads_alone(spec: Cell) -> bool:
    """Return True if one GPU is a rank with no other: DeepSpeed offloads to the host there, too."""
    return spec.offload != "none" and rules_of(spec.sharding).uses_deepspeed


def _reasons_alone(spec: Cell) -> list[str]:
    """Options of several GPUs that a cell on one has."""
    given = {
        "sharding": spec.sharding,
        "shard_size": spec.shard_size,
        "cp_size": spec.cp_size if spec.cp_size > 1 else None,
        "only_rank": spec.only_rank,
    }
    found = [
        f"{name} {value} is for several GPUs; set num_gpus to 2 or more, or leave it out"
        for name, value in given.items()
        if value is not None
    ]
    if spec.offload != "none":
        alone = " or ".join(
            kind for kind, rules in SHARDINGS.items() if rules.uses_deepspeed and spec.offload in rules.offloads
        )
        found.append(
            f"offload {spec.offload} on one GPU is DeepSpeed's; use sharding {alone}, more GPUs, or leave it out"
        )
    rotation = cannot_rotate(spec)
    return found if rotation is None else [*found, rotation]


def _run_rules(spec: Cell) -> list[tuple[bool, str]]:
    """Rules of what vramprobe does not run on several GPUs, though it may predict it."""
    given, has_ranks = f"num_gpus {spec.num_gpus}", rules_of(spec.sharding).has_ranks
    depth = catalog.depth_of(spec.architecture) or spec.num_gpus
    gathers_head = spec.sharding == "fsdp" and spec.cp_size == 1  # with FSDP2's root, emulated; others were not tried
    reads_head = (spec.fused_linear_cross_entropy and not gathers_head) or spec.loss == "cut_cross_entropy"
    return [
        (spec.num_gpus > MAX_RANKS, f"{given}: at most {MAX_RANKS} ranks can be run"),
        (
            not has_ranks and spec.only_rank is not None,
            f"only_rank {spec.only_rank} given; sharding {spec.sharding} has no ranks: one process for all GPUs; drop "
            "it",
        ),
        (
            not has_ranks and depth < spec.num_gpus,
            f"{given} under {spec.sharding}: the model has {depth} layers, and no layer is divided; use as many GPUs "
            "at most",
        ),
        (
            has_ranks and spec.only_rank is not None and not 0 <= spec.only_rank < spec.num_gpus,
            f"only_rank {spec.only_rank} given; {spec.num_gpus} ranks are numbered from 0 to {spec.num_gpus - 1}",
        ),
        (
            spec.device == "cpu",
            f"{given} needs device cuda: NVIDIA GPUs that are visible here, or emulated ones, as by "
            f"--emulate 'H100-SXM x{min(spec.num_gpus, 16)}'",
        ),
        (
            spec.weights == "pretrained",
            "several GPUs are given random weights alone: memory does not depend on the values; use weights random",
        ),
        (spec.torch_compile, "torch_compile is not run on several GPUs; leave it out"),
        (
            reads_head and spec.sharding != "ddp",
            f"{'fused_linear_cross_entropy' if spec.fused_linear_cross_entropy else spec.other_head} reads the head's "
            f"weight past the module that would gather it, and is not run under {spec.sharding}; leave it out, or use "
            "sharding ddp",
        ),
        (
            "fp16" in (spec.dtype, spec.autocast) and rules_of(spec.sharding).uses_deepspeed,
            f"fp16 under {spec.sharding} is trained under DeepSpeed's loss scaler, which is not run here; use bf16, or "
            "another sharding",
        ),
        (
            rules_of(spec.sharding).module == "fsdp1" and spec.kbit_prep != "none",
            f"kbit_prep {spec.kbit_prep} raises norms to fp32, which {spec.sharding} does not flatten with "
            f"{spec.dtype} weights in one unit; use kbit_prep none, or sharding fsdp",
        ),
    ]


def cannot_shard(spec: Cell) -> str | None:
    """The first reason why the libraries do not train the cell under its sharding; None where they do."""
    return cannot_step(spec) or cannot_quantize(spec) or cannot_divide_layers(spec)


def cannot_rotate(spec: Cell) -> str | None:
    """Return why keys and values do not go from rank to rank so; None where they do."""
    if spec.cp_size > 1 or spec.cp_rotation == "allgather":
        return None
    return f"cp_rotation {spec.cp_rotation} is for ranks that share each sequence; set cp_size to 2 or more"


def cannot_group(spec: Cell) -> str | None:
    """Return why the ranks make no groups of ``shard_size``; None where they do, or all are one group."""
    sharding, num_gpus, shard_size = spec.sharding, spec.num_gpus, spec.shard_size
    given, within = f"shard_size {shard_size}", rules_of(sharding).within
    if within is None:
        alone = f"{given}: {sharding} makes all ranks one group; use sharding {' or '.join(HYBRID)}, or leave it out"
        return alone if shard_size is not None else None
    if shard_size is None or shard_size < 2:
        return f"{given}: a group of {sharding} has at least 2 ranks, which share the model; use ddp to share nothing"
    if num_gpus % shard_size:
        return (
            f"num_gpus {num_gpus} under {sharding} is no multiple of {given}, the ranks of one group; set shard_size "
            "to a divisor of it"
        )
    if num_gpus == shard_size:
        return (
            f"{given} under {sharding} makes all {num_gpus} ranks one group, and nothing is replicated; use sharding "
            f"{within}, or more GPUs"
        )
    return None


def cannot_step(spec: Cell) -> str | None:
    """Return why a rank's parameters are not stepped, by its optimizer or from its loss; None where they are."""
    rules = rules_of(spec.sharding)
    shares_rows = spec.cp_size > 1 and spec.trainer != "sft"  # the losses of pairs score whole rows
    if spec.uses_trl and (shares_rows or not rules.runs_trl):
        beside = f"cp_size {spec.cp_size}" if shares_rows else spec.sharding
        kinds = ", ".join(kind for kind, row in SHARDINGS.items() if row.runs_trl)
        return f"{spec.of_trl} is not run under {beside}; use sharding {kinds}, or leave one of them out"
    if not rules.optimizers or spec.optim in rules.optimizers:
        return None
    return (
        f"{spec.sharding} hands the optimizer DTensors, which {spec.optim} does not take; use "
        f"{', '.join(rules.optimizers)}, or fsdp1"
    )


def cannot_quantize(spec: Cell) -> str | None:
    """Return why the libraries cannot run quantized weights so; None where they can."""
    rules = rules_of(spec.sharding)
    if spec.quant == "none" or spec.quant in rules.quants:
        return None
    return f"quant {spec.quant} under {spec.sharding}: {rules.no_quant}"


def cannot_divide_layers(spec: Cell) -> str | None:
    """Return what transformers 5.23 with peft 0.21 does not divide by ``tp_plan="auto"``; each case failed under
    Trainer.
    """
    if rules_of(spec.sharding).module != "tensor_parallel":
        return None
    targets = lora_target_names(spec) if spec.method != "full" else []
    if targets is None or any(one in ROW_WISE for one in targets):
        return (
            f"lora_targets {'all-linear' if targets is None else ','.join(targets)} under tp: the adapter of a layer "
            f"that is divided by its inputs ({', '.join(ROW_WISE[:2])}) is as wide as a part, and taken for the whole "
            '("shape is invalid" in the first forward); use lora_targets q_v, or sharding fsdp'
        )
    if spec.dora:
        return (
            "dora under tp: peft adds a whole B(A(x)) to a weight of which a rank has a part (got mixed torch.Tensor "
            "and DTensor, in the first forward); leave dora out, or use sharding fsdp"
        )
    heads = {name: spec.architecture.get(name) for name in ("num_attention_heads", "num_key_value_heads")}
    uneven = [f"{name} {count}" for name, count in heads.items() if isinstance(count, int) and count % spec.num_gpus]
    if uneven:
        return (
            f"num_gpus {spec.num_gpus} under tp: {' and '.join(uneven)} cannot be divided by it, and a rank has no "
            "part of a head; use a number that divides both"
        )
    return None


def cannot_share_sequences(spec: Cell) -> str | None:
    """Return what accelerate and torch do not run by context parallelism, or run as another model; None where they run
    it.
    """
    if spec.cp_size == 1:
        return None
    given, sharing = f"cp_size {spec.cp_size}", sharing_ranks(spec)
    if spec.sharding not in FSDP2:
        return (
            f"{given} under {spec.sharding}: accelerate splits sequences beside FSDP2 alone; use sharding "
            f"{', '.join(FSDP2)}, or leave it out"
        )
    if sharing % spec.cp_size:
        name = "num_gpus" if spec.shard_size is None else "shard_size"
        return (
            f"{given}: {name} {sharing} is no multiple of it, the ranks that share each sequence; set it to a divisor"
        )
    if spec.cp_size == spec.shard_size:
        return (
            f"{given} under {spec.sharding} is all of shard_size {sharing}, and accelerate wants two batches in a "
            "group at least; use a smaller one, or sharding fsdp"
        )
    if spec.attn != "sdpa":
        return f"attn {spec.attn} with {given}: torch's ring attention stands in for sdpa's alone; use attn sdpa"
    if spec.padding:
        return (
            f"padding with {given}: accelerate drops the mask, and padding would be attended to; pack sequences to one "
            "length, and leave it out"
        )
    if spec.seq_len % (2 * spec.cp_size):
        return (
            f"seq_len {spec.seq_len} with {given}: each rank takes a part from the front and one from the back, so the "
            f"length is a multiple of {2 * spec.cp_size}; use {_near(spec.seq_len, 2 * spec.cp_size)}"
        )
    if spec.model_type in _NO_RING:
        return (
            f"{given}: accelerate takes the mask, which ring attention has no place for, from modules that are named "
            f"self_attn, and {spec.model_type} has none; leave it out"
        )
    if (spec.dtype, spec.autocast) == ("fp32", "none") and _has_grouped_heads(spec.architecture):
        return (
            f"dtype fp32 without autocast, with {given}: sdpa has no fused kernel for grouped heads in fp32, and ring "
            "attention stands in for fused ones alone; use autocast bf16"
        )
    if kinds := _partial_attention(spec.architecture):
        return (
            f"{given}: {spec.model} has {kinds}, whose mask accelerate would drop; it splits sequences of models with "
            "full causal attention alone; leave it out"
        )
    return None


def _near(length: int, unit: int) -> str:
    below = length // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def _has_grouped_heads(architecture: dict[str, Any]) -> bool:
    heads = architecture.get("num_attention_heads")
    return architecture.get("num_key_value_heads", heads) != heads


def _partial_attention(architecture: dict[str, Any]) -> str:
    """The attention of a config.json that does not look at all tokens before, in words; empty where there is none."""
    kinds = set(architecture.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        return f"layers of {' and '.join(sorted(kinds))}"
    window = architecture.get("sliding_window")
    return f"a sliding window of {window}" if window and architecture.get("use_sliding_window", True) else ""


def cannot_offload(spec: Cell) -> str | None:
    """Return why the ranks do not keep that in host memory; None where they do, or nothing is offloaded."""
    if spec.offload == "none":
        return None
    given, rules = f"offload {spec.offload} under {spec.sharding}", rules_of(spec.sharding)
    if spec.offload not in rules.offloads:
        return f"{given}: {rules.no_offload}"
    if rules.offload_optimizers and spec.optim not in rules.offload_optimizers:
        first = rules.offload_optimizers[0]
        return f"{given}: DeepSpeed's CPUAdam steps on the host, and {spec.optim} is not that; use {first}"
    if spec.num_models > 1:
        return (
            f"{given}: {spec.of_trl} in full has a reference model, which would be offloaded, too, and that is not "
            "followed here; use method lora, whose reference is the model itself"
        )
    if OPTIMIZERS[spec.optim].is_paged:
        return f"{given}: {spec.optim} pages between GPU and host what is on the host alone; use adamw_torch"
    return None
