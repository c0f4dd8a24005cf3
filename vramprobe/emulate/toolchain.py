"""The C compiler at hand: cc, gcc or clang, else ziglang from PyPI, else one clear line.

In: PATH and CC. Out: a Compiler, which runs and says what it is. Installs nothing.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from vramprobe.errors import MissingDependency, VramprobeError

NAMES = ("cc", "gcc", "clang")


class NoCompiler(MissingDependency):
    """This machine has no C compiler; the message says which will do."""


class BuildError(VramprobeError):
    """The emulated GPU could not be built; the message holds the compiler's words, or the folder that is full."""


class Compiler(NamedTuple):
    """A C compiler for this machine's x86-64 Linux."""

    command: tuple[str, ...]
    identity: str  # changes when the compiler does: its file, size and time of change, or ziglang's version
    is_zig: bool = False
    cache: Path | None = None  # where zig keeps what it builds for itself

    def run(self, *arguments: str) -> None:
        """Compile. Raises BuildError with the compiler's first words of complaint."""
        extra = ["-fno-sanitize=undefined"] if self.is_zig else []
        try:
            done = subprocess.run(
                [*self.command, *extra, *arguments],
                capture_output=True,
                text=True,
                env=self._environment(),
                check=False,
            )
        except OSError as error:
            raise BuildError(f"{self.command[0]} does not run: {error.strerror}") from error
        if done.returncode:
            complaint = next((line for line in done.stderr.splitlines() if "error" in line or "No space" in line), "")
            complaint = complaint or done.stderr.strip()[-300:]
            raise BuildError(f"{' '.join(self.command)} failed ({done.returncode}): {complaint}")

    def _environment(self) -> dict[str, str]:
        """Without what an emulated process was given; in plain English."""
        environment = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "LD_LIBRARY_PATH")}
        if self.is_zig and self.cache is not None:
            environment |= {"ZIG_GLOBAL_CACHE_DIR": str(self.cache), "ZIG_LOCAL_CACHE_DIR": str(self.cache)}
        return environment | {"LC_ALL": "C"}


def find_compiler(zig_cache: Path | None = None) -> Compiler:
    """``$CC``, else the first of cc, gcc, clang on PATH, else ziglang. Raises NoCompiler."""
    named = os.environ.get("CC", "").split()
    for command in ([named] if named else []) + [[name] for name in NAMES]:
        if path := shutil.which(command[0]):
            stat = Path(path).resolve().stat()
            return Compiler(command=(path, *command[1:]), identity=f"{path} {stat.st_size} {stat.st_mtime_ns}")
    if importlib.util.find_spec("ziglang") is not None:
        from importlib import metadata

        version = metadata.version("ziglang")
        return Compiler(
            command=(sys.executable, "-m", "ziglang", "cc"), identity=f"ziglang {version}", is_zig=True, cache=zig_cache
        )
    raise NoCompiler(
        "an emulated GPU needs a C compiler, and there is no cc, gcc or clang on PATH: "
        "install one (apt-get install gcc), or `pip install 'vramprobe[emulate]'`, which brings ziglang."
    )
