"""Shares: one GPU's step, its states divided as a sharding divides them → about what one of several ranks holds.

In: a CellSpec with its ranks, whose batch is one rank's, and a GPU. Out: a Prediction of engine ``near``, for searches
over many numbers of GPUs. It knows no order of requests and is never exact: ``predict --num-gpus`` records the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from vramprobe.architecture import Architecture, UnsupportedArchitecture
from vramprobe.bounds import states
from vramprobe.bounds import tensors as parameters
from vramprobe.bounds.tensors import Tensor
from vramprobe.catalog.libraries import pinned_libraries
from vramprobe.kernels.chip import chip_like
from vramprobe.predict.one_gpu import without_flash
from vramprobe.predict.prediction import HasKernels, Interval, Prediction
from vramprobe.predict.recipe_replay import load_note
from vramprobe.predict.uncertainty import interval_around
from vramprobe.rules.sharding import rules_of, sharing_ranks, with_group_size
from vramprobe.spec import CellSpec
from vramprobe.terms import Moment, batch_bytes, course_of
from vramprobe.terms.cell import optimizer
from vramprobe.terms.cell.setup import Setup
from vramprobe.terms.step.walk import Walk, one_of_each_kind, walk_layers
from vramprobe.terms.step.workspaces import with_workspaces, workspaces_bytes
from vramprobe.terms.tape.graph import Place
from vramprobe.terms.tape.tape import Tape
from vramprobe.units import ITEMSIZE_BYTES

#: DeepSpeed's defaults in elements: reduce_bucket_size; stage3_max_live_parameters and sub_group_size; what is gathered
#: ahead (stage3_prefetch_bucket_size); the small tensors that ZeRO-3 keeps whole.
_BUCKET, _LIVE, _AHEAD, _SMALL = 500_000_000, 1_000_000_000, 50_000_000, 100_000
_STEP: Place = ("optimizer_step", "optimizer")
_Bytes = dict[str, int]


class Ratios(NamedTuple):
    """Bytes of emulated ranks by those allocated here: 90 % lie between the ends, the median is between them."""

    allocated: tuple[float, float, float]
    reserved: tuple[float, float, float]  # of ranks of 4 GiB or more: smaller ones round up by more


def near(spec: CellSpec, gpu: HasKernels | None = None) -> Prediction:
    """Return one rank's memory, near. Raises UnsupportedArchitecture for what is recorded alone."""
    spec = with_group_size(spec)
    peak = max(rank_moments(spec, gpu), key=lambda one: one.total_bytes)
    ratios, load = _KINDS[rules_of(spec.sharding).module][1], _load_bytes(spec)
    total = max(peak.total_bytes, load)
    low, middle, high = (max(round(peak.total_bytes * ratio), load) for ratio in ratios.reserved)
    return Prediction(
        cell_id=spec.cell_id,
        engine="near",
        peak_allocated_bytes=_at_least(interval_around(total, (ratios.allocated[0], ratios.allocated[2])), load),
        peak_phase=peak.phase,
        peak_label=peak.label,
        terms={cause: size for cause, size in peak.terms.items() if size},
        constant_bytes=total - peak.total_bytes,
        reserved_bytes=Interval(value=middle, low=low, high=high),
        warnings=[
            f"one rank of {spec.num_gpus} under {spec.sharding}, near: shares of one GPU's arithmetic; vramprobe "
            "predict --num-gpus records it",
            *([load_note(load)] if load > peak.total_bytes else []),
            *without_flash(spec, gpu),
        ],
        libraries=dict(pinned_libraries()),
        num_gpus=spec.num_gpus,
        sharding=spec.sharding,
    )


