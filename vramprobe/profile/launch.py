"""Start a command with the hook in its processes, wait for it, and leave nothing of it behind.

In: a command's words, cards to emulate or none, what is asked for. Out: a run's folder with ``run.json`` and the files
of its processes (hook/), and how it ended. The command keeps its terminal, its folder and its exit status.
"""

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import vramprobe
from vramprobe.emulate.values import hook as values_hook
from vramprobe.emulate.values import one_rank
from vramprobe.errors import SpecError, StoreError
from vramprobe.measure.environment import free_host_bytes
from vramprobe.profile import stand_ins
from vramprobe.profile.hook.journal import FOLDER_VARIABLE
from vramprobe.profile.interpreter import executable_of, interpreter_of
from vramprobe.profile.kept import Kept
from vramprobe.profile.monitors import seen_from_outside, warned_of_a_full_host
from vramprobe.profile.requests import Client, ServerRequests, is_alive, require_free_port
from vramprobe.profile.waiting import told_each_minute
from vramprobe.records.whole_file import replacing
from vramprobe.sweep.signals import handled_by

#: What site_folder (emulate/values/hook.py) puts into the command's processes, beside the values' own.
HOOK = ("vramprobe_profile", str(Path(__file__).with_name("hook")), "start")
_TAIL_LINES = 40
_DYING_SECONDS = 10.0
#: How long an interrupted command may write who asked for memory, once it has written all else.
_HISTORY_SECONDS = 5.0
_Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the hook. ``trace``: all events, those of one step, or none. ``verify``: steps under other values
    follow the requested ones. ``speed``: one step's work is counted, on an emulated card.
    """

    trace: str
    steps: int | None
    verify: bool = False
    phases: bool = False
    speed: bool = True
    one_rank: tuple[int, int] | None = None  # this one of so many, of which no other runs
    trace_step: int = 3
    stand_ins: Mapping[str, Any] | None = None  # for what is not there (stand_ins.py)
    requests: ServerRequests | None = None  # to the server that the command starts; it is ended once they are answered
    probe: bool = False  # after its steps, on its own first batch in other shapes, on a card without an end


@dataclass(frozen=True, kw_only=True)
class Ended:
    """End of the command. ``exit_status``: its own, as a shell would say it (128 + the signal)."""

    exit_status: int
    stopped: bool  # by us, when it knew enough
    num_left: int  # processes that it had left behind


def run(
    command: list[str],
    folder: Path,
    options: Options,
    *,
    emulate: str | None = None,
    policy: Mapping[str, Any] | None = None,
    say: _Say = lambda line: None,
) -> Ended:
    """Run ``command`` and leave in ``folder`` what its processes said.

    Raises SpecError for a command that is not there and for a server's port that is taken, what
    :func:`vramprobe.emulate.enter.entrance` raises for the cards, StoreError where the folder cannot be written.
    """
    if emulate is None:
        executable_of(command, os.environ)
    if options.requests is not None:
        require_free_port(options.requests)
    told = told_at_start(command, options, emulate)
    with (
        _environment(command, folder, options, emulate, policy, say) as (environment, emulator),
        seen_from_outside(emulated=emulator is not None) as cards,
        warned_of_a_full_host(say, free=free_host_bytes),
        told_each_minute(say, folder, [os.getcwd()], options.steps),
    ):
        told["emulator"] = emulator
        write_told(folder, told)
        environment |= {FOLDER_VARIABLE: str(folder)}
        ended, tail, answers = _wait(command, environment, folder, options.requests, say)
        shutil.rmtree(folder / "discarded", ignore_errors=True)  # hook/discard.py
    number = ended.exit_status - 128 if ended.exit_status > 128 else None
    told |= {"ended_ns": time.time_ns(), "exit_status": ended.exit_status, "signal": number, "tail": tail}
    told |= {"cards": [asdict(card) for card in cards], "answers": answers}
    try:
        write_told(folder, told | {"stopped": ended.stopped, "num_left": ended.num_left})
    except StoreError as error:  # what the processes wrote may still be read
        say(str(error))
    return ended


def told_at_start(command: Sequence[str], options: Options, emulate: str | None = None) -> dict[str, Any]:
    """Content of ``run.json`` as a command starts."""
    return {
        "command": list(command),
        "emulate": emulate,
        "started_ns": time.time_ns(),
        "options": asdict(options),
        "vramprobe": vramprobe.__version__,
        "folder": os.getcwd(),
        "emulator": None,
    }


def write_told(folder: Path, told: Mapping[str, Any]) -> None:
    """``run.json``, whole or not at all. Raises StoreError."""
    try:
        with replacing(folder / "run.json") as part:
            part.write_text(json.dumps(told), encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"the profile cannot be kept in {folder}: {error.strerror}; give a --folder elsewhere"
        ) from None


@contextmanager
def _environment(
    command: list[str], folder: Path, options: Options, emulate: str | None, policy: Mapping[str, Any] | None, say: _Say
) -> Iterator[tuple[dict[str, str], dict[str, Any] | None]]:
    """The command's environment, and what is to be said of the emulator; its machine goes with it."""
    if emulate is None:
        searched = [values_hook.site_folder(str(folder), also=[HOOK]), os.environ.get("PYTHONPATH")]
        yield {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, searched))}, None
        return
    from vramprobe.emulate.activate import programs_folder
    from vramprobe.emulate.enter import MOST_BYTES, entrance_for_command
    from vramprobe.emulate.machine import read_events, read_machine
    from vramprobe.emulate.version import emulator_version
    from vramprobe.profile.notes import library_remarks

    python, path = _with_a_cuda_build(command, say)
    alone = options.one_rank
    endless = {"total_bytes": MOST_BYTES} if options.probe else {}
    way = entrance_for_command(python, emulate, policy=policy, say=say, also=[HOOK, stand_ins.HOOK], **endless)
    try:
        num_cards, machine = read_machine(way.machine)
        about = {
            "version": emulator_version(),
            "context_bytes": machine.context_bytes,
            "num_cards": num_cards,
            "is_busy": way.environment.get("CUDA_LAUNCH_BLOCKING") != "1",
            "policy": dict(policy or {}),
        }
        path = os.pathsep.join([str(programs_folder(way.machine)), path])
        environment = way.environment | {"PATH": path}
        yield one_rank.instead_of(environment, *alone, num_cards) if alone else environment, about
        events = read_events(way.machine)
        about["static_runtimes"] = sorted({Path(one.name).name for one in events if one.kind == "static_runtime"})
        about["libraries"] = library_remarks(events)
    finally:
        shutil.rmtree(way.machine, ignore_errors=True)


