"""How long a simulation takes and what it needs: ``python benchmarks/speed/simulate_speed.py`` (Markdown; minutes).

Each cell runs in a fresh process, twice: seconds of wall time and, as others may use the machine, of this process's
CPU. ``torch.distributed._tools.mem_tracker.MemTracker``, torch's own, follows the same workload on the same fake
tensors where it can; it counts tensors, knows no allocator, and every layer must run. ``--only WORD`` picks cells.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

GIB = 2**30
#: Of CPU for the first call, once all is imported; it is one thread, so this is wall time on an idle machine.
LIMIT_SECONDS = {"llama-3.1-70b qlora": 3.0, "llama-3.1-405b qlora": 5.0}
LIMIT_RSS_BYTES = 2 * GIB
CELLS: dict[str, dict[str, Any]] = {
    f"{model} {method}": {"model": model, "method": method}
    for model, method in (
        ("llama-3.1-8b", "full"),
        ("llama-3.1-8b", "lora"),
        ("llama-3.1-70b", "lora"),
        ("llama-3.1-70b", "qlora"),
        ("llama-3.1-405b", "qlora"),
    )
}


def the_spec(name: str) -> Any:
    from vramprobe.spec import resolve

    return resolve(**CELLS[name], device="cpu", batch_size=1, seq_len=2048, gradient_checkpointing=True)


def load(name: str) -> tuple[Any, float]:
    """The cell and the seconds that all imports take."""
    began = time.perf_counter()
    import vramprobe.simulate.run  # noqa: F401
    from vramprobe.measure.worker import load_libraries

    spec = the_spec(name)
    load_libraries(spec)
    if spec.method != "full":
        import peft.tuners.lora.bnb  # noqa: F401
    return spec, time.perf_counter() - began


def ours(name: str) -> dict[str, Any]:
    """Two calls in this process."""
    spec, import_seconds = load(name)
    from vramprobe.allocator.config import AllocatorConfig
    from vramprobe.log.reserved import reserve
    from vramprobe.simulate.run import simulate

    row: dict[str, Any] = {"import_seconds": import_seconds}
    for call in ("first", "second"):
        began, cpu_began = time.perf_counter(), time.process_time()
        simulation = simulate(spec)
        simulated = time.perf_counter()
        assert simulation.log is not None
        replayed = reserve(simulation.record.phases, simulation.log, AllocatorConfig())
        ended, cpu_ended = time.perf_counter(), time.process_time()
        row |= {
            f"{call}_simulate_seconds": simulated - began,
            f"{call}_replay_seconds": ended - simulated,
            f"{call}_cpu_seconds": cpu_ended - cpu_began,
        }
    training = [phase for phase in replayed.phases if phase.step is not None]
    return row | {
        "num_events": len(simulation.log),
        "tensors_bytes": simulation.record.peak.allocated_bytes,
        "reserved_bytes": max(phase.reserved_peak_bytes for phase in training),
    }


def mem_tracker(name: str) -> dict[str, Any]:
    """Two steps of the same workload, at full depth, under torch's tracker in our recorder's place."""
    spec, import_seconds = load(name)
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.utils._python_dispatch import TorchDispatchMode

    from vramprobe.simulate import run
    from vramprobe.workload.training import NOBODY, set_up, train_step

    class Values(TorchDispatchMode):
        """Answers a program that asks for a fake tensor's value, as our recorder does: nothing is padded."""

        autocast = False

        def hide(self, tensor: Any) -> Any:
            return tensor

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                return True if args[0].dtype == torch.bool else 1.0
            return func(*args, **(kwargs or {}))

    began, cpu_began = time.perf_counter(), time.process_time()
    with patch.object(run, "Recorder", lambda *_: Values()), run.session(spec, None):
        work = set_up(spec, NOBODY)
        tracker = MemTracker()
        tracker.track_external(work.model, work.optimizer, *work.batch.values())
        with tracker:
            train_step(work, NOBODY, 1)
            tracker.reset_mod_stats()  # of the modules, not the peak; it takes no second call else
            train_step(work, NOBODY, 2)
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    total = next(value for key, value in snapshot.items() if str(key) == "Total")
    return {
        "import_seconds": import_seconds,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu_began,
        "tensors_bytes": total,
    }


def in_a_fresh_process(kind: str, name: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", kind, "--only", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"why": done.stderr.strip().splitlines()[-1][:120]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="without MemTracker")
    parser.add_argument("--child", choices=("ours", "mem_tracker"), help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.child:
        row = (ours if words.child == "ours" else mem_tracker)(words.only)
        row["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(row))
        return 0
    names = [name for name in CELLS if words.only in name]
    missed = []
    print(
        "| cell | imports s | first: simulate + replay s (CPU s) | again s | events | RSS GiB | tensors GiB | "
        "reserved GiB |\n|---|---|---|---|---|---|---|---|"
    )
    for name in names:
        row = in_a_fresh_process("ours", name)
        if "why" in row:
            missed.append(f"{name}: {row['why']}")
            continue
        again = row["second_simulate_seconds"] + row["second_replay_seconds"]
        print(
            f"| {name} | {row['import_seconds']:.1f} | {row['first_simulate_seconds']:.2f} + "
            f"{row['first_replay_seconds']:.2f} ({row['first_cpu_seconds']:.2f}) | {again:.2f} | "
            f"{row['num_events']:,} | {row['peak_rss_bytes'] / GIB:.2f} | {row['tensors_bytes'] / GIB:.3f} | "
            f"{row['reserved_bytes'] / GIB:.3f} |",
            flush=True,
        )
        if row["first_cpu_seconds"] > LIMIT_SECONDS.get(name, row["first_cpu_seconds"]):
            missed.append(f"{name}: {row['first_cpu_seconds']:.2f} s of CPU, wanted {LIMIT_SECONDS[name]} s")
        if row["peak_rss_bytes"] > LIMIT_RSS_BYTES:
            missed.append(f"{name}: {row['peak_rss_bytes'] / GIB:.2f} GiB of memory")
    print("\n| MemTracker | imports s | two steps s (CPU s) | RSS GiB | tensors GiB |\n|---|---|---|---|---|")
    for name in names if words.peer else []:
        row = in_a_fresh_process("mem_tracker", name)
        print(
            f"| {name} | {row['why']} | | | |"
            if "why" in row
            else f"| {name} | {row['import_seconds']:.1f} | {row['seconds']:.1f} ({row['cpu_seconds']:.1f}) | "
            f"{row['peak_rss_bytes'] / GIB:.2f} | {row['tensors_bytes'] / GIB:.3f} |",
            flush=True,
        )
    print("\n".join(missed), file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