def rank_moments(spec: CellSpec, gpu: HasKernels | None) -> list[Moment]:
    """Return the moments of one rank's step that can be its peak, in the order of the step."""
    module = rules_of(spec.sharding).module
    if module not in _KINDS or spec.cp_size > 1:
        what = f"cp_size {spec.cp_size}" if spec.cp_size > 1 else f"sharding {spec.sharding}"
        raise UnsupportedArchitecture(f"{what}: a rank is recorded, which has no other answer")
    course = course_of(spec, chip_like(gpu))
    _require_composed(spec, course.arch)
    rank = RankTensors(spec, course.arch, sharing_ranks(spec))
    setup = course.setup if module == "ddp" else replace(course.setup, tensors=rank.computed)
    if module == "zero3":
        setup = replace(setup, autocast="none", linears_save_inputs=True)
    elif module == "fsdp1" and spec.autocast != "none" and spec.method != "full":
        setup = replace(setup, adapter_input="fp32")
    places = _walk_of(setup, module not in ("ddp", "fsdp1")).highest(spec.batch_size, spec.seq_len)
    idle, placed = _KINDS[module][0](rank, places)
    idle |= {"batch": batch_bytes(spec)}
    if module in ("ddp", "zero"):  # of whole weights, as on one GPU
        idle["block_remainders"] = course.idle.get("block_remainders", 0)
    found = [Moment(phase, label, idle | terms) for (phase, label), terms in placed.items()]
    return with_workspaces(found, workspaces_bytes(spec, gpu))


def _require_composed(spec: CellSpec, arch: Architecture) -> None:
    """Raise UnsupportedArchitecture for what no emulated rank was held against, or no library runs so."""
    if spec.sharding == "ddp":
        return
    reasons = (
        (
            spec.fused_linear_cross_entropy or spec.loss == "cut_cross_entropy",
            "a fused loss, which reads the head past the module that gathers it",
        ),
        (any(parameter.only for parameter in arch.parameters), "layers that differ in their weights"),
        (spec.offload != "none" and spec.quant != "none", "quantized weights that are offloaded"),
    )
    for is_so, what in reasons:
        if is_so:
            raise UnsupportedArchitecture(f"a rank under {spec.sharding} is not composed with {what}; it is recorded")


def _at_least(interval: Interval, num_bytes: int) -> Interval:
    return interval.model_copy(update={"low": max(interval.low, num_bytes)})


def _load_bytes(spec: CellSpec) -> int:
    """Bytes of quantized weights, which are loaded whole before they are divided; 0 of others."""
    if spec.quant == "none" or not rules_of(spec.sharding).divides_weights:
        return 0
    arch = course_of(spec).arch
    return parameters.weights_bytes(parameters.tensors(spec, arch), spec.quant)


@lru_cache(maxsize=512)
def _walk_of(setup: Setup, casts_weights: bool) -> Walk:
    tape = Tape(setup.sizes.covers)
    tape.casts_weights = casts_weights
    return walk_layers(setup, one_of_each_kind(setup.arch), tape)


def _plain_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(one.num_bytes * one.num_copies for one in tensors)