def _with_a_cuda_build(command: list[str], say: _Say) -> tuple[Path, str]:
    """(the command's interpreter, its PATH); where its torch is no CUDA build, what was set up goes before PATH."""
    from vramprobe.emulate.environment import find_environment
    from vramprobe.emulate.installation import NotEmulatable, find_installation

    path = os.environ.get("PATH", os.defpath)
    try:
        python = interpreter_of(command, os.environ)
        find_installation(python)
    except (NotEmulatable, SpecError) as error:
        ready = find_environment()
        if ready is None and isinstance(error, SpecError):
            raise SpecError(f"{error}. `vramprobe emulate setup` installs trl and accelerate, once") from None
        if ready is None or os.path.isabs(command[0]) or not (ready.parent / command[0]).exists():
            raise
        why = "it is not on PATH" if isinstance(error, SpecError) else f"{python} has no CUDA build of torch"
        say(f"{why}: {command[0]} of {ready.parent} runs instead")
        return ready, f"{ready.parent}{os.pathsep}{path}"
    return python, path


def _wait(
    command: list[str], environment: dict[str, str], folder: Path, requests: ServerRequests | None, say: _Say
) -> tuple[Ended, list[str], list[dict[str, Any]] | None]:
    """Run it to its end; -> how it ended, its last lines on stderr, what a server answered where it was asked."""
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    words = [str(executable_of(command, environment)), *command[1:]]
    read, written = os.pipe()
    with open(read, "rb", buffering=0) as stderr, ExitStack() as ending:  # a signal may come at any moment
        reader = threading.Thread(target=_pass_on, args=(stderr, tail), daemon=True)
        reader.start()
        ending.callback(reader.join, _DYING_SECONDS)
        try:
            kept = Kept(words, environment, folder, written)
        finally:
            os.close(written)
        ending.callback(kept.close)
        client = Client(requests, folder, kept.end, say) if requests else None
        if client is not None:
            ending.callback(client.close)
        with _signals_are_the_commands(kept, folder, say) as ended_by:
            status, num_left = kept.wait()
    answers = client.answers if client is not None else None
    stopped = answers is not None or _was_stopped([_last_line(path) for path in folder.glob("*.jsonl")])
    if stopped:
        status = 0
    if ended_by:
        status = 128 + ended_by[-1]
    return (
        Ended(exit_status=128 - status if status < 0 else status, stopped=stopped, num_left=num_left),
        list(tail),
        answers,
    )


