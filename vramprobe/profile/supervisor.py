"""Stands between ``vramprobe profile`` and a command, so that nothing of the command outlives either of them.

In: ``python -I -S supervisor.py SOCKET STDERR``; from SOCKET one line of JSON: ``command``, ``environment``,
``folder``; then any text where vramprobe is interrupted. Out, to SOCKET, a line each: ``started``, its process, or
``errno``; ``status`` (null: it could not be ended) and ``num_left``, how many processes it left behind. Where the other
end closes, the command is ended; where vramprobe itself has ended, STDERR hears of it. What the command starts stays
below this process (a subreaper), whatever it does to its session, its group and its environment. Linux alone; the
standard library alone.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress

_SET_CHILD_SUBREAPER = 36
_LEAVING_SECONDS = 0.3  # helpers that end because the command has: a resource tracker, a compiler's pool
_DYING_SECONDS = 5.0
_GROUP_SECONDS = 0.1  # a terminal's interrupt has reached this process by then, if it reached vramprobe
_INTERRUPTS_HERE = []
_IGNORED_HERE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def main(words):
    """Keep one command."""
    to_vramprobe, stderr = socket.socket(fileno=int(words[0])), int(words[1])
    run_info = json.loads(to_vramprobe.makefile("r", encoding="ascii").readline() or "null")
    if run_info is None:
        return
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    awake, wakes = os.pipe()
    os.set_blocking(wakes, False)
    for number in _IGNORED_HERE:
        if signal.getsignal(number) is not signal.SIG_IGN:  # what is ignored stays so in the command, as under nohup
            signal.signal(number, lambda came, _: _INTERRUPTS_HERE.append(came) if came == signal.SIGINT else None)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    for descriptor in (to_vramprobe.fileno(), stderr):
        os.set_inheritable(descriptor, False)
    try:
        pid = os.posix_spawn(run_info["command"][0], run_info["command"], run_info["environment"])
    except OSError as error:
        _say(to_vramprobe, errno=error.errno)
        return
    _say(to_vramprobe, started=pid)
    _leave_terminal_to_the_command()
    status = _wait(pid, to_vramprobe, awake)
    if status is None:
        (status, _), num_left = _end_all(pid, 0.0), 0
    else:
        _, num_left = _end_all(pid, _LEAVING_SECONDS)
    if not _say(to_vramprobe, status=status, num_left=num_left):
        said = f"vramprobe: profile was killed, and its command was ended; what was seen lies in {run_info['folder']}\n"
        with suppress(OSError):
            os.write(stderr, said.encode())


def _leave_terminal_to_the_command():
    """Its stdin, stdout and stderr are its own: whoever reads from them sees their end when it closes them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)


def _wait(pid, to_vramprobe, awake):
    """The command's status; None where vramprobe asks for its end, or has ended: its end of the socket has closed."""
    while True:
        status = _reap(pid)
        if status is not None:
            return status
        ready, _, _ = select.select([to_vramprobe, awake], [], [])
        if awake in ready:
            os.read(awake, 4096)
        if to_vramprobe in ready and (not to_vramprobe.recv(4096) or not _interrupt_all()):
            return None


def _interrupt_all():
    """Interrupt the command where vramprobe alone was; False where it would not hear it. A terminal interrupts the
    whole group itself, this process too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return False
    time.sleep(_GROUP_SECONDS)
    if not _INTERRUPTS_HERE:
        for one in _below(os.getpid()):
            with suppress(OSError):
                if os.getpgid(one) == os.getpgrp():
                    os.kill(one, signal.SIGINT)
    _INTERRUPTS_HERE.clear()
    return True


def _reap(pid):
    """Bury who has ended, orphans among them; the status of ``pid`` where it is one of them."""
    found = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                found = os.waitstatus_to_exitcode(ended[1])
    return found


def _end_all(pid, leaving_seconds):
    """End every process below this one; -> (the command's status where it ended now, how many there were)."""
    status, _ = _reaped_within(leaving_seconds, pid)
    seen = set()
    for number, seconds in ((signal.SIGTERM, _DYING_SECONDS), (signal.SIGKILL, _DYING_SECONDS)):
        until = time.monotonic() + seconds
        signaled = set()
        while below := _below(os.getpid()):
            for one in below - signaled:  # also who was started since
                with suppress(OSError):
                    os.kill(one, number)
                    os.kill(one, signal.SIGCONT)
            signaled |= below
            seen |= below
            found, _ = _reaped_within(0.05, pid)
            status = status if found is None else found
            if time.monotonic() > until:
                break
    return status, len(seen)


def _reaped_within(seconds, pid):
    """Wait for all to end, so long; -> (the status of ``pid`` where it ended, whether any is left)."""
    until, status = time.monotonic() + seconds, None
    while True:
        is_any = bool(_below(os.getpid()))
        found = _reap(pid)  # after the look: who died meanwhile is buried all the same
        status = status if found is None else found
        if not is_any or time.monotonic() > until:
            return status, is_any
        time.sleep(0.01)


def _below(root):
    """The process ids of all that live below ``root``."""
    children = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state not in b"ZX":
                    children.setdefault(int(parent), []).append(int(name))
    found, todo = set(), [root]
    while todo:
        below = children.get(todo.pop(), [])
        found.update(below)
        todo += below
    return found


def _say(to_vramprobe, **what):
    """Send a message; return True if vramprobe received it."""
    try:
        to_vramprobe.sendall(json.dumps(what).encode() + b"\n")
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
