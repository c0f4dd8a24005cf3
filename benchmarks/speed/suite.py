"""How long ``make test`` takes, and the files and tests that take most of it: ``python benchmarks/speed/suite.py``.

In: pytest's own options; none are those of ``make test``. Out, printed: tests, seconds on the clock and of CPU (of all
processes, also of those whose parent ended first, as Chromium's), the slowest files and tests by the clock. It judges
nothing. Of one file: ``python benchmarks/speed/suite.py -n 0 FILE``.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NUM_SHOWN = 20
_PR_SET_CHILD_SUBREAPER = 36


def main(options: list[str]) -> int:
    """Run the tests and print the times; -> pytest's own exit status."""
    if sys.platform == "linux":  # whoever outlives its parent becomes this process's child, and is counted
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        words = ["pytest", "-n", "auto", "--dist", "worksteal", f"--junitxml={report}", *options]
        began = time.monotonic()
        status = subprocess.run([sys.executable, "-m", *words], cwd=ROOT).returncode
        seconds = time.monotonic() - began
        bury()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_seconds = used.ru_utime + used.ru_stime
        cases = list(ElementTree.parse(report).iter("testcase"))
    tests, files = Counter(), Counter()
    for case in cases:
        name, taken = case.get("classname", "").replace(".", "/"), float(case.get("time", 0))
        tests[f"{name}::{case.get('name')}"] += taken
        files[name] += taken
    print(f"{len(cases)} tests on {os.cpu_count()} cores: {seconds:.0f} s, {cpu_seconds:.0f} s of CPU")
    for counter in (files, tests):
        print()
        for name, taken in counter.most_common(_NUM_SHOWN):
            print(f"{taken:8.1f} s  {name}")
    return status


def bury() -> None:
    """Wait for the children that have ended: only then is their CPU time known."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:  # no child is left
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
