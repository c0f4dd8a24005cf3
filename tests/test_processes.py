"""Promise of conftest.py to every test: a failed one leaves no process, also where SIGINT and SIGHUP are ignored."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import command_line, is_alive

TESTS = Path(__file__).parent
#: The first test fails with two processes running; the second sees neither, and the signals of what it starts.
SUITE = """
import os, subprocess, sys, time
from pathlib import Path
import psutil
import pytest
from processes import is_alive

PIDS = Path(__file__).with_name("pids")

def test_that_fails():
    sleeping = [sys.executable, "-c", "import time; time.sleep(1000)"]
    started = [subprocess.Popen(sleeping, start_new_session=alone).pid for alone in (False, True)]
    PIDS.write_text(" ".join(map(str, started)))
    raise AssertionError("failed on purpose")

def test_that_follows():
    for pid in PIDS.read_text().split():
        assert not psutil.pid_exists(int(pid)) or not is_alive(psutil.Process(int(pid)))
    said = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
    ignored = int(next(line.split()[1] for line in said.splitlines() if line.startswith("SigIgn")), 16)
    assert not ignored & (1 << 0 | 1 << 1), hex(ignored)  # SIGHUP is 1, SIGINT 2
"""


def ignore() -> None:
    """As nohup and a shell's background job have it."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_failed_test_leaves_no_process_and_ignored_signals_do_not_reach_what_tests_start(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(SUITE)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "VRAMPROBE_"))}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", ".", "."]
    env["PYTHONPATH"] = os.pathsep.join([str(TESTS), env.get("PYTHONPATH", "")])
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, preexec_fn=ignore)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "failed on purpose" in done.stdout
    left = [psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split() if psutil.pid_exists(int(pid))]
    assert [command_line(process) for process in left if is_alive(process)] == []
