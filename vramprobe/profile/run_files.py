"""The raw files of a profiled run → a RawRun.

In: a run's folder. Out: its processes' lines and histories as frozen data (raw.py). A torn last line, missing files and
a damaged history are None or a warning. Anything else that is not as the hook writes it is a StoreError with file and
line.
"""

import io
import json
import pickle
from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from vramprobe.errors import StoreError
from vramprobe.profile import raw
from vramprobe.profile.doing import Doing, doing_of
from vramprobe.profile.engines import as_served
from vramprobe.records.store import bytes_of, whole_lines
from vramprobe.records.traffic import KINDS

#: A process's lines of which there are many: (its field in raw.RawRank, the class of one).
_MANY = {
    "phase": ("phases", raw.RawPhase),
    "host": ("host", raw.RawHost),
    "mapped": ("mapped", raw.RawMapped),
    "asleep": ("asleep", raw.RawAsleep),
    "oom": ("ooms", raw.RawOom),
}
_COLUMNS = ("actions", "addresses", "sizes", "times_us", "streams", "stacks_of")


def read_run(folder: Path) -> raw.RawRun:
    """Everything in ``folder``: processes by rank, then by when they started. Raises StoreError."""
    if not folder.is_dir():
        raise StoreError(f"there is no run at {folder}: name the folder that a profile was written to")
    if not any(path.suffix in (".json", ".jsonl") for path in folder.iterdir()):
        raise StoreError(f"{folder} holds no run: name the folder that `vramprobe profile --folder` wrote")
    warnings: list[str] = []
    ranks = [one for path in sorted(folder.glob("*.jsonl")) for one in _processes(path, warnings)]
    ranks = [one for one in ranks if not _only_asked(one)] or ranks
    order = sorted(ranks, key=lambda one: (one.process.rank is None, one.process.rank or 0, one.process.started_ns))
    return raw.RawRun(
        launcher=_launcher(folder / "run.json", warnings),
        ranks=tuple(order),
        warnings=tuple(warnings),
        replaced=_lines_of(folder / "replaced"),
        engine_logs=_engine_logs(_lines_of(folder / "engine")),
        doing=_without_a_gpu(folder),
        uncaught=_uncaught(folder / "uncaught"),
    )


def _without_a_gpu(folder: Path) -> tuple[Doing, ...]:
    paths = [path for path in sorted(folder.glob("*.doing")) if not path.with_suffix(".jsonl").exists()]
    return tuple(one for path in paths if (one := _doing(path)) is not None)


def _doing(path: Path) -> Doing | None:
    return doing_of(path.read_text(errors="replace")) if path.exists() else None


def _uncaught(path: Path) -> tuple[raw.RawUncaught, ...]:
    found = [_made(raw.RawUncaught, one, str(path)) for one in _lines_of(path)]
    return tuple(sorted(found, key=lambda one: one.time_ns))


def _only_asked(rank: raw.RawRank) -> bool:
    """A launcher, which asks for the cards and takes nothing of them; a process that compiles, ended or killed."""
    compiles = any("_inductor/compile_worker" in word for word in rank.process.argv)
    has_ended = rank.end is not None or compiles
    return has_ended and not any(one.allocated_peak_bytes for one in rank.phases) and not rank.ooms


def _engine_logs(said: Iterable[Mapping[str, Any]]) -> dict[int, raw.EngineLog]:
    found: dict[int, raw.EngineLog] = {}
    for one in said:
        pid = int(one.get("pid") or 0)
        lines = found[pid].lines if pid in found else ()
        found[pid] = raw.EngineLog(process=str(one.get("process", "")), lines=(*lines, str(one.get("text"))))
    return found


def _lines_of(path: Path) -> tuple[Mapping[str, Any], ...]:
    """Read the lines that all processes wrote into one file: replacements (empty/replacements.py), or an engine's log
    (hook/engine_log.py). A line that a killed process left torn is skipped.
    """
    found = []
    for line in bytes_of(path).splitlines() if path.exists() else ():
        with suppress(ValueError):
            found.append(json.loads(line))
    return tuple(found)


def _launcher(path: Path, warnings: list[str]) -> Mapping[str, Any] | None:
    if not path.exists():
        return None
    content = bytes_of(path)
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        warnings.append(f"{path.name} is torn or damaged; how the command ended is not known")
        return None
    return found


def _processes(path: Path, warnings: list[str]) -> list[raw.RawRank]:
    """One process as a rule; more where one pid ran several programs in turn (exec)."""
    lines, tail = whole_lines(path)
    if tail:
        warnings.append(f"{path.name} ends in a half-written line: its process was killed")
    found: list[dict[str, Any]] = []
    for number, line in lines:
        _take(found, line, f"{path}, line {number}")
    try:
        history = read_history(path.with_suffix(".history"))
    except StoreError as error:  # costs who asked for what, and not the counters
        history = None
        warnings.append(str(error))
    ranks = [_rank(one, None) for one in found[:-1]]
    return ranks + [replace(_rank(one, history), doing=_doing(path.with_suffix(".doing"))) for one in found[-1:]]


