"""Inference engines: their own accounts of their memory, from the lines that they log, and the names of their phases.

In: logged lines (hook/engine_log.py keeps them), a row of PATTERNS per line and range of vLLM's releases; phases as the
hook named them. Out: an EngineMemory with what the lines name (what no line names is None; with several workers, the
one that takes most counts, and the smallest KV cache); the phases with an engine's names. Needs no torch, no engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vramprobe.records.engine import EngineMemory

if TYPE_CHECKING:
    from vramprobe.profile.raw import EngineLog

_STARTS = ("engine_load", "engine_profiling", "engine_kv_cache", "engine_warmup")
_OF_A_CYCLE = {"weight_sync", "sleep", "wake_up", "log_probs"}
_NUMBER = r"(?P<{}>-?[\d.,]*\d)"


def _line(text: str) -> re.Pattern[str]:
    """A pattern in which ``<name>`` stands for a number of that name."""
    return re.compile(re.sub(r"<(\w+)>", lambda found: _NUMBER.format(found[1]), text))


#: (releases that log the line, the line): vllm/worker/worker.py and vllm/executor/ (V0), vllm/v1/worker/gpu_worker.py,
#: gpu_model_runner.py and vllm/v1/core/kv_cache_utils.py (V1).
PATTERNS = (
    ("0.3 to 0.7", _line(r"Loading model weights took <weights_gib> GB")),
    ("0.7 on", _line(r"Model loading took <weights_gib> Gi?B")),
    ("0.6.3 to 0.6.5", _line(r"non_torch_memory=<non_torch_gib>GiB kv_cache_size=<kv_cache_gib>GiB")),
    ("V0, from 0.6.5 on", _line(r"model weights take <weights_gib>GiB; non_torch_memory takes <non_torch_gib>GiB; "
                                r"PyTorch activation peak memory takes <activation_peak_gib>GiB; the rest of the "
                                r"memory reserved for KV Cache is <kv_cache_gib>GiB")),
    ("V0, from 0.6.5 on", _line(r"total_gpu_memory \([\d.]+GiB\) x gpu_memory_utilization "
                                r"\(<utilization>\) = <requested_gib>GiB")),
    ("V0", _line(r"# (?:GPU|cuda|CUDA) blocks: <kv_cache_blocks>")),
    ("V1, from 0.10 on, DEBUG", _line(r"torch peak memory increase: <activation_peak_gib>GiB; non-torch forward "
                                      r"increase memory: <non_torch_gib>GiB; weights memory: <weights_gib>GiB")),
    ("V1, from 0.10 on, DEBUG", _line(r"Requested memory: <utilization> \(util\), <requested_gib> GiB")),
    ("V1, refuses to start", _line(r"max seq len \(<length_tokens>\), \(?<needed_gib> GiB KV cache is needed, which is "
                                   r"larger than the available KV cache memory \(<kv_cache_gib> GiB\)")),
    ("V1, refuses to start", _line(r"the estimated maximum model length is <longest_tokens>")),
    ("V1, from 0.9 on", _line(r"Available KV cache memory: <kv_cache_gib> GiB")),
    ("V1", _line(r"GPU KV cache size: <kv_cache_tokens> tokens")),
    ("0.32, DEBUG", _line(r"torch peak memory increase: <activation_peak_gib>GiB; total consumed "
                          r"\(from mem_get_info\): <consumed_gib>GiB; weights memory: <weights_gib>GiB")),
    ("0.32, DEBUG", _line(r"CUDA graph pool memory: <graph_gib> GiB \(actual\), <graph_estimated_gib> GiB")),
    ("0.6.2 on", _line(r"Maximum concurrency for <length_tokens> tokens per request: <max_concurrency>x")),
    ("0.4 on", _line(r"Graph capturing finished in \d+ secs?, took <graph_gib> Gi?B")),
    ("0.18 on", _line(r"Estimated CUDA graph memory: <graph_estimated_gib> GiB total")),
)  # fmt: skip


def memory_of(lines: Iterable[str]) -> EngineMemory | None:
    """Parse vLLM's account of its memory in ``lines``, GiB and tokens as it rounds them; None without one."""
    found: dict[str, float] = {}
    for line in lines:
        text = " ".join(line.split())
        for _, pattern in PATTERNS:
            for name, said in (match.groupdict() if (match := pattern.search(text)) else {}).items():
                value = float(said.replace(",", ""))
                worst = min if name.startswith(("kv_", "max_")) else max
                found[name] = worst(found.get(name, value), value)
    return EngineMemory(engine="vllm", **found) if found else None


def account_of(
    logs: Mapping[int, EngineLog], workers: Mapping[int, EngineMemory], versions: Mapping[str, str | None]
) -> EngineMemory | None:
    """The account of all processes together: the most that a worker takes, and the smallest cache."""
    said = memory_of(line for log in logs.values() for line in log.lines)
    if said is None:
        return None
    caches = [one.kv_cache_gib for one in (said, *workers.values()) if one.kv_cache_gib is not None]
    return said.model_copy(update={"version": versions.get(said.engine), "kv_cache_gib": min(caches, default=None)})


def workers_of(logs: Mapping[int, EngineLog]) -> dict[int, EngineMemory]:
    """The account of each of several workers, by process; empty with one worker.

    Only the first of them logs its cache: that of the others is what the rest of their account leaves.
    """
    found = {}
    for pid, log in logs.items():
        said = memory_of(log.lines)
        if said is None or said.weights_gib is None:
            continue
        number = re.search(r"VllmWorker-(\d+)$", log.process)
        own: dict[str, int | float] = {"worker": int(number[1])} if number else {}
        rest = (said.requested_gib, said.weights_gib, said.activation_peak_gib, said.non_torch_gib)
        if said.kv_cache_gib is None and None not in rest:
            requested, *others = (one for one in rest if one is not None)
            own["kv_cache_gib"] = round(requested - sum(others), 2)
        found[pid] = said.model_copy(update=own)
    return found if len(found) > 1 else {}


def as_served(phases: Sequence[Any]) -> list[Any]:
    """Rename the phases of a process with an engine: between two stages of its start to the first of them.

    Without training it is ``serving`` once it has started, but where a trainer elsewhere has it sleep, wake up and take
    new weights; with training, what it serves is ``generation``.
    """
    names = [one.name for one in phases]
    if "backward" in names:
        return [replace(one, name="generation") if one.name == "serving" else one for one in phases]
    cycles, serves = bool(_OF_A_CYCLE.intersection(names)), "serving" in names
    if "engine_load" not in names or (cycles and not serves):
        return list(phases)
    last = max(at for at, name in enumerate(names) if name in _STARTS)
    found, name, cycled = [], "", ""
    for at, one in enumerate(phases):
        if at <= last:
            name = one.name if one.name in _STARTS else name
        elif not cycles:
            name = "serving"
        elif one.name in _OF_A_CYCLE:
            name = cycled = one.name
        elif name != "serving" or cycled == "sleep":  # awake, it serves from the first request on
            name = "serving" if one.name == "serving" and cycled != "sleep" else "other"
        found.append(replace(one, name=name, step=None) if name else one)
    return found
