"""Figures: cells → numbers with the commands that print them, and arithmetic on those numbers, written out.

In: a cell's options. Out: a Source (a number, and the command that prints it) or a Figure (what an expression over
such numbers gives, with its interval). A figure's value is what its own arithmetic says: the text is evaluated, so what
is printed is what was computed. Loads no torch.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vramprobe import catalog
from vramprobe.architecture import Architecture, architecture
from vramprobe.choices import Sharding
from vramprobe.predict.predict import predict
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.uncertainty import ARITHMETIC_SPREAD
from vramprobe.predict.verdict import CONTEXT_ALLOWANCE_BYTES
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec, resolve
from vramprobe.terms import moments
from vramprobe.terms.cell import parameters

Options = Mapping[str, Any]
STATES = ("weights", "gradients", "optimizer_state")
#: What is no activation: the states, the copies that autocast makes of them, and an optimizer's working space.
NO_ACTIVATIONS = (*STATES, "cast_copies", "optimizer_temporaries")
#: Fields of a cell that do not decide the memory of its steps, or only its name.
_NO_MATTER = {"model", "steps", "timing_steps", "seed", "weights", "trust_remote_code"}
_NAMES = {"__builtins__": {}, "ceil": math.ceil, "log2": math.log2, "max": max}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A number, and the command that prints it at ``reads``, a dotted path in its JSON; alone where that is null."""

    command: str
    reads: str | None
    value: int

    def __str__(self) -> str:
        """As it stands in an arithmetic expression: a Python number with its thousands marked."""
        return f"{self.value:_}"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What ``arithmetic`` gives, in ``unit``; the truth should lie from ``low`` to ``high``."""

    value: float
    low: float
    high: float
    unit: str
    engine: str  # formula | arithmetic | cuda on <device> | emulated <device>
    arithmetic: str
    sources: tuple[Source, ...] = ()


def figure(
    unit: str,
    arithmetic: str,
    sources: Sequence[Source] = (),
    *,
    engine: str = "arithmetic",
    low: float | None = None,
    high: float | None = None,
) -> Figure:
    """The Figure of an expression; without ``low`` and ``high`` it is exact."""
    value = evaluate(arithmetic)
    low, high = value if low is None else low, value if high is None else high
    return Figure(
        value=value, low=low, high=high, unit=unit, engine=engine, arithmetic=arithmetic, sources=tuple(sources)
    )


def evaluate(arithmetic: str) -> float:
    """The value of one of our own expressions: numbers, + - * / **, ceil, log2, max."""
    return float(eval(arithmetic, dict(_NAMES)))


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak of one cell in bytes: what tensors take, up to ``high``, which is what nvidia-smi may show for it."""

    source: Source
    low: int
    high: int
    engine: str


