"""Shares: one GPU's recorded step, its states divided by a sharding → about what one of several ranks holds.

In: a CellSpec with its ranks, whose batch is one rank's, and a GPU. Out: a Prediction of engine ``near``, for searches
over many numbers of GPUs. It knows no order of requests and is never exact: ``predict --num-gpus`` records the rank.
"""

from collections.abc import Sequence
from typing import NamedTuple

from vramprobe import catalog
from vramprobe.architecture import Architecture, UnsupportedArchitecture, architecture
from vramprobe.bounds.rank import RankTensors, plain_bytes
from vramprobe.bounds.tensors import tensors, weights_bytes
from vramprobe.catalog.libraries import pinned_libraries
from vramprobe.predict.at_hand import NotAtHand, card_of
from vramprobe.predict.one_gpu_step import Moment, Step, recorded_step, step_at_hand
from vramprobe.predict.prediction import Interval, Prediction
from vramprobe.predict.recipe_replay import load_note
from vramprobe.recipe.recorder import Say
from vramprobe.rules.sharding import rules_of, sharing_ranks, with_group_size
from vramprobe.spec import CellSpec

#: DeepSpeed's defaults in elements: reduce_bucket_size; stage3_max_live_parameters and sub_group_size; what is gathered
#: ahead (stage3_prefetch_bucket_size); the small tensors that ZeRO-3 keeps whole.
_BUCKET, _LIVE, _AHEAD, _SMALL = 500_000_000, 1_000_000_000, 50_000_000, 100_000
#: Causes that are half as large where a rank computes in 16 bits what one GPU did in fp32.
_ACTIVATIONS = ("saved_activations", "checkpoint_store", "recomputed_layer", "temporaries")
_Bytes = dict[str, int]


#: What a rank holds throughout, and the moments of its step beside that.
_Rank = tuple[_Bytes, list[Moment]]


class Ratios(NamedTuple):
    """Bytes of emulated ranks by those allocated here: 90 % lie between the ends, the median is between them."""

    allocated: tuple[float, float, float]
    reserved: tuple[float, float, float]  # of ranks of 4 GiB or more: smaller ones round up by more


def near(
    spec: CellSpec, gpu: catalog.Gpu | None = None, *, records: bool = False, say: Say = lambda words: None
) -> Prediction:
    """Return one rank's memory, near, by a recipe of one GPU's step at hand, or with ``records`` recorded now, of which
    ``say`` hears. Raises NotAtHand without one, UnsupportedArchitecture for what only a rank's own recording knows.
    """
    spec = with_group_size(spec)
    card = card_of(gpu)
    arch = _composed(spec)
    step = step_at_hand(spec, card)
    if step is None and records:
        step = recorded_step(spec, card, say)
    if step is None:
        raise NotAtHand(
            f"no recipe of {spec.model} on one GPU with these options is at hand; vramprobe predict records this rank"
        )
    ratios, load = _KINDS[rules_of(spec.sharding).module][1], _load_bytes(spec, arch)
    peak = max(rank_moments(spec, arch, step, card), key=lambda one: one.total_bytes)
    total = max(peak.total_bytes, load)
    low, middle, high = (max(round(peak.total_bytes * ratio), load) for ratio in ratios.reserved)
    least = total - sum(peak.terms.get(name, 0) for name in _ACTIVATIONS) // 2 if step.is_wider else total
    return Prediction(
        cell_id=spec.cell_id,
        engine="near",
        peak_allocated_bytes=Interval(
            value=total, low=max(round(ratios.allocated[0] * least), load), high=round(ratios.allocated[2] * total)
        ),
        peak_phase=peak.phase,
        peak_label=peak.label,
        terms={cause: size for cause, size in peak.terms.items() if size},
        constant_bytes=total - peak.total_bytes,
        reserved_bytes=Interval(value=middle, low=min(low, least), high=high),
        warnings=[
            f"one rank of {spec.num_gpus} under {spec.sharding}, near: shares of one GPU's recorded step",
            *([load_note(load)] if load > peak.total_bytes else []),
        ],
        libraries=dict(pinned_libraries()),
        num_gpus=spec.num_gpus,
        sharding=spec.sharding,
    )


def _composed(spec: CellSpec) -> Architecture:
    """Return the cell's architecture. Raises UnsupportedArchitecture for what no emulated rank was held against, or no
    library runs so."""
    module = rules_of(spec.sharding).module
    if module not in _KINDS or spec.cp_size > 1:
        what = f"cp_size {spec.cp_size}" if spec.cp_size > 1 else f"sharding {spec.sharding}"
        raise UnsupportedArchitecture(f"{what}: a rank is recorded, which has no other answer")
    arch = architecture(spec.architecture)
    reasons = (
        (
            spec.fused_linear_cross_entropy or spec.loss == "cut_cross_entropy",
            "a fused loss, which reads the head past the module that gathers it",
        ),
        (spec.trainer != "sft", f"trainer {spec.trainer}"),
        (any(parameter.only for parameter in arch.parameters), "layers that differ in their weights"),
        (spec.offload != "none" and spec.quant != "none", "quantized weights that are offloaded"),
    )
    for is_so, what in reasons:
        if is_so and (module != "ddp" or spec.trainer != "sft"):
            raise UnsupportedArchitecture(f"a rank under {spec.sharding} is not composed with {what}; it is recorded")
    return arch


