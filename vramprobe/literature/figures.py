"""Figures: a cell's options → the numbers that a claim's expression may name, each with the command that prints it.

In: options, and records where there are some, which go before predictions. Out: a ClaimFigure: a number with its
interval, its text and its Sources. Predictions are those that ship (tools/claim_predictions.py recorded them), or of a
recipe at hand. Records nothing, and loads no torch.
"""

import json
import lzma
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from vramprobe import catalog
from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.catalog.shipped import data_file
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.questions import cell, predict
from vramprobe.predict.verdict import CONTEXT_ALLOWANCE_BYTES, verdict
from vramprobe.recommend.step_cost import speed_at_hand
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec

Options = Mapping[str, Any]
#: Predictions of the cells that claims are read as, one line of JSON each.
KEPT = "claim_predictions.jsonl.xz"
_Key = tuple[tuple[str, Any], ...]
STATES = ("weights", "gradients", "optimizer_state")
#: What is no activation: the states, the copies that autocast makes of them, and an optimizer's working space.
NO_ACTIVATIONS = (*STATES, "cast_copies", "optimizer_temporaries")
#: Fields of a cell that do not decide the memory of its steps, or only its name.
_NO_MATTER = {"model", "steps", "timing_steps", "seed", "weights", "trust_remote_code"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A number, and the command that prints it at ``reads``, a dotted path in its JSON, for a cell of ``options``."""

    command: str
    reads: str
    value: int
    options: _Key


@dataclass(frozen=True)
class ClaimFigure:
    """Value of ``arithmetic``, in ``unit``; the truth should lie from ``low`` to ``high``.

    ``engine``: arithmetic, recipe, estimate, cuda on a device, emulated and the device; empty for a number
    that is only a part of a figure, counted or read in a data sheet.
    """

    value: Any
    low: Any
    high: Any
    arithmetic: str
    unit: str = ""
    engine: str = ""
    sources: tuple[Source, ...] = ()


def exact(value: Any, engine: str = "", sources: tuple[Source, ...] = ()) -> ClaimFigure:
    """Return the figure of a value that is known, in its usual text."""
    written = f"{value:_}" if type(value) is int else f"{value:g}" if isinstance(value, float) else str(value)
    return ClaimFigure(value, value, value, written, "", engine, sources)


class NoLaunches(UnsupportedArchitecture):
    """A step whose launches would have to be recorded for its speed."""


class Cells:
    """Cells asked for their numbers; ``records`` that are comparable go before predictions, measured ones first."""

    def __init__(self, records: Iterable[RunRecord] = ()) -> None:
        usable = [record for record in records if record.outcome.kind == "ok" and record.peak is not None]
        kinds = ("emulated", "cuda")
        self._seen = {_identity(one.spec): one for kind in kinds for one in usable if one.instrument == kind}

    def figure(self, name: str, options: Options, run: Options) -> ClaimFigure:
        """A number of the cell, on the card, the GPUs and under the sharding of ``run``. Raises KeyError for an unknown
        name.
        """
        key = tuple(options.items())
        match name:
            case "params" | "linear" | "num_layers":
                return exact(_counted(options["model"])[name])
            case "weights" | "gradients" | "optimizer_state" | "saved_activations":
                return _term(key, name)
            case "peak" | "need":  # what is needed is held against memory with the context set aside already
                peak = self.peak(options)
                return peak if name == "peak" else replace(peak, high=peak.high - CONTEXT_ALLOWANCE_BYTES)
            case "beside_states":
                return _beside_states(key)
            case "num_tokens":
                return exact(_spec(key).num_tokens)
            case "fits":
                found = kept_or_predicted(options, run["gpu"].short_name)
                return exact(verdict(found, run["gpu"]).verdict != "does not fit")
            case "seconds" | "throughput":
                ranks = {"num_gpus": run["num_gpus"], "sharding": run["sharding"] if run["num_gpus"] > 1 else None}
                step = speed_at_hand(_spec(key).model_copy(update=ranks), run["gpu"], near=True)
                if step is None:
                    raise NoLaunches(f"the launches of {_spec(key).cell_id} are not at hand")
                rate = step.tokens_per_second
                ends = [step.seconds] * 3 if name == "seconds" else [rate.value, rate.low, rate.high]
                return ClaimFigure(*ends, arithmetic=f"{ends[0]:.4g}", engine="estimate")
        raise KeyError(name)

    def peak(self, options: Options) -> ClaimFigure:
        """The peak: what tensors take, measured or emulated where a record is comparable, else predicted.

        It is up to ``high``, which is what nvidia-smi may show for it.
        """
        key = tuple(options.items())
        if (record := self._seen.get(_identity(_spec(key)))) is None:
            found = _allocated(key)
            return replace(found, high=found.high + CONTEXT_ALLOWANCE_BYTES)
        assert record.peak is not None
        value, device = record.peak.allocated_bytes, record.environment.device_name
        machine = {} if record.emulation is None else {"emulate": record.emulation.card}
        source = _source("measure", machine, key, "peak.allocated_bytes", value)
        high = record.peak.device_bytes or value + CONTEXT_ALLOWANCE_BYTES
        engine = f"emulated {device}" if record.instrument == "emulated" else f"cuda on {device}"
        return replace(exact(value, engine, (source,)), high=high)


def _identity(spec: CellSpec) -> str:
    return spec.model_dump_json(exclude=_NO_MATTER)


@cache
def _spec(key: _Key) -> CellSpec:
    return cell(device="cuda", **dict(key))


@cache
def _predicted(key: _Key) -> Prediction:
    return kept_or_predicted(dict(key))


def kept_or_predicted(options: Options, gpu: str | None = None) -> Prediction:
    """Return the prediction that ships, else one without a recording. Raises NotAtHand without either."""
    kept = _kept().get(name_of(options, gpu))
    return predict(gpu=gpu, records=False, **options) if kept is None else Prediction.model_validate(kept)


def name_of(options: Options, gpu: str | None) -> str:
    """Return the options and the GPU as one line, the same in any order."""
    return json.dumps(dict(options) | ({} if gpu is None else {"gpu": gpu}), sort_keys=True)


@cache
def _kept() -> dict[str, dict[str, Any]]:
    rows = map(json.loads, lzma.decompress(data_file(KEPT).read_bytes()).splitlines())
    return {name_of(row["options"], None): row["prediction"] for row in rows}


@cache
def _counted(model: str) -> dict[str, int]:
    found = catalog.find_model(model)
    arch = architecture(found.config)
    linear = sum(p.numel * arch.num_copies(p) for p in arch.parameters if p.role == "linear")
    return {"params": found.n_params or arch.num_params, "linear": linear, "num_layers": arch.num_layers}


def _allocated(key: _Key) -> ClaimFigure:
    """The predicted peak, of which weights, gradients and state are counted: only the rest may be less."""
    found = _predicted(key)
    interval, counted = found.peak_allocated_bytes, sum(found.terms.get(name, 0) for name in STATES)
    low = counted + round((interval.value - counted) * interval.low / interval.value)
    source = _source("predict", {}, key, "peak_allocated_bytes.value", interval.value)
    return replace(exact(interval.value, found.engine, (source,)), low=low, high=interval.high)


def _term(key: _Key, name: str) -> ClaimFigure:
    found = _predicted(key)
    value = found.terms.get(name, 0)  # 0 where it is not alive at the peak
    return exact(value, found.engine, (_source("predict", {}, key, f"terms.{name}", value),))


def _beside_states(key: _Key) -> ClaimFigure:
    """Bytes of the predicted peak beside NO_ACTIVATIONS."""
    found = _predicted(key)
    parts = [_allocated(key), *(_term(key, name) for name in NO_ACTIVATIONS if found.terms.get(name))]
    value, interval = parts[0].value - sum(part.value for part in parts[1:]), found.peak_allocated_bytes
    low, high = (value * end / interval.value for end in (interval.low, interval.high))
    written = f"({' - '.join(part.arithmetic for part in parts)})"
    sources = tuple(source for part in parts for source in part.sources)
    return ClaimFigure(value, low, high, written, "", found.engine, sources)


def _source(verb: str, machine: Options, key: _Key, reads: str, value: int) -> Source:
    """The command that prints a number."""
    words = ["vramprobe", verb]
    for name, given in {**machine, **dict(key)}.items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag if given else f"--no-{flag[2:]}"] if isinstance(given, bool) else [flag, str(given)]
    return Source(command=shlex.join([*words, "--json"]), reads=reads, value=value, options=key)