class RankTensors:
    """A model's tensors as they are stored, as the step computes with them, and what this rank steps of them."""

    def __init__(self, spec: CellSpec, arch: Architecture, num: int) -> None:
        self.spec, self.num, rules = spec, num, rules_of(spec.sharding)
        self.copies_out, self.keeps = rules.module == "fsdp2", rules.num_gathers == 1
        is_third, self.stored = rules.module == "zero3", parameters.tensors(spec, arch)
        dtype = spec.autocast if spec.autocast != "none" else "fp32" if is_third else None
        made_later = is_third and spec.quant == "none"  # adapters, of which ZeRO's init knows nothing
        self.computed = tuple(
            one
            if dtype is None or one.quantised or (made_later and one.role == "adapter")
            else one._replace(dtype=dtype)
            for one in self.stored
        )
        raises = spec.autocast != "none" and (spec.quant in ("none", "int8") or rules.module == "fsdp1")
        fsdp = [one._replace(dtype="fp32") if raises and one.trained else one for one in self.stored]
        self.trained = [one for one in self.computed if one.trained]
        self.width = ITEMSIZE_BYTES[dtype if is_third and dtype else self.trained[0].dtype]  # of a gradient's element
        elements = sum(one.numel * one.num_copies for one in self.trained)
        self.elements, self.part = elements, -(-elements // num)
        if rules.uses_deepspeed:  # which steps a flat fp32 copy
            fsdp = list(self.computed)
            self.stepped = [self.trained[0]._replace(dtype="fp32", role="linear", shape=(self.part,), num_copies=1)]
        else:
            cut = 1 if rules.module == "ddp" else num
            self.stepped = [o._replace(shape=(-(-o.shape[0] // cut), *o.shape[1:])) for o in fsdp if o.trained]
        self.buffers = parameters.buffers_bytes(arch, spec.dtype)
        self.shares = sum(self._share_bytes(one) * one.num_copies for one in fsdp)
        self.layers = sum(self._gathered_bytes(one) * one.num_copies for one in self.computed if one.per_layer)
        self.layer = self._unit(lambda one: one.per_layer)
        self.embedding = self._unit(lambda one: not one.per_layer and one.role == "embedding")
        self.tail = self._unit(lambda one: not one.per_layer and one.role != "embedding")
        self.is_tied = not any(one.role == "head" for one in self.computed)
        self.state = states.allocated_state_bytes(spec, self.stepped)
        self.stepping = optimizer.temporaries_bytes(spec, self.stepped)

    def whole_weights(self, tensors: Sequence[Tensor]) -> int:
        return parameters.weights_bytes(tensors, self.spec.quant) + self.buffers

    def _unit(self, is_in: Callable[[Tensor], bool]) -> tuple[int, int]:
        """Bytes of one copy of these weights as they are gathered, and of their gradients."""
        own = [one for one in self.computed if is_in(one)]
        return sum(map(self._gathered_bytes, own)), sum(one.num_bytes for one in own if one.trained)

    def _gathered_bytes(self, one: Tensor) -> int:
        packed = one.numel if self.spec.quant == "int8" else -(-one.numel // 2)
        return packed if one.quantised else one.num_bytes

    def _share_bytes(self, one: Tensor) -> int:
        whole = self._gathered_bytes(one)
        scales = parameters.quantised_bytes(one, self.spec.quant) - whole if one.quantised else 0
        return -(-whole // self.num) + scales


def _replica(rank: RankTensors, places: dict[Place, _Bytes]) -> tuple[_Bytes, dict[Place, _Bytes]]:
    """DDP: all that one GPU holds, and buckets for the gradients beside them."""
    gradients = _plain_bytes([one for one in rank.stored if one.trained])
    idle = {"weights": rank.whole_weights(rank.stored), "optimizer_state": rank.state, "gradient_buckets": gradients}
    return idle, places | {_STEP: {"gradients": gradients, "optimizer_temporaries": rank.stepping}}


def _sharded(rank: RankTensors, places: dict[Place, _Bytes]) -> tuple[_Bytes, dict[Place, _Bytes]]:
    """FSDP: shares of everything; a layer is gathered for its turn, the next one ahead, and its gradients reduced."""
    spec, on_host = rank.spec, rank.spec.offload != "none"
    outside = rank.embedding[0] + rank.tail[0]
    is_root, kept = not rank.copies_out or rank.is_tied, outside + rank.layers
    root, root_gradients = (outside, rank.embedding[1] + rank.tail[1]) if is_root else (0, 0)
    idle, gradients = {"weights": rank.buffers}, 0
    if not on_host:
        gradients = _plain_bytes(rank.stepped)
        idle = {"weights": rank.shares + rank.buffers, "optimizer_state": rank.state}
    whole_gradients, found = _plain_bytes(rank.trained), {}
    for (phase, label), terms in places.items():
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
        found[phase, label] = terms | more
    last = root_gradients if is_root else rank.embedding[1]
    end = {"gradients": gradients + last + last // rank.num, "gradient_buckets": last}
    found["backward", "end of it"] = end | {"gathered_weights": 0 if rank.copies_out else root}
    step = {} if on_host else {"gradients": gradients, "optimizer_temporaries": rank.stepping}
    return idle, found | {_STEP: step}


def _partitioned(rank: RankTensors, places: dict[Place, _Bytes]) -> tuple[_Bytes, dict[Place, _Bytes]]:
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
    found = {}
    for (phase, label), terms in places.items():
        stand = terms.get("gradients", 0) * held // width
        stand = stand if is_first else part if accumulates else min(stand, part)
        is_there = (is_first and (raised or accumulates)) or (phase == "backward" and label != "loss")
        if (phase, label) == ("backward", "embedding"):
            stand += part if is_first else last
        found[phase, label] = terms | {"gradients": stand, "gradient_buckets": bucket * is_there}
    sent = min(rank.elements, _BUCKET) * (in_bucket + (held if held != in_bucket else 0))
    whole = rank.elements * held if is_first and rank.elements > _BUCKET else 0
    found["backward", "end of it"] = {"gradients": part + whole, "gradient_buckets": bucket + sent}
    joined = 0 if on_host or raised else rank.part * (width + (4 if width == 2 else 0))
    step = {"gradients": part, "gradient_buckets": bucket * (raised and is_first)}
    return idle, found | {_STEP: step | {"optimizer_temporaries": 0 if on_host else max(joined, rank.stepping)}}


def _stage_3(rank: RankTensors, places: dict[Place, _Bytes]) -> tuple[_Bytes, dict[Place, _Bytes]]:
    """ZeRO-3: shares of everything and a bucket throughout; weights are gathered ahead and kept while they are few."""
    width, on_host = rank.width, rank.spec.offload
    whole, bucket = rank.layers + rank.embedding[0] + rank.tail[0], _BUCKET * width
    small = _plain_bytes([one for one in rank.computed if not one.quantised and one.numel < _SMALL])
    weights = rank.buffers + small + (0 if on_host == "params" else rank.shares)
    idle = {"weights": weights, "gradient_buckets": bucket}
    if on_host == "none":
        idle |= {"weights": weights + 4 * rank.part, "gradients": rank.part * width, "optimizer_state": rank.state}
    live, found = min(whole, _LIVE * width), {}
    for (phase, label), terms in places.items():
        ends = {"embedding": rank.embedding[0], "loss": (rank.embedding if rank.is_tied else rank.tail)[0]}
        gathered = max(live, min(whole, ends.get(label, rank.layer[0]) + _AHEAD * width))
        arriving = max(one.num_bytes for one in rank.trained) if phase == "backward" and label != "loss" else 0
        more = {"gathered_weights": gathered, "gradients": idle.get("gradients", 0) + arriving}
        found[phase, label] = terms | more
    sent = bucket + min(rank.elements, _BUCKET) * width
    found["backward", "end of it"] = {"gradient_buckets": sent, "gathered_weights": live}
    joined = min(rank.part, _LIVE) * (width + (4 if width == 2 else 0))
    return idle, found | {_STEP: {"optimizer_temporaries": max(joined, rank.stepping) if on_host == "none" else 0}}


#: By the module of a sharding (rules/sharding.py): its composition, and how far that is from the emulated ranks of
#: tests/oracles (benchmarks/truth/shares.md).
_KINDS = {
    "ddp": (_replica, Ratios((1.0, 1.001, 1.016), (1.049, 1.124, 1.163))),
    "fsdp1": (_sharded, Ratios((0.966, 1.001, 1.033), (1.095, 1.326, 1.434))),
    "fsdp2": (_sharded, Ratios((0.966, 1.0, 1.01), (1.082, 1.292, 1.449))),
    "zero": (_partitioned, Ratios((0.843, 1.0, 1.053), (1.047, 1.31, 1.538))),
    "zero3": (_stage_3, Ratios((0.914, 1.001, 1.052), (1.11, 1.301, 1.492))),
}