def rank_moments(spec: CellSpec, arch: Architecture, step: Step, card: catalog.Gpu) -> list[Moment]:
    """Return the moments of one rank's step that can be its peak, in the order of the step."""
    rank, module = RankTensors(spec, arch, sharing_ranks(spec)), rules_of(spec.sharding).module
    idle, found = _KINDS[module][0](rank, _in_its_precision(rank, step.moments))
    idle["workspaces"] = 2 * card.blas_workspace_bytes  # of the forward's thread and the backward's
    if module in ("ddp", "zero"):  # of whole weights, as on one GPU
        idle["block_remainders"] = step.remainders_bytes
    return [one._replace(terms=idle | one.terms) for one in found]


def _in_its_precision(rank: RankTensors, moments: Sequence[Moment]) -> list[Moment]:
    """Return the moments with gradients as wide as the rank's, of its part the optimizer's temporaries, and without the
    copies of weights that autocast makes where a sharding lowers the weights."""
    recorded = max((one.terms.get("gradients", 0) for one in moments if one.phase == "optimizer_step"), default=0)
    whole = plain_bytes(rank.trained)
    found = []
    for one in moments:
        scaled = {"gradients": one.terms.get("gradients", 0) * whole // max(recorded, 1)}
        if (stepping := one.terms.get("optimizer_temporaries", 0)) > 0:
            scaled["optimizer_temporaries"] = stepping * plain_bytes(rank.stepped) // whole
        if rules_of(rank.spec.sharding).module != "ddp":
            scaled["cast_copies"] = 0
        found.append(one._replace(terms=one.terms | scaled))
    return found


def _before_step(moments: Sequence[Moment]) -> list[Moment]:
    return [one for one in moments if one.phase != "optimizer_step"]


def _stepping(moments: Sequence[Moment]) -> int:
    return max((one.terms.get("optimizer_temporaries", 0) for one in moments), default=0)


def _load_bytes(spec: CellSpec, arch: Architecture) -> int:
    """Bytes of quantized weights, which are loaded whole before they are divided; 0 of others."""
    if spec.quant == "none" or not rules_of(spec.sharding).divides_weights:
        return 0
    return weights_bytes(tensors(spec, arch), spec.quant)


def _replica(rank: RankTensors, moments: Sequence[Moment]) -> _Rank:
    """DDP: all that one GPU holds, and buckets for the gradients beside them."""
    gradients = plain_bytes([one for one in rank.stored if one.trained])
    idle = {"weights": rank.whole_weights(rank.stored), "optimizer_state": rank.state, "gradient_buckets": gradients}
    step = {"gradients": gradients, "optimizer_temporaries": _stepping(moments)}
    return idle, [*_before_step(moments), Moment("optimizer_step", "optimizer", step)]


def _sharded(rank: RankTensors, moments: Sequence[Moment]) -> _Rank:
    """FSDP: shares of everything; a layer is gathered for its turn, the next one ahead, and its gradients reduced."""
    spec, on_host = rank.spec, rank.spec.offload != "none"
    outside = rank.embedding[0] + rank.tail[0]
    is_root, kept = not rank.copies_out or rank.is_tied, outside + rank.layers
    root, root_gradients = (outside, rank.embedding[1] + rank.tail[1]) if is_root else (0, 0)
    idle, gradients = {"weights": rank.buffers}, 0
    if not on_host:
        gradients = plain_bytes(rank.stepped)
        idle = {"weights": rank.shares + rank.buffers, "optimizer_state": rank.state}
    whole_gradients, found = plain_bytes(rank.trained), []
    for phase, label, terms in _before_step(moments):
        unit, own = {"embedding": rank.embedding, "loss": rank.tail}.get(label, rank.layer)
        if is_root and label in ("embedding", "loss"):
            unit, own = 0, root_gradients
        gathered = kept if rank.keeps else root + unit
        if phase == "forward":
            gathered += unit * rank.copies_out  # the all-gather's output, which weights are copied out of
        elif not rank.keeps and label != "embedding":
            gathered += rank.layer[0]
        stand, buckets = terms.get("gradients", 0), 0 if phase == "forward" or label == "loss" else rank.layer[1]
        if spec.grad_accum > 1:
            stand = min(stand, whole_gradients)
        elif phase == "backward":
            now = min(stand, own)
            stand = now + (stand - now) * gradients // whole_gradients
        more = {"gradients": stand, "gradient_buckets": buckets, "gathered_weights": gathered}
        found.append(Moment(phase, label, terms | more))
    last = root_gradients if is_root else rank.embedding[1]
    end = {"gradients": gradients + last + last // rank.num, "gradient_buckets": last}
    end |= {"gathered_weights": 0 if rank.copies_out else root}
    step = {} if on_host else {"gradients": gradients, "optimizer_temporaries": _stepping(moments)}
    return idle, [*found, Moment("backward", "end of it", end), Moment("optimizer_step", "optimizer", step)]


def _partitioned(rank: RankTensors, moments: Sequence[Moment]) -> _Rank:
    """ZeRO-1 and 2: whole weights, shares of their fp32 copy and its state, gradients through a bucket."""
    is_first, width = rank.spec.sharding == "zero1", rank.width
    raised, accumulates = rank.spec.autocast == "none" and width == 2, rank.spec.grad_accum > 1
    held = 4 if raised else width
    in_bucket, on_host = held if is_first else width, rank.spec.offload != "none"
    bucket, last = _BUCKET * in_bucket, rank.embedding[1]
    part = rank.part * held if raised else max(rank.part * held, last)
    idle = {"weights": rank.whole_weights(rank.computed)}
    if not on_host:
        idle = {"weights": idle["weights"] + 4 * rank.part, "optimizer_state": rank.state}
    found = []
    for phase, label, terms in _before_step(moments):
        stand = terms.get("gradients", 0) * held // width
        stand = stand if is_first else part if accumulates else min(stand, part)
        is_there = (is_first and (raised or accumulates)) or (phase == "backward" and label != "loss")
        if (phase, label) == ("backward", "embedding"):
            stand += part if is_first else last
        more = {"gradients": stand, "gradient_buckets": bucket * is_there}
        found.append(Moment(phase, label, terms | more))
    sent = min(rank.elements, _BUCKET) * (in_bucket + (held if held != in_bucket else 0))
    whole = rank.elements * held if is_first and rank.elements > _BUCKET else 0
    end = {"gradients": part + whole, "gradient_buckets": bucket + sent}
    joined = 0 if on_host or raised else rank.part * (width + (4 if width == 2 else 0))
    stepping = 0 if on_host else max(joined, _stepping(moments))
    step = {"gradients": part, "gradient_buckets": bucket * (raised and is_first), "optimizer_temporaries": stepping}
    return idle, [*found, Moment("backward", "end of it", end), Moment("optimizer_step", "optimizer", step)]


def _stage_3(rank: RankTensors, moments: Sequence[Moment]) -> _Rank:
    """ZeRO-3: shares of everything and a bucket throughout; weights are gathered ahead and kept while they are few."""
    width, on_host = rank.width, rank.spec.offload
    whole, bucket = rank.layers + rank.embedding[0] + rank.tail[0], _BUCKET * width
    small = plain_bytes([one for one in rank.computed if not one.quantised and one.numel < _SMALL])
    weights = rank.buffers + small + (0 if on_host == "params" else rank.shares)
    idle = {"weights": weights, "gradient_buckets": bucket}
    if on_host == "none":
        idle |= {"weights": weights + 4 * rank.part, "gradients": rank.part * width, "optimizer_state": rank.state}
    live, found = min(whole, _LIVE * width), []
    for phase, label, terms in _before_step(moments):
        ends = {"embedding": rank.embedding[0], "loss": (rank.embedding if rank.is_tied else rank.tail)[0]}
        gathered = max(live, min(whole, ends.get(label, rank.layer[0]) + _AHEAD * width))
        arriving = max(one.num_bytes for one in rank.trained) if phase == "backward" and label != "loss" else 0
        more = {"gathered_weights": gathered, "gradients": idle.get("gradients", 0) + arriving}
        found.append(Moment(phase, label, terms | more))
    sent = bucket + min(rank.elements, _BUCKET) * width
    end = {"gradient_buckets": sent, "gathered_weights": live}
    joined = min(rank.part, _LIVE) * (width + (4 if width == 2 else 0))
    step = {"optimizer_temporaries": max(joined, _stepping(moments)) if on_host == "none" else 0}
    return idle, [*found, Moment("backward", "end of it", end), Moment("optimizer_step", "optimizer", step)]


#: By the module of a sharding (rules/sharding.py): its composition, and how far that is from the emulated ranks of
#: tests/oracles (benchmarks/truth/shares.md).
_KINDS = {
    "ddp": (_replica, Ratios((0.999, 1.0, 1.067), (1.07, 1.141, 1.174))),
    "fsdp1": (_sharded, Ratios((0.966, 1.001, 1.027), (1.095, 1.326, 1.434))),
    "fsdp2": (_sharded, Ratios((0.962, 0.997, 1.011), (1.082, 1.292, 1.596))),
    "zero": (_partitioned, Ratios((0.84, 0.998, 1.078), (1.063, 1.31, 1.547))),
    "zero3": (_stage_3, Ratios((0.914, 1.002, 1.146), (1.101, 1.315, 1.583))),
}
