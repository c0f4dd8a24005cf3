"""Programs that no card sees, and what happens to them: a result or one clear line, and nothing left behind."""

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from grids import grid
from run_verb import Verb

from vramprobe.profile import launch

READY = """
import os, pathlib, signal, subprocess, sys, time, threading
def ready(*words): pathlib.Path(os.environ["FAULT"], "ready").write_text(" ".join(map(str, words)) or "yes")
"""
STAYS = "[sys.executable, '-c', 'import time; time.sleep(1000)', FAULT]"

#: What a program does, and the exit status that stays its own.
PROGRAMS = {
    "never imports torch": ("", 0),
    "leaves early": ("sys.exit(0)", 0),
    "leaves with a status": ("sys.exit(7)", 7),
    "leaves with a text": ("sys.exit('enough')", 1),
    "raises": ("raise ValueError('no')", 1),
    "raises what no encoding has": ("raise ValueError('\\udcff')", 1),
    "leaves at once": ("os._exit(3)", 3),
    "aborts": ("os.abort()", 128 + signal.SIGABRT),
    "touches no memory of its own": ("import ctypes; ctypes.string_at(0)", 128 + signal.SIGSEGV),
    "kills itself": ("os.kill(os.getpid(), 9)", 137),
    "terminates itself": ("os.kill(os.getpid(), 15)", 143),
    "interrupts itself": ("os.kill(os.getpid(), 2); time.sleep(9)", 130),
    "catches its interrupt": ("try:\n    os.kill(os.getpid(), 2); time.sleep(9)\nexcept BaseException: pass", 0),
    "recurses for ever": ("def f(): f()\nf()", 1),
    "raises in a thread": ("threading.Thread(target=lambda: 1 / 0).start()", 0),
    "leaves a thread": ("threading.Thread(target=time.sleep, args=(999,), daemon=True).start()", 0),
    "raises at its exit": ("import atexit; atexit.register(lambda: 1 / 0)", 0),
    "replaces the excepthook": ("sys.excepthook = lambda *a: os._exit(4)\n1 / 0", 4),
    "prints binary": ("for f in (1, 2): os.write(f, bytes(range(256)) * 99)", 0),
    "prints megabytes without a line": ("for f in (1, 2):\n    for _ in range(300): os.write(f, b'x' * 10000)", 0),
    "prints a terminal's signs": ("os.write(2, b'\\x1b[2J\\x1b]0;title\\x07\\r\\r50%\\r100%'); sys.exit(1)", 1),
    "closes stdin": ("os.close(0)", 0),
    "closes stdout": ("os.close(1)", 0),
    "closes stderr": ("os.close(2)", 0),
    "closes all": ("os.closerange(0, 1000)", 0),
    "has no streams": ("sys.stdin = sys.stdout = sys.stderr = None", 0),
    "reads stdin to its end": ("sys.stdin.read()", 0),
    "forks": ("if os.fork() == 0: os._exit(0)\nos.wait()", 0),
    "forks and leaves the child": ("if os.fork() == 0: time.sleep(1000)", 0),
    "forks and leaves a corpse": ("if os.fork() == 0: os._exit(0)\ntime.sleep(0.2)", 0),
    "forks, and the parent is killed": ("if os.fork() == 0: time.sleep(1000)\nos.kill(os.getpid(), 9)", 137),
    "leaves a daemon": ("if os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n    time.sleep(1000)\n"
                        "os.wait()", 0),
    "leaves one in no environment": (f"subprocess.Popen({STAYS}, env={{}}, start_new_session=True)", 0),
    "leaves one in another folder": (f"subprocess.Popen({STAYS}, cwd='/')", 0),
    "leaves one that is stopped": (f"p = subprocess.Popen({STAYS}); os.kill(p.pid, signal.SIGSTOP)", 0),
    "leaves twenty": ("for _ in range(20): subprocess.Popen(['sleep', '1000'], env={'FAULT': FAULT})", 0),
    "leaves a family": ("for _ in range(5):\n    if os.fork() == 0: os.setpgid(0, 0)\n"
                        "os.getpgid(0) != os.getpid() or time.sleep(1000)", 0),
    "is its own group": ("os.setpgid(0, 0)", 0),
    "is its own session": ("if os.fork() == 0:\n    os.setsid(); os._exit(0)\nos.wait()", 0),
    "multiprocessing, forked": ("import multiprocessing as m\nm.get_context('fork').Pool(2).map(abs, [1])", 0),
    "multiprocessing, not joined": ("import multiprocessing as m\np = m.get_context('fork').Process(target=time.sleep, "
                                    "args=(1000,), daemon=True); p.start()", 0),
    "becomes another program": ("os.execv('/bin/sh', ['sh', '-c', 'exit 6'])", 6),
    "becomes itself again": ("if len(sys.argv) == 1: os.execv(sys.executable, [sys.executable, __file__, '1'])", 0),
    "changes its folder": ("os.chdir('/')", 0),
    "deletes its folder": ("import shutil; shutil.rmtree(os.getcwd())", 0),
    "empties its environment": ("os.environ.clear(); subprocess.run([sys.executable, '-c', 'raise SystemExit(0)'], "
                                "check=True)", 0),
    "starts Python without its environment": ("subprocess.run([sys.executable, '-I', '-S', '-c', ''], check=True)", 0),
    "deletes the profile's folder": ("import shutil; shutil.rmtree(os.environ['VRAMPROBE_PROFILE'])", 1),
    "deletes the profile's folder, and fails": ("import shutil; shutil.rmtree(os.environ['VRAMPROBE_PROFILE']); "
                                                "sys.exit(9)", 9),
    "opens too many files": ("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))\n"
                             "keep = []\nwhile True: keep.append(open('/dev/null'))", 1),
    "may not write": ("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
                      "with open(FAULT + '/x', 'w') as file: file.write('x')", 1),
    "may not have memory": ("import resource; resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28)); bytes(2**30)", 1),
    "imports a torch that fails": ("sys.path.insert(0, FAULT); open(FAULT + '/torch.py', 'w').write('1 / 0')\n"
                                   "import torch", 1),
    "imports a torch that is none": ("sys.path.insert(0, FAULT); open(FAULT + '/torch.py', 'w')\nimport torch", 0),
}  # fmt: skip


