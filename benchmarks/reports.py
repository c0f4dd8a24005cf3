"""Rebuild everything that is published from records: ``python benchmarks/reports.py`` (``make readme``).

The commands below, in the order in which they need each other. ``--check`` changes nothing, runs those that can check,
and fails naming each file that is missing or different.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = (
    "fit results/cpu/quickstart --out results/cpu/quickstart/fit.json",
    "fit results/cpu/sizes --out vramprobe/data/fits/cpu.json",
    "report results/cpu/quickstart -o results/cpu/quickstart/report --fit results/cpu/quickstart/fit.json",
    "claims --results results -o results/claims",
    "report results/cpu/sizes -o results/cpu/sizes/report --fit vramprobe/data/fits/cpu.json "
    "--claims results/claims/claims.csv",
    "evaluate results/cpu/sizes -o results/cpu/sizes/evaluation",
)


def main() -> None:
    is_check, failed = "--check" in sys.argv, False
    for command in COMMANDS:
        if is_check and command.startswith("fit "):
            continue  # its last digits may differ from machine to machine; a test compares the numbers
        words = [*shlex.split(command), *(["--check"] if is_check else [])]
        print(f"vramprobe {shlex.join(words)}", flush=True)
        done = subprocess.run([sys.executable, "-m", "vramprobe", *words], cwd=ROOT, stdout=subprocess.DEVNULL)
        if done.returncode and not is_check:
            sys.exit(done.returncode)
        failed = failed or bool(done.returncode)
    if failed:
        sys.exit("rebuild what is stale: make readme")


if __name__ == "__main__":
    main()
