"""A file of any of the kinds that ``vramprobe explain`` reads → a Report.

In: an open binary file, and what the user says of the run. Out: the error that came first, its phase, cause and
changes. A log names a model only if the catalog has it: nothing is fetched for a name that a log holds.
"""

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import IO, Any, cast

from vramprobe.architecture import architecture
from vramprobe.catalog import find_model
from vramprobe.catalog.models import entry_of_config, shipped_model
from vramprobe.errors import VramprobeError
from vramprobe.explain import log as logs
from vramprobe.explain.advice import Advice
from vramprobe.explain.causes import EXPANDABLE, FRAGMENTED, Explanation, explain
from vramprobe.explain.failure import Report
from vramprobe.explain.messages import OomMessage
from vramprobe.explain.phases import UNKNOWN, Frame, Phase, host_copy, phase_of
from vramprobe.explain.requests import Factors, shape_in, tensors_of_size, vocabulary_sides
from vramprobe.explain.snapshot import State, load_plain, states_of
from vramprobe.units import format_bytes, plural

_HEAD_BYTES = 2**16
_HEAD = re.compile(r"embedding or head|\b(?:lm_head|embed_\w+|wte|word_embeddings|embed_out)\b")
_STEPS_ALIKE = 5  # after so many the optimizer has its state, and the allocator its segments
#: Whose memory counts first where several messages stand in one log: kills and closed connections follow a GPU's error.
_ORDER = ("device allocator", "engine", "kernel", "driver", "shared memory", "host")
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")


def report_of(
    file: IO[bytes],
    *,
    model: str | dict[str, Any] | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    num_gpus: int | None = None,
) -> Report:
    """Read ``file`` to its end and explain it; ``model`` is a name, or a config.json as a dict.

    Raises VramprobeError for what is none of the three kinds, or empty.
    """
    reader = io.BufferedReader(cast(Any, file), _HEAD_BYTES)  # a pipe cannot be rewound
    try:
        return _read(reader, {"batch_size": batch_size, "seq_len": seq_len, "num_gpus": num_gpus}, model)
    finally:
        reader.detach()  # it would close the file


def _read(file: io.BufferedReader, given: dict[str, int | None], model: str | dict[str, Any] | None) -> Report:
    head = file.peek(_HEAD_BYTES)
    if not head.strip():
        raise VramprobeError("the input is empty: nothing to explain")
    if head.startswith(_COMPRESSED):
        raise VramprobeError(
            "the input is compressed or an archive: unpack it first, for instance zcat run.log.gz | vramprobe explain -"
        )
    if head[0] == 0x80 and head[1] <= 5:
        states = states_of(load_plain(file))
        return _of_snapshot(states, *_factors(model, given, {}))
    log = logs.read(file)
    return _of_log(log, *_factors(model, given, log.settings))


def _factors(
    model: str | dict[str, Any] | None, given: dict[str, int | None], settings: dict[str, str]
) -> tuple[Factors | None, tuple[str, ...]]:
    """Merge the user's values with those of the log; return notes of unusable ones, and None without a known model."""
    shown = {key: int(text) for key, text in settings.items() if key in given}
    known = {key: shown.get(key) if value is None else value for key, value in given.items()}
    try:
        if isinstance(model, dict):
            entry = entry_of_config(model)
        else:
            entry = find_model(model) if model is not None else shipped_model(settings.get("model", ""))
    except VramprobeError as error:
        return None, (f"the request's tensor cannot be named: {_first_line(error)}",)
    if entry is None:
        return None, ()
    vocab_size, hidden_size = vocabulary_sides(entry.config)
    try:
        known_parts, notes = architecture(entry.config), ()
    except VramprobeError:
        known_parts = None
        notes = (f"of {entry.name} only logits, embedding and head can be named: its tensors are not known here",)
    return Factors(entry.name, known_parts, vocab_size, **known, hidden_size=hidden_size), notes