#: One of each way to end, to leave others behind, to meet our files.
ALWAYS = (
    "leaves with a status",
    "interrupts itself",
    "prints binary",
    "closes all",
    "leaves a daemon",
    "leaves one in no environment",
    "leaves one that is stopped",
    "becomes another program",
    "deletes the profile's folder",
    "imports a torch that is none",
)


@pytest.mark.parametrize("what", grid(PROGRAMS, *ALWAYS))
def test_a_program_that_sees_no_card(tmp_path: Path, what: str) -> None:
    script, status = PROGRAMS[what]
    path = tmp_path / "script.py"
    path.write_text(f"{READY}FAULT = os.environ['FAULT']\n{script}\n")
    said = 2 if "deletes the profile" in what else int(what == "imports a torch that is none")
    left = Verb(tmp_path, [sys.executable, str(path)]).left()
    left.check(status, said=said)


#: What becomes of the verb's process, or of its session: (signals, to whom, the exit status).
SIGNALS = {
    "the verb is killed": ([9], "verb", 137),
    "the verb is terminated": ([15], "verb", 143),
    "the verb is interrupted": ([2], "verb", 130),
    "the verb is interrupted, twice": ([2, 2], "verb", 130),
    "the terminal goes": ([1], "session", 129),
    "Ctrl-C": ([2], "session", 130),
    "Ctrl-C, twice": ([2, 2], "session", 130),
    "the command is killed": ([9], "command", 137),
    "the command is terminated": ([15], "command", 143),
    "the supervisor is killed": ([9], "supervisor", 137),
}
#: What the command does with a signal that can be caught.
ANSWERS = {
    "obeys": "",
    "has children": "for _ in range(2):\n    if os.fork() == 0: os.setsid(); time.sleep(1000)",
    "is stubborn": "for number in (1, 2, 15): signal.signal(number, lambda *_: None)",
}


@pytest.mark.parametrize("answer", grid(ANSWERS, "has children"))
@pytest.mark.parametrize("what", SIGNALS)
def test_a_signal(tmp_path: Path, what: str, answer: str) -> None:
    """While the command waits; each is answered at once, but by the stubborn one, which is killed for it."""
    numbers, whom, status = SIGNALS[what]
    if answer == "is stubborn" and what in ("Ctrl-C", "the verb is interrupted", "the command is terminated"):
        pytest.skip("it goes on, as it may")
    path = tmp_path / "script.py"
    path.write_text(f"{READY}{ANSWERS[answer]}\nready(os.getpid())\nwhile True: time.sleep(1)\n")
    verb = Verb(tmp_path, [sys.executable, str(path)])
    command = int(verb.wait_until_ready())
    for number in numbers:
        if whom == "session":
            os.killpg(verb.process.pid, number)
        else:
            supervisor = psutil.Process(command).ppid()
            os.kill({"verb": verb.process.pid, "command": command, "supervisor": supervisor}[whom], number)
        time.sleep(0.1)
    left = verb.left()
    if "twice" in what and not left.result:  # the second one came when the command had ended
        assert (left.status, left.running, left.kept) == (status, [], [])
        return
    left.check(status, said=int(what == "the verb is killed"), kept=int(what == "the verb is killed"))