@contextmanager
def _signals_are_the_commands(kept: Kept, folder: Path, say: _Say) -> Iterator[list[int]]:
    """Ctrl-C reaches the command by the terminal, kill -INT by us, and it may answer as it likes; a second one ends it,
    and so does SIGTERM or SIGHUP, so that what was seen is shown. -> the signals that ended it, in order."""
    count, ended_by, left = 0, [], threading.Event()

    def cut_histories() -> None:
        while not left.wait(0.2):
            if _writes_histories_alone(folder):
                if left.wait(_HISTORY_SECONDS) or not _writes_histories_alone(folder):
                    continue
                say("interrupted: its memory's history takes longer to write; without it no line is named that asked")
                ended_by.append(signal.SIGINT)
                kept.end()
                return

    def arrived(number: int, frame: Any) -> None:
        nonlocal count
        count += number == signal.SIGINT
        if number != signal.SIGINT or count > 1:
            ended_by.append(number)
            kept.end()
        else:
            kept.interrupt()
            threading.Thread(target=cut_histories, daemon=True).start()

    with handled_by(arrived):
        try:
            yield ended_by
        finally:
            left.set()


def _writes_histories_alone(folder: Path) -> bool:
    """Return True if all processes that are left have said all, but for the history of their memory."""
    ends = [_last_line(path) for path in folder.glob("*.jsonl") if is_alive(path)]
    return bool(ends) and all(end.get("line") == "end" and end.get("why") != "so far" for end in ends)


def _pass_on(stream: IO[bytes], tail: deque[str]) -> None:
    """Copy the command's stderr to ours at once, as it is; keep its last lines."""
    line = b""
    while chunk := _read(stream):
        with suppress(OSError, ValueError):
            sys.stderr.buffer.write(chunk)
            sys.stderr.flush()
        *whole, line = (line + chunk).split(b"\n")
        tail.extend(part.rsplit(b"\r", 1)[-1].decode(errors="replace") for part in whole)
        line = line[-65536:]
    if line:
        tail.append(line.decode(errors="replace"))


def _read(stream: IO[bytes]) -> bytes:
    """Return what has come; nothing once it has ended, or a signal's end has closed it."""
    try:
        return os.read(stream.fileno(), 65536)
    except (OSError, ValueError):
        return b""


def _last_line(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, IndexError):
        return dict(json.loads(path.read_text(errors="replace").splitlines()[-1]))
    return {}


def _was_stopped(ends: list[dict[str, Any]]) -> bool:
    """Return True if the hook stopped the run, or its steps: a rank that crashed before the first rank was stopped is
    the run's own end; one that fails later does so because the others have left.
    """
    stops = [end.get("ended_ns", 0) for end in ends if end.get("why") == "stopped"]
    crashes = [end.get("ended_ns", 0) for end in ends if end.get("why") == "error"]
    if any(end.get("after_steps") for end in ends) and not stops:
        return not crashes
    return bool(stops) and not any(crash < min(stops) for crash in crashes)
