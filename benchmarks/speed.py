"""How long a user waits for a command: ``python benchmarks/speed.py``. Prints medians; nothing is asserted.

Commands are timed as processes. What a cell costs is in cell_overhead.py.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPORT = f"report {ROOT}/results/cpu/sizes --fit {ROOT}/vramprobe/data/fits/cpu.json"
PREDICT = "predict --model llama-3.1-70b --method qlora --batch-size 1 --seq-len 4096 --gradient-checkpointing"


def seconds_of(command: str, *, times: int = 7) -> float:
    """Median wall seconds of one ``vramprobe`` command as a process."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "vramprobe", *command.split()], capture_output=True, check=True)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def main() -> None:
    for command in ("--help", PREDICT, "models --json"):
        print(f"{seconds_of(command):8.3f} s  vramprobe {command}")
    with tempfile.TemporaryDirectory() as folder:
        seconds = seconds_of(f"{REPORT} -o {folder}", times=3)
        num_files = len(list(Path(folder).iterdir()))
    print(f"{seconds:8.3f} s  vramprobe {REPORT.replace(f'{ROOT}/', '')}  ({num_files} files, 93 records)")


if __name__ == "__main__":
    main()
