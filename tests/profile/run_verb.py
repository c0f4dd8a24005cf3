"""``vramprobe profile`` as a process of its own, as a user starts it, and what it left: processes, files, words."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import psutil
from emulated import require_emulation

PATIENCE_SECONDS = 60.0
#: Rows of 64 tokens, and of a hundred one of 256; what a loader makes of them.
ROWS = """
import torch

class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        tokens = torch.arange(256 if index == 77 and self.count == 100 else 64)
        return {"input_ids": tokens, "labels": tokens}

def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    padded = [torch.nn.functional.pad(row["input_ids"], (0, longest - len(row["input_ids"]))) for row in rows]
    return {"input_ids": torch.stack(padded), "labels": torch.stack(padded)}
"""


@dataclass(frozen=True)
class Left:
    """End of the verb. ``said``: its own lines on stderr but those of each minute; ``stray``: new in its folder."""

    status: int
    out: str
    err: str
    said: list[str]
    stray: list[str]
    kept: list[Path]  # in the folder for temporary files
    running: list[str]

    def check(self, status: int, *, kept: int = 0, said: int = 0) -> None:
        """A result or one clear line, the right exit status, nothing left behind."""
        assert self.status == status, (self.status, self.out, self.err)
        assert self.running == []
        assert self.stray == []
        assert len(self.kept) == kept, (self.kept, self.err)
        assert len(self.said) == said, self.err
        assert self.result or said, (self.out, self.err)
        assert f"{os.sep}vramprobe{os.sep}cli" not in self.err, self.err  # no traceback of ours

    @property
    def result(self) -> str:
        """The profile's lines on stdout; empty where there are none."""
        return next(
            (word for word in ("measured on", "emulated NVIDIA", ": no process used it") if word in self.out), ""
        )


class Verb:
    """One ``vramprobe profile`` that runs in ``folder / "work"``, in a session of its own."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        *options: str,
        environment: dict[str, str] | None = None,
        through: Sequence[str] = (),
    ) -> None:
        self._folder, self.ready = folder, folder / "ready"
        (folder / "work").mkdir(exist_ok=True)
        # Beside the folder, whose own name may leave no room for those of sockets in it (108 characters).
        self._tmp = folder.parent / f"t{crc32(folder.name.encode()):x}"
        self._tmp.mkdir(exist_ok=True)
        self._before = _files(folder / "work")
        told = {"TMPDIR": str(self._tmp), "FAULT": str(folder), "OMP_NUM_THREADS": "1"}
        self._files = [open(folder / name, "w+b") for name in ("stdout", "stderr")]  # noqa: SIM115
        self.process = subprocess.Popen(
            [*through, sys.executable, "-m", "vramprobe", "profile", *options, "--", *command],
            cwd=folder / "work",
            env={**os.environ, **told, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=self._files[1],
            start_new_session=True,
        )

    def wait_until_ready(self) -> str:
        """The command says that it is where the fault is to happen: a file; -> what stands in it."""
        until = time.monotonic() + PATIENCE_SECONDS
        while not (self.ready.exists() and self.ready.read_text()):
            assert time.monotonic() < until, (self._folder / "stderr").read_text(errors="replace")
            time.sleep(0.02)
        return self.ready.read_text()

    def left(self, seconds: float = PATIENCE_SECONDS, *, was_starting: bool = False) -> Left:
        """Wait for its end, and for what it has others end; a supervisor with nothing to keep ends by itself."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:  # the supervisor ends the rest when the verb is gone
            self.process.kill()
            self.process.wait()
            for file in self._files:
                file.close()
            raise
        running = _running(self._folder)
        leaves_it_to_others = status == -9 or was_starting
        until = time.monotonic() + (2 * PATIENCE_SECONDS if leaves_it_to_others else 0)
        while running and time.monotonic() < until:
            time.sleep(0.05)
            running = _running(self._folder)
        said = []
        for file in self._files:
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
            file.close()
        out, err = said
        return Left(
            status=128 - status if status < 0 else status,
            out=out,
            err=err,
            said=[line for line in err.splitlines() if line.startswith("vramprobe: ") and " so far: " not in line],
            stray=sorted(_files(self._folder / "work") - self._before),
            kept=sorted(self._tmp.glob("vramprobe*")),
            running=running,
        )


def profile_of(
    folder: Path, script: str, *options: str, words: Sequence[str] = (), gpu: str = "RTX-4090"
) -> tuple[Left, Any]:
    """Run a script on an emulated GPU, without an error; return how it ended, and its profile as JSON says it."""
    (folder / "train.py").write_text(script)
    command = [str(require_emulation()), str(folder / "train.py"), *words]
    left = Verb(folder, command, "--emulate", "RTX-4090", "--json", *options).left(240)
    assert left.status == 0, left.err
    return left, json.loads(left.out.splitlines()[-1])


def _files(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")} if folder.exists() else set()


def _running(folder: Path) -> list[str]:
    """Command lines that name the folder, or have it in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get("FAULT") == str(folder) or str(folder) in " ".join(process.cmdline())
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {process.cmdline()}")
        except psutil.Error:
            continue
    return found