def _first_line(error: VramprobeError) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _of_log(log: logs.LogFacts, factors: Factors | None, notes: tuple[str, ...]) -> Report:
    if not log.failures:
        return _of_summaries(log) if log.summaries.tables else _of_readings(log)
    first = min(log.failures, key=_rank)
    failures = [one for one in log.failures if _rank(one) == _rank(first)]
    if "shared_memory" in log.settings and first.oom.owner in ("device allocator", "driver", "engine"):
        first = replace(first, oom=replace(first.oom, shares_host_memory=True))
    phase = _phase_of(first)
    shape, tensors = _tensors(first.oom, factors, phase, first.frames)
    explanation = explain(
        first.oom,
        phase,
        first.form,
        host_copy=host_copy(first.frames),
        is_logits=any(name.startswith("logits") for name in tensors),
        is_head=any(_HEAD.search(name) for name in (*shape, *tensors)),
        is_expandable="expandable" in log.settings,
    )
    engine = next((one for one in log.failures if one.oom.owner == "engine"), None)
    if engine is not None and engine is not first:  # which adds its own advice to PyTorch's message
        explanation = replace(explanation, changes=explain(engine.oom, phase, engine.form).changes)
    ranks = dict.fromkeys(one.rank for one in failures if one.rank is not None)
    return Report(
        kind="log",
        oom=first.oom,
        phase=phase,
        explanation=explanation,
        tensors=(*shape, *tensors),
        ranks=tuple(ranks),
        progress=log.progress,
        notes=(
            *_notes(first, failures),
            *_after_steps(phase, log.progress),
            *_weights(first.oom, factors),
            *(table.in_words() for table in log.summaries.tables.values()),
            *notes,
        ),
        used=log.readings.used,
    )


def _rank(failure: logs.Failure) -> tuple[int, bool, bool]:
    """Messages that tell the most come first; of equal ones the first in the log."""
    oom = failure.oom
    return _ORDER.index(oom.owner), not oom.has_figures, oom.allocated is None


def _phase_of(failure: logs.Failure) -> Phase:
    """The phase by the traceback; by the message where it knows better."""
    phase, told = phase_of(failure.frames), failure.form.phase
    is_told = told and (phase == UNKNOWN or failure.oom.owner in ("engine", "shared memory"))
    return replace(phase, name=told, detail="") if is_told else phase


