"""The columns of the DataFrames that ``vramprobe.load`` returns: the dtype and the meaning of each.

In: nothing. Out: one mapping per DataFrame, column → dtype and meaning, in order. Units are the last word of a name;
what is not known is NA, never 0. docs/dataframes.md shows these lists, and a test holds both together.
"""

from __future__ import annotations

from typing import NamedTuple

from vramprobe.options import OPTIONS, CellOption
from vramprobe.records.profile_memory import Live
from vramprobe.records.record import Composition
from vramprobe.spec import CellSpec


class RecordColumn(NamedTuple):
    """``dtype`` is pandas' name: string, Int64, Float64, boolean, or datetime64[ms, UTC]."""

    dtype: str
    meaning: str


def _text(meaning: str) -> RecordColumn:
    return RecordColumn("string", meaning)


def _integer(meaning: str) -> RecordColumn:
    return RecordColumn("Int64", meaning)


def _number(meaning: str) -> RecordColumn:
    return RecordColumn("Float64", meaning)


def _flag(meaning: str) -> RecordColumn:
    return RecordColumn("boolean", meaning)


def _of_option(option: CellOption) -> RecordColumn:
    """The column of an option of a cell."""
    assert option.meaning is not None
    return RecordColumn({str: "string", int: "Int64", float: "Float64", bool: "boolean"}[option.kind], option.meaning)


_CELL_ID = _text("readable name of the configuration")
_FINGERPRINT = _text("hash of the resolved configuration: equal for equal configurations")
_INSTRUMENT = _text("cuda and cpu measure; emulated: CUDA software on a stub driver")
_MODEL_LABEL = _text("model name without folders or organization")
_METHOD = _text("full, lora or qlora")
_DEVICE_NAME = _text("name of the GPU or CPU; of an emulated GPU, the one emulated")
_OUTCOME = _text("ok, oom, oom_host, timeout, error, interrupted, skipped, invalid or contaminated")
_CONTEXT_BYTES = _integer("device minus reserved after a full step: CUDA context and library memory outside torch")
_NUM_ALLOC_RETRIES = _integer("times the caching allocator freed its cache to satisfy a request")
_PEAK = {
    "peak_phase": _text("phase of the allocated peak"),
    "peak_step": _integer("step of the allocated peak, from 1"),
    "peak_allocated_bytes": _integer("peak allocated by tensors; of a cell, over its training steps"),
    "peak_reserved_bytes": _integer("peak of the caching allocator's segments; NA on a CPU"),
    "peak_device_bytes": _integer("peak device use by NVML; of a cell, minus what was in use before; NA without NVML"),
    "load_allocated_bytes": _integer("peak allocated while loading and preparing"),
}
_LEDGER = {
    "weights_bytes": _integer("parameters, buffers and quantization state, each storage once"),
    "gradients_bytes": _integer("gradients at the end of backward"),
    "optimizer_state_bytes": _integer("optimizer state after the first step"),
    "batch_bytes": _integer("tokens and masks"),
    "saved_activations_bytes": _integer("allocated at the end of forward minus at its start"),
    "unaccounted_bytes": _integer("idle allocated memory that none of the parts above explains"),
}
_AT_PEAK_OF_A_COMMAND = {
    f"at_peak_{name}": _integer(
        f"live at the peak: {name.removesuffix('_bytes').replace('_', ' ')} (requested bytes on cuda); NA if untraced"
    )
    for name in Live.model_fields
}
_AT_PEAK = {name: _AT_PEAK_OF_A_COMMAND[name] for name in (f"at_peak_{part}" for part in Composition.model_fields)}

