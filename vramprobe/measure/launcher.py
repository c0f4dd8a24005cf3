"""Start a cell's process: a child of a fork server that has proven itself, else a new interpreter.

In: a request for a worker (worker.py). Out: its exit status. Knows nothing of records. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from vramprobe.emulate.values.hook import unwatched
from vramprobe.measure import forkserver, nvml
from vramprobe.measure.forkserver import ForkServer, ServerEnded
from vramprobe.records.record import Isolation
from vramprobe.spec import CellSpec

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # newer torch reads the first, older the second
#: Not inherited: a record says what its spec says, and an allocator set from outside would not be in it.
SAID_BY_THE_SPEC = (*_ALLOCATOR_SETTINGS, "PYTORCH_NO_CUDA_MEMORY_CACHING")
_LOADING_SECONDS = (
    300.0  # of a fork server: 5 to 10 with the libraries in the page cache, a minute or two from a slow disk
)


class Launcher(Protocol):
    """Runs one request to its end: exit status (negative: signal), or None on time-out, the worker being gone then.

    ``isolation`` is how its next cell will be started, and ``isolation_reason`` why not otherwise.
    """

    isolation: Isolation
    isolation_reason: str | None

    def start(self, timeout_seconds: float = math.inf) -> None:
        """Load what cells need, if that is still to be done; it may stop when so long is over."""

    def expect(self, upcoming: CellSpec | None) -> None:
        """The cell after the next one, whose process may be prepared while the next one runs."""

    def run(self, request: dict[str, str], timeout_seconds: float | None) -> int | None: ...

    def close(self) -> None: ...


class Spawner:
    """A new interpreter for each cell; on a GPU the next one loads its libraries while this one's cell runs."""

    isolation: Isolation = "spawn"

    def __init__(self, env: dict[str, str], log: Path, reason: str | None = None) -> None:
        self.isolation_reason = reason
        self._env, self._log = env, log
        self._process: subprocess.Popen | None = None
        self._prepared: tuple[str | None, subprocess.Popen] | None = None  # with its allocator setting
        self._upcoming: CellSpec | None = None

    def start(self, timeout_seconds: float = math.inf) -> None:
        """Nothing is shared between interpreters."""

    def expect(self, upcoming: CellSpec | None) -> None:
        """Prepare for ``upcoming`` during the next run, unless that would take a core from the one that is timed."""
        self._upcoming = upcoming if upcoming is not None and may_prepare(upcoming) else None

    def run(self, request: dict[str, str], timeout_seconds: float | None) -> int | None:
        """Start, wait, and kill when the time is up."""
        spec = CellSpec.model_validate_json(request["spec"])
        self._process = self._take_prepared(spec.alloc_conf) or self._popen(spec.alloc_conf)
        with contextlib.suppress(BrokenPipeError):  # dead already: its exit status says more
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        if self._upcoming is not None:
            self._prepared = (self._upcoming.alloc_conf, self._popen(self._upcoming.alloc_conf))
            self._upcoming = None
        try:
            return self._process.wait(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self._process = _end(self._process)

    def close(self) -> None:
        """Kill the worker if it still runs, and the one in waiting."""
        self._process = self._process and _end(self._process)
        if self._prepared is not None:
            _end(self._prepared[1])
            self._prepared = None

    def _take_prepared(self, alloc_conf: str | None) -> subprocess.Popen | None:
        if self._prepared is None:
            return None
        (prepared_for, process), self._prepared = self._prepared, None
        if prepared_for != alloc_conf or process.poll() is not None:
            return _end(process)
        return process

    def _popen(self, alloc_conf: str | None) -> subprocess.Popen:
        with open(self._log, "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "vramprobe.measure.worker", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self._env | allocator_settings(alloc_conf),
                bufsize=0,
            )


def may_prepare(spec: CellSpec) -> bool:
    """Return True if the next worker may load its libraries during a cell: only on a GPU, with cores to spare."""
    return spec.device == "cuda" and (os.cpu_count() or 1) >= 4


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in a driver may outlive its kill
        process.wait(forkserver.DYING_SECONDS)


class Server:
    """Children of a fork server, as long as it proves that it may be forked from; else spawned interpreters."""

    def __init__(
        self, device: str, alloc_conf: str | None, env: dict[str, str], model_types: list[str], log: Path
    ) -> None:
        self._settings = (device, model_types, env | allocator_settings(alloc_conf), log)
        self._server: ForkServer | None = None
        self._instead: Spawner | None = None
        if not forkserver.is_available():
            self._instead = Spawner(env, log, "this system has no fork with pidfd")

    @property
    def isolation(self) -> Isolation:
        """The method that starts cells: ``forkserver`` until the proof fails."""
        return "forkserver" if self._instead is None else "spawn"

    @property
    def isolation_reason(self) -> str | None:
        """The reason why there is no fork server; None while there is one."""
        return self._instead and self._instead.isolation_reason

    def start(self, timeout_seconds: float = math.inf) -> None:
        """Start the server if there is none and have it prove itself; if it cannot, cells are spawned from now on."""
        if self._server is not None or self._instead is not None:
            return
        device, _, env, log = self._settings
        watched = nvml.open_first_visible() if device == "cuda" else None
        before_bytes = watched.used_bytes() if watched else None
        why = self._load(timeout_seconds)
        if why is None and before_bytes is not None and (after := watched.use_that_stayed(before_bytes)) is not None:
            why = f"the GPU holds {after - before_bytes} bytes more since it has started"
        if why is not None:
            self.close()
            self._instead = Spawner(env, log, f"no fork server: {why}")

    def _load(self, timeout_seconds: float) -> str | None:
        """Load the server; return the reason why it cannot be used, if any. One that a signal ended as it loaded is
        tried twice.
        """
        for last in (False, True):
            self._server = ForkServer(*self._settings)
            try:
                return self._server.unsafe(min(_LOADING_SECONDS, timeout_seconds))
            except ServerEnded as ended:
                self.close()
                if last or ended.status >= 0:
                    return f"it ended with {ended.status} as it loaded; its last words are in {self._settings[-1]}"

    def expect(self, upcoming: CellSpec | None) -> None:
        """A forked child is ready in milliseconds; a spawned one is prepared."""
        if self._instead is not None:
            self._instead.expect(upcoming)

    def run(self, request: dict[str, str], timeout_seconds: float | None) -> int | None:
        """One child. If the server dies, its cell died with it, in the same way; the next cell gets a new server."""
        self.start()
        if self._instead is not None:
            return self._instead.run(request, timeout_seconds)
        try:
            return self._server.run(request, timeout_seconds)
        except ServerEnded as ended:
            with open(request["log"], "a") as log:
                log.write(f"the fork server ended; its last words are in {self._settings[-1]}\n")
            self.close()
            return ended.status

    def close(self) -> None:
        """End the server and any child."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._instead is not None:
            self._instead.close()


class Launchers:
    """Launchers of cells: a fork server for each device and allocator setting, started with its first cell."""

    def __init__(self, model_types: list[str], log: Path) -> None:
        self._model_types, self._log = model_types, log
        self._open: dict[tuple[str, str | None], Server] = {}

    def __enter__(self) -> Launchers:
        return self

    def __exit__(self, *exc: object) -> None:
        for server in self._open.values():
            server.close()

    def launcher_of(self, spec: CellSpec) -> Launcher:
        """The launcher of cells like ``spec``."""
        key = (spec.device, spec.alloc_conf)
        if key not in self._open:
            server = Server(spec.device, spec.alloc_conf, worker_environment(), self._model_types, self._log)
            self._open[key] = server
        return self._open[key]


def worker_environment() -> dict[str, str]:
    """The variables a worker starts with; set before any library is imported."""
    quiet = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "PYTHONUNBUFFERED": "1"}
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    # This very package, wherever the sweep is started: -m would put the working folder, and what lies there, first.
    home = Path(__file__).parents[2]
    checkout = [] if home.name in ("site-packages", "dist-packages") else [str(home)]  # those are searched anyway, last
    inherited = unwatched({name: value for name, value in os.environ.items() if name not in SAID_BY_THE_SPEC})
    searched = filter(None, [*checkout, inherited["PYTHONPATH"]])
    ours = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(searched)}
    return quiet | inherited | order | ours


def allocator_settings(alloc_conf: str | None) -> dict[str, str]:
    """The allocator's setting as torch reads it, in the variables of newer and of older releases alike."""
    return dict.fromkeys(_ALLOCATOR_SETTINGS, alloc_conf) if alloc_conf else {}