@pytest.mark.parametrize("ignored", ["trap '' INT; ", ""])
def test_an_interrupt_is_the_commands_once(tmp_path: Path, ignored: str) -> None:
    """Hand on the interrupt of the verb alone, never the terminal's again; end a background job's command, which
    ignores it."""
    path = tmp_path / "script.py"
    count = "seen = []\nsignal.signal(2, lambda *_: seen.append(1))" if not ignored else ""
    path.write_text(
        f"{READY}{count}\nready(os.getpid())\nend = time.monotonic() + {60 if ignored else 1}\n"
        "while time.monotonic() < end: time.sleep(0.1)\nsys.exit(40 + len(seen))\n"
    )
    for sends in (os.kill, os.killpg):
        verb = Verb(tmp_path, [sys.executable, str(path)], through=["sh", "-c", f'{ignored}exec "$@"', "sh"])
        verb.wait_until_ready()
        sends(verb.process.pid, signal.SIGINT)
        assert verb.left().status == (130 if ignored else 41)
        (tmp_path / "ready").unlink()


@pytest.mark.parametrize("seconds", grid([0.0, 0.1, 0.3, 0.5, 0.7], 0.3))
@pytest.mark.parametrize("number", [2, 9, 15])
def test_a_signal_at_any_moment(tmp_path: Path, number: int, seconds: float) -> None:
    """While the verb loads, starts its supervisor, the command; nothing of it all is left, whatever was said."""
    verb = Verb(tmp_path, [sys.executable, "-c", "import time; time.sleep(1000.25)", str(tmp_path)])
    time.sleep(seconds)
    verb.process.send_signal(number)
    if number == 2:
        time.sleep(0.1)
        verb.process.send_signal(number)
    left = verb.left(was_starting=True)
    assert (left.running, left.stray) == ([], [])
    is_starting = seconds == 0.0 or "_get_module_details" in left.err  # runpy still looks for the package
    if not (number == 2 and is_starting):  # its own words, and its own status
        assert left.status == 128 + number
        assert not re.search(r'File "[^"]*/vramprobe/(?!profile/hook)', left.err)  # the command's own traceback may be
    assert len(left.kept) <= int(number == 9)


#: What is no command, and a word of what is said.
NO_COMMANDS = {
    "not there": (["/no/such/program"], "there is no command"),
    "a folder": (["/"], "there is no command"),
    "nothing": ([""], "there is no command"),
    "no program": (["./text"], "cannot be started"),
    "no interpreter": (["./script"], "cannot be started"),
}


@pytest.mark.parametrize("what", grid(NO_COMMANDS, "not there", "no program"))
def test_no_command(tmp_path: Path, what: str) -> None:
    (tmp_path / "work").mkdir()
    for name, text in (("text", "nothing to run"), ("script", "#!/no/such/interpreter\n")):
        (tmp_path / "work" / name).write_text(text)
        (tmp_path / "work" / name).chmod(0o755)
    command, said = NO_COMMANDS[what]
    left = Verb(tmp_path, command).left()
    left.check(1, said=1)
    assert said in left.said[0]


@pytest.mark.parametrize("full", grid(["stdout", "--save", "--folder", "TMPDIR"], "stdout", "TMPDIR"))
def test_a_place_that_takes_nothing(tmp_path: Path, full: str) -> None:
    """A full disk's file, a folder within a file."""
    options = {"--save": ["--save", "/dev/full"], "--folder": ["--folder", "/dev/full/x"]}.get(full, [])
    code = "import os, sys; os.dup2(os.open('/dev/full', 1), 1); os.execv(sys.argv[1], sys.argv[1:])"
    words = [sys.executable, "-c", code] if full == "stdout" else []
    environment = {"TMPDIR": "/dev/full"} if full == "TMPDIR" else {}
    left = Verb(tmp_path, ["true"], *options, through=words, environment=environment).left()
    assert (left.status, left.running, left.stray) == (int(full != "TMPDIR"), [], [])
    assert len(left.said) == int(full != "TMPDIR"), left.err


class _NotKept:
    """In place of a command that runs: notes that it is to end."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def interrupt(self) -> None:
        pass

    def end(self) -> None:
        self.ended.set()


@pytest.mark.parametrize(
    ("lines", "is_cut"),
    [
        (['{"line": "phase"}', '{"line": "end", "why": "error"}'], True),
        (['{"line": "phase"}'], False),
        (['{"line": "end", "why": "so far"}'], False),
        ([], False),
    ],
    ids=["all but the history is said", "still at work", "goes on", "nothing said yet"],
)
def test_an_interrupted_command_is_not_waited_for_once_only_its_history_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], is_cut: bool
) -> None:
    monkeypatch.setattr(launch, "_HISTORY_SECONDS", 0.3)
    (tmp_path / f"{os.getpid()}.jsonl").write_text("\n".join(lines))
    kept, said = _NotKept(), []
    with launch._signals_are_the_commands(kept, tmp_path, said.append) as ended_by:
        os.kill(os.getpid(), signal.SIGINT)
        assert kept.ended.wait(10 if is_cut else 1.5) == is_cut
    assert ended_by == [signal.SIGINT] * is_cut
    assert [line.startswith("interrupted: its memory's history") for line in said] == [True] * is_cut
