"""A station: a process that runs cells on its machine for a sweep whose journal is elsewhere.

``python -m vramprobe.measure.station`` reads a request a line, as JSON, and answers each with a line: what this
machine is, whether it has what cells need, or the record of a cell. Cells run one after the other, each in a process of
its own, forked from a server as a sweep on this machine does it. Keeps nothing; ends with the process that started it.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from vramprobe.emulate.enter import entrance
from vramprobe.errors import VramprobeError
from vramprobe.measure import environment
from vramprobe.measure.isolation import Ticket, require_packages, run_isolated, scratch_folder
from vramprobe.measure.launcher import Launchers, worker_environment
from vramprobe.measure.lifeline import die_with
from vramprobe.spec import CellSpec

_LOG_BYTES = 64 * 1024  # of a failed cell's log, its end
_DYING_SECONDS = 20.0


class StationLost(Exception):
    """The station went while it had a request."""


class Station:
    """A handle on a station's process. ``cards``: the emulated GPUs that its cells see, in the words of --emulate."""

    def __init__(self, model_types: Sequence[str] = (), cards: str | None = None) -> None:
        self._machine: Path | None = None
        python, variables = sys.executable, worker_environment()
        if cards is not None:
            way = entrance(cards)
            self._machine, python, variables = way.machine, str(way.python), way.environment
        self._process = subprocess.Popen(
            [python, "-m", "vramprobe.measure.station", str(os.getpid()), *sorted(set(model_types))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
            start_new_session=True,
            bufsize=0,
        )

    @property
    def pid(self) -> int:
        """Process id of the station."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Return True if it can take another request."""
        return self._process.poll() is None

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to one request (see :func:`answer_to`). Raises StationLost, or VramprobeError in its words."""
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            raise StationLost(f"the station ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "refused" in answer:
            raise VramprobeError(answer["refused"])
        return answer

    def close(self) -> None:
        """End the station at once, and the cell that it runs."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_DYING_SECONDS)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        if self._machine is not None:
            shutil.rmtree(self._machine, ignore_errors=True)


def answer_to(request: Mapping[str, Any], launchers: Launchers, scratch: Path) -> dict[str, Any]:
    """The answer to one request.

    - ``environments`` (specs): the environment that each of them would be measured in here
    - ``requires`` (specs): nothing; refused where a package or a device is missing
    - ``spec``, with ``attempt_id``, ``started_at``, ``timeout_seconds`` and ``left_seconds``, ``verify``, ``log``: its
      record, the seconds it took and was allowed, the end of the log of one that did not end well
    """
    match request:
        case {"environments": specs}:
            found = [environment.capture(_spec(one), "forkserver", with_torch=False) for one in specs]
            return {"environments": [one.model_dump_json() for one in found]}
        case {"requires": specs}:
            require_packages(_spec(one) for one in specs)
            return {}
    return _run(request, launchers, scratch)


def _run(request: Mapping[str, Any], launchers: Launchers, scratch: Path) -> dict[str, Any]:
    spec, arrived = _spec(request["spec"]), time.monotonic()
    started_at = datetime.fromisoformat(request["started_at"])
    ticket = Ticket(scratch, request["attempt_id"], started_at, verify=request["verify"])
    launcher, log = launchers.launcher_of(spec), scratch / f"{ticket.attempt_id}.log"
    launcher.start(request["left_seconds"])  # loading the libraries is no cell's time
    began = time.monotonic()
    limit_seconds = max(min(request["timeout_seconds"], request["left_seconds"] - (began - arrived)), 0.0)
    record = run_isolated(spec, launcher, ticket, log, limit_seconds)
    seconds = time.monotonic() - began
    said = b"" if record.outcome.kind == "ok" or not log.exists() else log.read_bytes()[-_LOG_BYTES:]
    ticket.tear()
    log.unlink(missing_ok=True)
    return {
        "record": record.to_json_line().replace(json.dumps(str(log))[1:-1], json.dumps(request["log"])[1:-1]),
        "seconds": seconds,
        "limit_seconds": limit_seconds,
        "log": said.decode(errors="replace"),
    }


def _spec(text: str) -> CellSpec:
    return CellSpec.model_validate_json(text)


def serve(parent: int, model_types: list[str]) -> None:
    """Answer requests until stdin closes."""
    die_with(parent)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not speak in the protocol
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    with scratch_folder() as scratch, Launchers(model_types, scratch / "forkserver.log") as launchers:
        while line := requests.readline():
            try:
                answer = answer_to(json.loads(line), launchers, scratch)
            except VramprobeError as error:
                answer = {"refused": str(error)}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2:])
