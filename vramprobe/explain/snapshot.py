"""A memory snapshot of ``torch.cuda.memory._dump_snapshot`` → what was full on each GPU, and by which lines.

In: the snapshot's dict, of PyTorch 1.13 to 2.13. Out: one State for each GPU with segments. Format:
torch/cuda/_memory_viz.py and torch/csrc/cuda/Module.cpp.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from vramprobe.errors import VramprobeError
from vramprobe.explain.messages import OomMessage
from vramprobe.explain.phases import Frame, shown

if TYPE_CHECKING:
    from vramprobe.explain.trace_peak import TracePeak

_MAX_LINES = 5


class _PlainUnpickler(pickle.Unpickler):
    """Makes dicts, lists, tuples, texts and numbers, all that a snapshot holds; imports and calls nothing."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise VramprobeError("refused: this pickle would run code when it is loaded; a memory snapshot holds none")


def load_plain(file: IO[bytes]) -> Any:
    """The plain values of a pickle from anywhere, read without running code. Raises VramprobeError for all others."""
    try:
        return _PlainUnpickler(file).load()
    except VramprobeError:
        raise
    except Exception as error:  # damaged bytes raise almost anything
        raise VramprobeError(f"the snapshot's pickle is cut or damaged: {type(error).__name__}") from error


@dataclass(frozen=True, kw_only=True)
class State:
    """One GPU at the snapshot, bytes."""

    oom: OomMessage
    frames: tuple[Frame, ...]  # of the failed request, outermost first
    releasable: int  # unused segments, which empty_cache() returns
    largest_unused: int  # the largest free block: a larger request needs a new segment
    awaiting: int  # freed, but still in use by another stream
    is_expandable: bool
    lines: tuple[tuple[str, int], ...]  # what holds the most, by the line that allocated it
    num_blocks: int
    peak: TracePeak | None  # of the recorded history, where the snapshot has one
    is_history_unknown: bool  # it has one, in a format that is not known


def states_of(snapshot: Any) -> list[State]:
    """One for each GPU, those with a failed request first. Raises VramprobeError for what is no snapshot."""
    if isinstance(snapshot, list):  # torch.cuda.memory_snapshot(): the segments alone
        snapshot = {"segments": snapshot}
    if not isinstance(snapshot, Mapping) or not isinstance(snapshot.get("segments"), list):
        raise VramprobeError("this pickle is no memory snapshot of PyTorch: it has no segments")
    traces = snapshot.get("device_traces") or []
    try:
        devices = {segment.get("device", 0) for segment in snapshot["segments"]}
        devices |= {device for device, trace in enumerate(traces) if trace}
        states = [
            _state(snapshot, device, traces[device] if device < len(traces) else []) for device in sorted(devices)
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        told = f": {error}" if isinstance(error, KeyError) else ""  # other errors may hold text of the file
        raise VramprobeError(f"this snapshot is of an unknown format: {type(error).__name__}{told}") from error
    if not states:
        raise VramprobeError("this snapshot is empty: it has no segment of any GPU")
    return sorted(states, key=lambda state: state.oom.requested is None)


def _state(snapshot: Mapping[str, Any], device: int, trace: Sequence[Mapping[str, Any]]) -> State:
    from vramprobe.explain.trace_peak import trace_peak  # NumPy, which a log is explained without

    allocated = awaiting = releasable = largest = pools = reserved = num_blocks = 0
    lines: Counter[str] = Counter()
    live: list[dict[str, Any]] = []
    segments = [segment for segment in snapshot["segments"] if segment.get("device", 0) == device]
    for segment in segments:
        reserved += segment["total_size"]
        in_use, address = 0, segment.get("address", 0)
        for block in segment["blocks"]:
            size, state = block["size"], block["state"]
            found = {"addr": block.get("address", address), "requested_size": block.get("requested_size", size)}
            address += size
            if state == "inactive":
                largest = max(largest, size)
                continue
            in_use += size
            num_blocks += 1
            if state != "active_allocated":
                awaiting += size
                continue
            allocated += size
            lines[_line_of(block)] += size
            live.append({**block, **found})
        releasable += segment["total_size"] if in_use == 0 else 0
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            pools += in_use
    failed = next((entry for entry in reversed(trace) if entry["action"] == "oom"), None)
    oom = OomMessage(
        backend="CUDA",
        device=device,
        requested=failed["size"] if failed else None,
        free=failed.get("device_free") if failed else None,
        allocated=allocated,
        private_pools=pools or None,
        unused=reserved - allocated,
    )
    try:
        peak = trace_peak(trace, live, _line_of, _MAX_LINES)
    except (KeyError, TypeError, ValueError):  # of another PyTorch; the segments were read
        peak = None
    return State(
        oom=oom,
        frames=tuple(reversed(_frames(failed))) if failed else (),
        releasable=releasable,
        largest_unused=largest,
        awaiting=awaiting,
        is_expandable=any(segment.get("is_expandable") for segment in segments),
        lines=tuple(lines.most_common(_MAX_LINES)),
        num_blocks=num_blocks,
        peak=peak,
        is_history_unknown=peak is None and bool(trace),
    )


def _frames(holder: Mapping[str, Any]) -> list[Frame]:
    """Python frames, innermost first; PyTorch 1.13 and 2.0 keep those of a block in its history."""
    found = holder.get("frames")
    if found is None and holder.get("history"):
        found = holder["history"][0].get("frames")
    return [Frame(str(one["filename"]), int(one["line"]), str(one["name"])) for one in found or () if _is_python(one)]


def _is_python(frame: Mapping[str, Any]) -> bool:
    return str(frame["filename"]).endswith(".py")


def _line_of(block: Mapping[str, Any]) -> str:
    """The innermost line outside torch itself."""
    frames = _frames(block)
    own = next((frame for frame in frames if "/torch/" not in frame.path.replace("\\", "/")), None)
    if frames:
        return shown(own or frames[0])
    is_backward = any("autograd::Engine" in str(one["name"]) for one in block.get("frames") or ())
    return "autograd's thread, in backward" if is_backward else "no Python line was recorded"