RECORDS = {
    "cell_id": _CELL_ID,
    "fingerprint": _FINGERPRINT,
    "attempt_id": _text("unique per record"),
    "started_at": RecordColumn("datetime64[ms, UTC]", "start of the attempt"),
    "instrument": _INSTRUMENT,
    **{name: _of_option(OPTIONS[name]) for name in CellSpec.model_fields if name in OPTIONS},
    "model_label": _MODEL_LABEL,
    "model_type": _text("model family, by transformers"),
    "num_tokens": _integer("batch_size × tokens per sequence, those of images included"),
    "num_params": _integer("parameters of the live base model; tied ones once, a 4-bit weight as its elements"),
    "num_trainable_params": _integer("trainable parameters of the live model"),
    "num_quantised_params": _integer("quantized parameters of the live model"),
    "quantised_weights_bytes": _integer("packed weights and their quantization state"),
    "residual_dtype": _text("dtype of the hidden states between layers, as observed"),
    "attention_kernels": _text("fused attention kernels that ran, as observed"),
    "outcome": _OUTCOME,
    "outcome_detail": _text("what failed, with amounts; empty where nothing did"),
    **_PEAK,
    **_LEDGER,
    **_AT_PEAK,
    "context_bytes": _CONTEXT_BYTES,
    "num_alloc_retries": _NUM_ALLOC_RETRIES,
    "step_seconds": _number("median of the timed steps; NA where none was timed"),
    "total_seconds": _number("wall time of the cell, without starting its process"),
    "device_name": _DEVICE_NAME,
    "device_total_bytes": _integer("memory of the GPU as torch reports it, or of the host"),
    "commit": _text("commit of vramprobe"),
    "dirty": _flag("whether that checkout had uncommitted changes"),
    "sweep": _text("name of the sweep; NA for a single measurement"),
    "held_out": _flag("whether the sweep holds this cell out of fits, to test predictions"),
}

_OF_RUN = {
    "attempt_id": _text('the record it is from: join with `of="records"` on it'),
    "cell_id": _text("readable name of the configuration; NA of a profiled command"),
    "command": _text("name of the profiled command; NA of a cell"),
    "instrument": _INSTRUMENT,
    "device_name": _DEVICE_NAME,
    "model_label": _text("model name without folders or organization; NA of a profiled command"),
    "method": _text("full, lora or qlora; NA of a profiled command"),
    "outcome": _OUTCOME,
    "rank": _integer("rank, from 0; under device-map, the card; NA where one row is for all ranks"),
}
RANKS = _OF_RUN | {
    **_PEAK,
    **_LEDGER,
    **_AT_PEAK_OF_A_COMMAND,
    "num_steps": _integer("steps seen in a profiled command; NA of a cell"),
    "fragmentation_bytes": _integer("reserved minus allocated in the phase with the reserved peak; NA of a cell"),
    "context_bytes": _CONTEXT_BYTES,
    "num_alloc_retries": _NUM_ALLOC_RETRIES,
    "host_peak_bytes": _integer("peak resident host memory of the rank's process"),
    "host_tensors_bytes": _integer("peak of model, gradients and optimizer state in host memory"),
    "host_pinned_bytes": _integer("pinned host memory taken by torch's allocator, in powers of two"),
    "link_bytes": _integer("bytes the rank sends per step over its link, by the ring's formula: predicted"),
}
PHASES = _OF_RUN | {
    "phase": _text("load, prepare, batch, forward, backward, optimizer_step or zero_grad; a command has others, too"),
    "step": _integer("step, from 1; NA outside the steps and of a command"),
    "micro_step": _integer("micro-batch, from 1, under gradient accumulation"),
    "num_phases": _integer("phases of this name that a command's row is the highest of; NA of a cell"),
    "allocated_end_bytes": _integer("allocated by tensors at the end of the phase"),
    "allocated_peak_bytes": _integer("peak allocated within the phase"),
    "reserved_end_bytes": _integer("reserved by the caching allocator at the end"),
    "reserved_peak_bytes": _integer("peak reserved within the phase"),
    "requested_end_bytes": _integer("requested by tensors at the end, before the allocator rounds up"),
    "requested_peak_bytes": _integer("peak requested within the phase"),
    "active_end_bytes": _integer("active blocks at the end: allocated, or waiting for another stream"),
    "active_peak_bytes": _integer("peak active within the phase"),
    "device_used_bytes": _integer("device use at the end; of a cell, minus what was in use before"),
    "rss_end_bytes": _integer("resident set of the process at the end"),
}
#: What ``load(of=…)`` returns → its columns; ``records`` has one ``version_PACKAGE`` (string) per library, too.
COLUMNS = {"records": RECORDS, "phases": PHASES, "ranks": RANKS}


def of_records(name: str) -> RecordColumn:
    """A column of ``records``, also ``version_PACKAGE``. Raises KeyError for a column without documentation."""
    if name.startswith("version_"):
        return _text(f"installed release of {name.removeprefix('version_')}")
    return RECORDS[name]
