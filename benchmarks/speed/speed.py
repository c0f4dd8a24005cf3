"""How long a user waits for a command: ``python benchmarks/speed/speed.py`` prints what each takes.

Commands are run as processes: the median of wall seconds; the least of CPU seconds, which others on the machine change
less; the most memory. ``--instructions`` counts those instead where valgrind is: nobody else changes them at all, and
two commits can be compared on a busy machine (a minute a command, and without torch).
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
REPORT = f"report {ROOT}/results/cpu/sizes --fit {ROOT}/vramprobe/data/fits/cpu.json"
PREDICT = "predict --model llama-3.1-70b --method qlora --batch-size 1 --seq-len 4096 --gradient-checkpointing"
OF_8B = "predict --model llama-3.1-8b --method qlora --batch-size 1 --seq-len 2048"
OF_A_RANK = f"{PREDICT} --device cuda --num-gpus 8 --sharding"
RECOMMEND = "recommend --model llama-3.1-8b --seq-len 2048 --tokens 50M --deadline 12h"
LIGHT = (
    "--help",
    OF_8B,
    f"{OF_8B} --fit none",
    PREDICT,
    "predict --model llama-3.1-8b --method full --batch-size 1 --seq-len 2k --gpu RTX-4090 --exit-zero",  # too large
    f"{PREDICT} --grad-accum 64",
    f"{OF_A_RANK} fsdp",
    f"{OF_A_RANK} zero3",
    RECOMMEND,
    "models --json",
)
MIB = 2**20


class Cost(NamedTuple):
    """What one command takes."""

    wall_seconds: float
    cpu_seconds: float
    peak_rss_bytes: int

    def __str__(self) -> str:
        return f"{self.wall_seconds:8.3f} s {self.cpu_seconds:8.3f} s {self.peak_rss_bytes / MIB:8.0f} MiB"


def cost_of(command: str, *, times: int = 7) -> Cost:
    """One ``vramprobe`` command as a process: median wall seconds, least CPU seconds, most memory."""
    walls, cpus, peaks = [], [], []
    for _ in range(times):
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "vramprobe", *command.split()], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, command
        walls.append(time.perf_counter() - began)
        cpus.append(used.ru_utime + used.ru_stime)
        peaks.append(used.ru_maxrss * 1024)
    return Cost(statistics.median(walls), min(cpus), max(peaks))


def instructions_of(command: str) -> int:
    """What the processor executes for one command, by valgrind's count."""
    words = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    words += [sys.executable, "-m", "vramprobe", *command.split()]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONHASHSEED": "0"})
    counted = re.search(r"I +refs: +([0-9,]+)", done.stderr)
    assert counted, done.stderr
    return int(counted[1].replace(",", ""))


def main() -> None:
    if "--instructions" in sys.argv:
        for command in LIGHT:
            print(f"{instructions_of(command) / 1e9:8.3f} billion instructions  vramprobe {command}", flush=True)
        return
    print(f"{'wall':>10} {'CPU':>10} {'memory':>12}")
    for command in LIGHT:
        print(f"{cost_of(command)}  vramprobe {command}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        cost = cost_of(f"{REPORT} -o {folder}", times=3)
        num_files = len(list(Path(folder).iterdir()))
    print(f"{cost}  vramprobe {REPORT.replace(f'{ROOT}/', '')}  ({num_files} files, 93 records)")


if __name__ == "__main__":
    main()
