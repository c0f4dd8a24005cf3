"""The command as a user starts it: in a process of its own, or, where that is not what is tested, in this one."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest import mock

import vramprobe as package
from vramprobe.cli import verbs

#: From any folder, the package that the tests import is the one that runs.
HERE = str(Path(package.__file__).parents[1])
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 23.64 GiB "
    "of which 1.20 GiB is free."
)
#: Verbs that start no process: a second of imports less for each command.
_WITHIN = ["predict", "plan", "recommend", "models", "gpus", "check", "techniques", "serve", "grpo", "explain"]
_WITHIN += ["claims", "evaluate", "calibrate", "merge", "contribute", "export", "diff", "fit", "report"]
#: Options that start one, or another's command.
_PROCESSES = {"--emulate", "--on", "--"}


def flags(options: Mapping[str, object]) -> list[str]:
    """Options by their names in Python as words of the command line; ``True`` is a flag."""
    given = [(f"--{name.replace('_', '-')}", value) for name, value in options.items()]
    return [word for name, value in given for word in ((name,) if value is True else (name, str(value)))]


def vramprobe(*words: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Start a process, but for a verb that works by itself, whose end is the same within this one."""
    is_within = words[:1] and (words[0] in _WITHIN or "--dry-run" in words) and not _PROCESSES & set(words)
    if env is None and is_within:
        return within(verbs.main, ["vramprobe", *words], cwd or Path.cwd())
    command = [sys.executable, "-m", "vramprobe", *words]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=os.environ | (env or {}) | {"PYTHONPATH": HERE}
    )


def within(main: Callable[[], object], argv: Sequence[str], folder: Path) -> subprocess.CompletedProcess:
    """Run ``main`` with this ``argv`` in this folder; return how it ends, as a process of its own would say it."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with (
        mock.patch.object(sys, "argv", list(argv)),
        mock.patch.dict(os.environ),  # what it sets there is its children's alone
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except Exception:
            traceback.print_exc()
            code = 1
        else:
            code = 0
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    said = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return subprocess.CompletedProcess(argv, code, *said)