def _take(found: list[dict[str, Any]], line: bytes, where: str) -> None:
    """Add one line to the fields of the process that it belongs to: the last that presented itself."""
    try:
        content = json.loads(line)
        kind = content["line"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise StoreError(f"{where} is no line of a profiled process: {line[:60]!r}") from None
    if kind == "process":
        found.append({"process": _made(raw.RawProcess, content, where)})
        return
    if not found:
        raise StoreError(f"{where} stands before the line that says which process this is")
    into = found[-1]

    def add(name: str, value: Any) -> None:
        into[name] = (*into.get(name, ()), value)

    match kind:
        case "phase" | "host" | "mapped" | "asleep" | "oom":
            name, made = _MANY[kind]
            add(name, _made(made, content, where))
        case "moved":
            add("moved", _moved(content, where))
        case "warning":
            add("warnings", str(content.get("message")))
        case "batch":
            add("plays", content)
        case "step":
            into["num_steps"] = max(into.get("num_steps", 0), int(content.get("step") or 0))
        case "kept":
            into["kept"] = tuple(content.get("lists") or ())
        case "count":
            sizes = into.get("parallel", {})
            into["count"] = content | {"num_sharing": sizes.get("tensor", 1) * sizes.get("pipeline", 1)}
        case "values" | "verification" | "evaluation" | "batches" | "probe":
            into[kind] = content
        case "parallel":
            into["parallel"] = {str(name): int(size) for name, size in content.get("sizes", {}).items()}
        case "settings":
            said = {str(name): str(value) for name, value in content.get("settings", {}).items()}
            into["settings"] = into.get("settings", {}) | said
        case "trainer" | "end":
            into[kind] = _made(raw.RawTrainer if kind == "trainer" else raw.RawEnd, content, where)
        case _:
            pass  # of a newer hook


def _rank(found: Mapping[str, Any], history: raw.RawHistory | None) -> raw.RawRank:
    """With the phases on the card that the process says it uses, or on the one with the highest peak."""
    rank = raw.RawRank(**found, history=history)
    phases = rank.phases
    cards = {one.device for one in phases}
    if len(cards) > 1:
        highest = max(phases, key=lambda one: one.allocated_peak_bytes).device
        own = rank.process.device_index
        chosen = history.device if history else own if own in cards else highest
        phases = tuple(one for one in phases if one.device == chosen)
    num_steps = rank.num_steps if rank.batches is None else rank.batches["steps"]
    return replace(rank, phases=tuple(as_served(phases)), num_steps=num_steps)


def _moved(content: Mapping[str, Any], where: str) -> raw.RawMoved:
    made = _made(raw.RawMoved, content, where)
    for one in made.counts:
        numbers = one if isinstance(one, tuple) and all(isinstance(number, int) for number in one) else ()
        if len(numbers) != 4 or not 0 <= numbers[0] < len(KINDS):
            raise StoreError(f"{where} counts {one!r}: a kind below {len(KINDS)}, ranks, calls and bytes are expected")
    return made


def _made(kind: Any, content: Mapping[str, Any], where: str) -> Any:
    """``kind`` from the fields that it knows. Raises StoreError for one that is missing."""
    known = {one.name for one in fields(kind)}
    values = {name: _frozen(value) for name, value in content.items() if name in known and value is not None}
    try:
        return kind(**values)
    except TypeError as error:
        raise StoreError(f"{where} is not whole: {str(error).split('__init__() ')[-1]}") from None


def _frozen(value: Any) -> Any:
    return tuple(_frozen(one) for one in value) if isinstance(value, list) else value


class _Arrays(pickle.Unpickler):
    """Builtins and array.array, nothing else: a file of another program's could name any function to call."""

    _KNOWN = frozenset({("array", "array"), ("array", "_array_reconstructor")})

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, and a history holds numbers and text alone")
        return super().find_class(module, name)


def read_history(path: Path) -> raw.RawHistory | None:
    """A process's history; None where there is none. Raises StoreError for a damaged one and for a pickle of more."""
    if not path.exists():
        return None
    try:
        content = _Arrays(io.BytesIO(bytes_of(path))).load()
    except Exception as error:  # a damaged pickle raises nearly anything
        raise StoreError(f"{path} is not read: {error}") from None
    if not isinstance(content, dict):
        raise StoreError(f"{path} is no history: it holds a {type(content).__name__}")
    columns = [content.get(name) for name in _COLUMNS]
    if any(not isinstance(one, array) for one in columns) or len(set(map(len, columns))) > 1:
        raise StoreError(f"{path} is no whole history: its columns are missing or of several lengths")
    held = tuple(_made(raw.RawHeld, one, f"{path}, held") for one in content.pop("held", None) or ())
    return replace(_made(raw.RawHistory, content, str(path)), held=held)