class Cells:
    """Cells asked for their numbers, each worked out once; ``records`` that are comparable go before predictions.

    What was measured goes before what was emulated, and each figure says which it is.
    """

    def __init__(self, records: Iterable[RunRecord] = ()) -> None:
        usable = [record for record in records if record.outcome.kind == "ok" and record.peak is not None]
        self._seen = {
            _identity(record.spec): record
            for instrument in ("emulated", "cuda")
            for record in usable
            if record.instrument == instrument
        }
        self._predictions: dict[tuple[tuple[str, Any], ...], Prediction] = {}
        self._specs: dict[tuple[tuple[str, Any], ...], CellSpec] = {}

    def spec(self, options: Options) -> CellSpec:
        """The cell on a GPU."""
        key = tuple(sorted(options.items()))
        if key not in self._specs:
            self._specs[key] = resolve(device="cuda", **options)
        return self._specs[key]

    def architecture(self, model: str) -> Architecture:
        """A catalog model's dimensions."""
        return architecture(catalog.find_model(model).config)

    def peak(self, options: Options) -> Peak:
        """The peak: measured or emulated where a record is comparable, else by arithmetic."""
        spec = self.spec(options)
        if (record := self._seen.get(_identity(spec))) is not None:
            found = record.peak
            assert found is not None
            machine = {} if record.emulation is None else {"emulate": record.emulation.card}
            command = command_of("measure", machine | dict(options))
            source = Source(command=command, reads="peak.allocated_bytes", value=found.allocated_bytes)
            high = found.device_bytes or found.allocated_bytes + CONTEXT_ALLOWANCE_BYTES
            device = record.environment.device_name
            engine = f"emulated {device}" if record.instrument == "emulated" else f"cuda on {device}"
            return Peak(source=source, low=found.allocated_bytes, high=high, engine=engine)
        return _peak_of(self._predicted(options), options, aside_bytes=CONTEXT_ALLOWANCE_BYTES)

    def rank(self, options: Options, num_gpus: int, sharding: Sharding) -> Peak:
        """The allocated peak of one rank of several, as predict counts it."""
        key = (*sorted(options.items()), ("sharding", sharding), ("num_gpus", num_gpus))
        if key not in self._predictions:
            ranks = {"num_gpus": num_gpus, "sharding": sharding}
            self._predictions[key] = predict(self.spec(options).model_copy(update=ranks))
        asked = {**options, "sharding": sharding, "num_gpus": num_gpus}
        return _peak_of(self._predictions[key], asked, aside_bytes=0)

    def term(self, options: Options, name: str) -> Source:
        """Bytes of one term at the peak; 0 where it is not alive then."""
        value = self._predicted(options).terms.get(name, 0)
        return Source(command=_predict_command(options), reads=f"terms.{name}", value=value)

    def beside_states(self, options: Options) -> Source:
        """The most bytes that a moment of the step holds beside the states: no one moment's number in predict."""
        value = max(
            sum(size for name, size in moment.terms.items() if name not in NO_ACTIVATIONS)
            for moment in moments(self.spec(options))
        )
        words = ", ".join(f"{name}={value!r}" for name, value in options.items())
        code = (
            f"from vramprobe import api, terms; print(max(sum(n for k, n in m.terms.items() "
            f"if k not in {NO_ACTIVATIONS}) for m in terms.moments(api.cell(device='cuda', {words}))))"
        )
        return Source(command=f'python -c "{code}"', reads=None, value=value)

    def lora_params(self, options: Options) -> int:
        """Trained parameters of the adapters."""
        spec = self.spec(options)
        made = parameters.tensors(spec, architecture(spec.architecture))
        return sum(tensor.numel * tensor.num_copies for tensor in made if tensor.trained)

    def _predicted(self, options: Options) -> Prediction:
        key = tuple(sorted(options.items()))
        if key not in self._predictions:
            self._predictions[key] = predict(self.spec(options))
        return self._predictions[key]


def _peak_of(predicted: Prediction, options: Options, *, aside_bytes: int) -> Peak:
    interval = predicted.peak_allocated_bytes
    source = Source(command=_predict_command(options), reads="peak_allocated_bytes.value", value=interval.value)
    # Weights, gradients and state are counted, not estimated: only the rest may be less than predicted.
    counted = sum(predicted.terms.get(name, 0) for name in STATES)
    low = counted + round(ARITHMETIC_SPREAD["cuda"][0] * (interval.value - counted))
    return Peak(source=source, low=low, high=interval.high + aside_bytes, engine="formula")


def _predict_command(options: Options) -> str:
    """What prints these numbers: a claim is about memory by arithmetic, so that no fit stands between."""
    return command_of("predict", {**options, "fit": "none"})


def command_of(verb: str, options: Options) -> str:
    """The command line that takes these options."""
    words = ["vramprobe", verb]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else [flag, str(value)]
    return shlex.join([*words, "--json"])


def _identity(spec: CellSpec) -> str:
    return spec.model_dump_json(exclude=_NO_MATTER)
