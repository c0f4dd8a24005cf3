"""Duration: how many seconds a cell will take, before it is run; what a plan quotes and a budget is kept by.

In: a spec, the card it runs on, and the records of cells that ran there. Out: seconds, by a coarse account of the work
(FLOPs, bytes moved, kernels launched), scaled by what comparable cells really took. An estimate, and called one: the
account's constants are assumptions until a record of the device corrects them. Never imports torch.
"""

import bisect
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from vramprobe import catalog
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec

_WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """Rates of a device in a training step of Hugging Face models; assumptions, on the slow side."""

    flops: float  # 16-bit matrix work
    fp32_slowdown: float
    bytes_moved: float
    layer_seconds: float  # launching the kernels of one layer, forward or backward
    load_bytes: float  # weights made per second
    quantised_params: float  # parameters quantised per second
    fixed_seconds: float  # process, context, first kernels, record
    load_layer_seconds: float = 0.0  # making one layer, however large


#: Two cores; fits the 33 cells of results/cpu/quickstart within a factor of two before any scaling.
_CPU = _Machine(
    flops=1.5e11,
    fp32_slowdown=1.0,
    bytes_moved=1e10,
    layer_seconds=3e-3,
    load_bytes=2e9,
    quantised_params=7e7,
    fixed_seconds=0.3,
)
#: An emulated card, on two idle cores: kernels are launched and compute nothing, so layers cost, and tokens do not. An
#: 8B QLoRA step with checkpointing takes 1 to 2 s, its load 2 to 5 s.
_EMULATED = _Machine(
    flops=math.inf,
    fp32_slowdown=1.0,
    bytes_moved=math.inf,
    layer_seconds=8e-3,
    load_bytes=math.inf,
    quantised_params=math.inf,
    fixed_seconds=2.0,
    load_layer_seconds=0.1,
)
#: A card that the catalog does not know: an L4's work and bandwidth.
_TFLOPS, _BANDWIDTH_GB_S = 121.0, 300.0
_FLOPS_SHARE, _BANDWIDTH_SHARE = 0.35, 0.6  # of a GPU's dense peak and of its bandwidth
#: torch.compile's own time; two layers took 28 and 60 s on one busy CPU core. An assumption for everything else.
_COMPILE_SECONDS = 60.0
#: How far a record's model may be from the cell's, in parameters, to say how long the cell takes.
_COMPARABLE_FACTOR = 4.0


class Pace:
    """Ratios of the seconds that cells took to those expected, by model size; they grow as a sweep runs."""

    def __init__(self) -> None:
        self._ratios: dict[int, list[float]] = {}  # taken / expected by parameters, ascending
        self._factors: dict[int, float] = {}  # asked for since the last cell; a sweep may have 10,000

    def learn(self, num_params: int, expected_seconds: float, taken_seconds: float) -> None:
        """Take note of one finished cell."""
        bisect.insort(self._ratios.setdefault(num_params, []), taken_seconds / expected_seconds)
        self._factors.clear()

    def correct(self, num_params: int, expected_seconds: float) -> float:
        """Seconds, by the median over cells of comparable models, else over all; as expected before the first."""
        if num_params not in self._factors:
            self._factors[num_params] = self._factor(num_params)
        return expected_seconds * self._factors[num_params]

    def _factor(self, num_params: int) -> float:
        size, reach = math.log(num_params), math.log(_COMPARABLE_FACTOR)
        near = [ratios for known, ratios in self._ratios.items() if abs(math.log(known) - size) <= reach]
        ratios = [ratio for several in near or self._ratios.values() for ratio in several]
        return statistics.median(ratios) if ratios else 1.0


def pace_of(records: Iterable[RunRecord], gpu: catalog.Gpu | None) -> Pace:
    """The pace of the machine that made these records, against :func:`account_seconds`; emulated ones by their own."""
    pace = Pace()
    for record in records:
        if record.outcome.kind == "ok" and record.timing is not None:
            size = record.spec.num_params
            expected = account_seconds(record.spec, size, gpu, is_emulated=record.instrument == "emulated")
            pace.learn(size, expected, record.timing.total_seconds)
    return pace


def account_seconds(spec: CellSpec, params: int, gpu: catalog.Gpu | None, *, is_emulated: bool = False) -> float:
    """Seconds by counting: making the weights, then per step the matrix work, the bytes moved and the launches.

    ``params`` is the number of its model's parameters; ``gpu`` is null where the catalog does not know the card. What
    ``is_emulated`` takes this machine's time, whichever card it is.
    """
    machine = _CPU if spec.device == "cpu" else _EMULATED if is_emulated else _machine(gpu)
    num_layers = catalog.depth_of(spec.architecture) or 1
    tokens = spec.num_tokens * spec.grad_accum
    passes = 4 + 2 * (spec.method == "full") + 2 * spec.gradient_checkpointing
    in_fp32 = spec.dtype == "fp32" and spec.autocast == "none"
    matrix = passes * params * tokens * (machine.fp32_slowdown if in_fp32 else 1.0) / machine.flops
    weight_bytes = params * _WEIGHT_BYTES[spec.dtype]
    moved = (6 if spec.method == "full" else 3) * weight_bytes * spec.grad_accum / machine.bytes_moved
    walks = (2 + spec.gradient_checkpointing) * spec.grad_accum * (2 if spec.method != "full" else 1)
    launches = walks * num_layers * machine.layer_seconds
    step = matrix + moved + launches
    quantising = params / machine.quantised_params if spec.quant != "none" else 0.0
    timing_steps = 0 if machine is _EMULATED else spec.timing_steps
    num_steps = spec.steps + timing_steps + (spec.device == "cuda")  # on cuda one more, under the history
    compiling = _COMPILE_SECONDS if spec.torch_compile else 0.0
    loading = weight_bytes / machine.load_bytes + num_layers * machine.load_layer_seconds
    return machine.fixed_seconds + loading + quantising + compiling + num_steps * step


def _machine(gpu: catalog.Gpu | None) -> _Machine:
    flops = ((gpu and gpu.bf16_dense_tflops) or _TFLOPS) * 1e12
    bandwidth = (gpu.bandwidth_gb_s if gpu else _BANDWIDTH_GB_S) * 1e9
    return _Machine(
        flops=_FLOPS_SHARE * flops,
        fp32_slowdown=8.0,
        bytes_moved=_BANDWIDTH_SHARE * bandwidth,
        layer_seconds=1e-3,
        load_bytes=2e10,
        quantised_params=5e9,
        fixed_seconds=2.0,
    )