def _tensors(
    oom: OomMessage, factors: Factors | None, phase: Phase, frames: Sequence[Frame]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tensor that the failing line makes, and those of the model, of the request's size."""
    if oom.requested is None or oom.owner != "device allocator":
        return (), ()
    made = shape_in(frames[-1].source, oom.requested, oom.requested_half_unit) if frames else ""
    shape = (f"the tensor that the failing line makes, {made}",) if made else ()
    if factors is None:
        return shape, ()
    return shape, tuple(tensors_of_size(oom.requested, oom.requested_half_unit, factors, phase))


def _notes(first: logs.Failure, failures: list[logs.Failure]) -> Iterator[str]:
    oom = first.oom
    if oom.has_figures and oom.is_cut:
        yield "the message is cut: some figures are missing"
    if not first.frames and not first.form.phase and oom.owner in ("device allocator", "driver"):
        yield "there is no traceback before the error: the phase is unknown"
    if first.is_mixed:
        yield "several processes' tracebacks are mixed here: the phase may be another rank's"
    if oom.allocated is not None and oom.total is not None and oom.allocated > oom.total:
        yield "more is allocated than the GPU has: the driver (Windows, WSL) put a part in the host's memory"
    phases = {phase_of(one.frames).name for one in failures if one.frames}
    if len(failures) > 1 and oom.owner in ("device allocator", "driver"):
        places = f", in {', '.join(sorted(phases))}" if len(phases) > 1 else ""
        yield f"{len(failures)} errors in this log{places}; this is the first"


def _after_steps(phase: Phase, progress: tuple[int, int] | None) -> Iterator[str]:
    """Yield a note on a step that failed after others like it."""
    if phase.name in ("forward", "backward") and progress is not None and progress[0] >= _STEPS_ALIKE:
        yield (
            f"{progress[0]:,} steps went well before this one: its batch is longer than theirs, or memory grows from "
            "step to step (vramprobe predict --lengths FILE names the longest batch)"
        )


def _weights(oom: OomMessage, factors: Factors | None) -> Iterator[str]:
    """Yield a note on a model whose weights in 16 bits are more than the GPU."""
    if factors is None or factors.architecture is None or oom.total is None or oom.owner != "device allocator":
        return
    num_bytes = 2 * factors.architecture.num_params
    if num_bytes > oom.total:
        yield (
            f"all parameters of {factors.model} take {format_bytes(num_bytes)} in bf16, more than one such GPU has "
            f"(about {format_bytes(num_bytes // 4)} in 4 bits); device_map, FSDP or ZeRO-3 spread them over "
            f"{plural(num_bytes // oom.total + 1, 'GPU')} or more"
        )


def _of_summaries(log: logs.LogFacts) -> Report:
    """A log that has no error, but memory_summary() tables: the GPU with the highest peak first."""
    tables = sorted(log.summaries.tables.values(), key=lambda one: -one.peak.get("Allocated memory", 0))
    first = tables[0]
    unused = first.peak.get("GPU reserved memory", 0) - first.peak.get("Allocated memory", 0)
    is_fragmented = unused >= FRAGMENTED * first.peak.get("GPU reserved memory", 1)
    changes = (Advice(EXPANDABLE["CUDA"], unused),) if is_fragmented else ()
    return Report(
        kind="memory_summary",
        oom=OomMessage(backend="CUDA", device=first.device),
        phase=UNKNOWN,
        explanation=Explanation("unknown", "the table records no failed request", changes),
        lines=first.lines(),
        notes=tuple(table.in_words() for table in tables),
        used=log.readings.used,
    )


def _of_readings(log: logs.LogFacts) -> Report:
    readings = log.readings
    if not readings.used:
        where = f"in {plural(log.num_lines, 'line')} ({format_bytes(log.num_bytes)})"
        if lines := log.unknown or log.mentions:
            numbers = ", ".join(f"{number:,}" for number in lines)
            speaks = f"line {numbers} speaks" if len(lines) == 1 else f"lines {numbers} speak"
            cut = "" if log.unknown else "; or was the end of the log, or stderr, cut off?"
            raise VramprobeError(
                f"no out-of-memory error that is known {where}: {speaks} of memory, in no known form{cut}"
            )
        raise VramprobeError(
            f"no out-of-memory error and no nvidia-smi table {where}: was the end of the log, or stderr, cut off?"
        )
    notes = []
    for gpu, used in sorted(readings.used.items()):
        total, processes = readings.total.get(gpu), readings.processes.get(gpu, {})
        of = f" of {format_bytes(total)}" if total else ""
        by = f", {len(processes)} processes at the last table" if processes else ""
        notes.append(f"GPU {gpu}: at most {format_bytes(used)}{of} in use{by}")
    notes.append("nvidia-smi shows reserved memory and CUDA contexts: it cannot tell live tensors from unused memory")
    return Report(
        kind="nvidia-smi", oom=None, phase=Phase("unknown"), explanation=None, notes=tuple(notes), used=readings.used
    )


def _of_snapshot(states: list[State], factors: Factors | None, more_notes: tuple[str, ...]) -> Report:
    state = states[0]
    phase = phase_of(state.frames)
    lines = state.lines
    notes = [f"{state.num_blocks:,} live blocks; the largest unused one has {format_bytes(state.largest_unused)}"]
    if state.releasable:
        notes.append(f"{format_bytes(state.releasable)} are in unused segments, which torch.cuda.empty_cache() returns")
    if (pieces := (state.oom.unused or 0) - state.releasable) and state.oom.requested is None:
        notes.append(f"{format_bytes(pieces)} are unused pieces of segments in use: fragmentation")
    if state.awaiting:
        notes.append(f"{format_bytes(state.awaiting)} are freed but still in use by another stream")
    if state.peak is not None and state.oom.requested is None:
        peak, lines = state.peak, state.peak.lines
        notes.insert(
            0,
            f"the lines are those of the history's highest moment, {format_bytes(peak.requested)} requested after "
            f"{peak.position:,} of {peak.num_entries:,} entries",
        )
    if state.is_history_unknown:
        notes.append("its recorded history is of an unknown format: this is the end of it alone")
    if len(states) > 1:
        notes.append(f"the snapshot has {len(states)} GPUs; this is GPU {state.oom.device}")
    return Report(
        kind="snapshot",
        oom=state.oom,
        phase=phase,
        explanation=explain(state.oom, phase, is_expandable=state.is_expandable),
        tensors=_tensors(state.oom, factors, phase, state.frames)[1],
        lines=lines,
        notes=(*notes, *more_notes),
    )
