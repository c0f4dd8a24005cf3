"""The emulated driver for an installation, built once into the user's cache.

In: an Installation. Out: a Build: a folder with the driver and one stub per soname. A fingerprint of everything that
it depends on names the folder, which appears whole or not at all; of two processes that begin at once one builds and
the other waits. Changes nothing outside the cache.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from vramprobe.catalog.own import CACHE_VARIABLE, cache_folder
from vramprobe.emulate.installation import Installation, find_installation, require_platform
from vramprobe.emulate.stubs import DRIVER, FUNCTIONS, write_stubs
from vramprobe.emulate.symbols import Wanted, elf_files, wanted
from vramprobe.emulate.toolchain import BuildError, Compiler, find_compiler
from vramprobe.emulate.version import cache_errors, driver_sources, emulator_version, locked

NEEDED_BYTES = 16 << 20  # a build is about 1.5 MB
KEPT_BUILDS = 4
KEPT_SECONDS = 14 * 24 * 3600  # a build used since then is never removed: its runs may still start processes
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Build:
    """A built driver and its stubs, ready to be loaded."""

    folder: Path
    fingerprint: str
    installation: Installation

    @property
    def driver(self) -> Path:
        """The library that holds all state."""
        return self.folder / DRIVER

    @property
    def stubs(self) -> tuple[Path, ...]:
        """One library per soname, without the short names."""
        return tuple(sorted(p for p in self.folder.glob("lib*.so.*") if not p.is_symlink()))

    @property
    def functions(self) -> Path:
        """Path of the table of functions: soname, function, kind, routine."""
        return self.folder / FUNCTIONS


def ensure_build(installation: Installation | None = None, say: Callable[[str], None] | None = None) -> Build:
    """The build for ``installation`` (default: this interpreter's torch), made now if there is none.

    ``say`` gets a line when something is built or waited for. Raises NotEmulatable, NoCompiler, or BuildError.
    """
    require_platform()
    installation = installation or find_installation()
    say = say or (lambda line: None)
    home = cache_folder() / "emulate"
    _check_name(home)
    compiler = find_compiler(home / "zig")
    needs, fingerprint = _needs(installation, compiler, home)
    build = Build(folder=home / fingerprint, fingerprint=fingerprint, installation=installation)
    if not build.folder.is_dir():
        with cache_errors(home):
            home.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(home).free < NEEDED_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(home))
            with locked(home / "lock", say):
                if not build.folder.is_dir():
                    say(f"building the emulated driver for torch {installation.torch_version} in {build.folder}")
                    _make(build, needs, compiler)
                    _prune(home, build.folder)
    with contextlib.suppress(OSError):
        os.utime(build.folder)
    return build


def compile_driver(installation: Installation, compiler: Compiler, out: Path, *options: str) -> None:
    """Compile the driver's sources to ``out`` for that installation's versions. Raises BuildError."""
    major, _ = installation.cuda
    compiler.run(
        "-std=gnu11",
        "-O2",
        "-g",
        "-Wall",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-pthread",
        f"-DEMU_CUDA_MAJOR={major}",
        f"-DEMU_CUDA_VERSION={installation.cuda_version}",
        f"-DEMU_CUDNN_VERSION={installation.cudnn_version}",
        f"-DEMU_NCCL_VERSION={installation.nccl_version}",
        *options,
        *(str(path) for path in driver_sources() if path.suffix == ".c"),
        f"-Wl,-soname,{DRIVER}",
        "-o",
        str(out),
        "-ldl",
        "-lm",
    )


def _check_name(home: Path) -> None:
    """LD_PRELOAD parts its names at blanks and colons, and knows no quotes."""
    if any(sign in str(home) for sign in " \t\n:;$"):
        raise BuildError(
            f"the cache folder {home} has a blank, a colon, a semicolon or a dollar sign in its name, which the "
            f"dynamic loader cannot take: set {CACHE_VARIABLE} to a folder without."
        )


def _needs(installation: Installation, compiler: Compiler, home: Path) -> tuple[dict[str, Wanted], str]:
    """Return the wanted symbols, and a fingerprint of them, of the emulator's sources and of the compiler."""
    places = hashlib.sha256("\n".join(map(str, installation.site_packages)).encode()).hexdigest()[:12]
    with contextlib.suppress(OSError):
        home.mkdir(parents=True, exist_ok=True)
    needs = wanted(installation, home / f"symbols-{places}.json")
    asking = {name for library in needs.values() for name in library.files}
    facts = {
        "format": _FORMAT,
        "installation": asdict(installation),
        "files": [[str(path), *key] for path, key in elf_files(installation) if path.name in asking],
        "emulator": emulator_version(),
        "compiler": compiler.identity,
    }
    return needs, hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]


def _make(build: Build, needs: dict[str, Wanted], compiler: Compiler) -> None:
    """Build beside the place, then rename: what is there under a fingerprint is whole. Called with the lock held."""
    home = build.folder.parent
    for left in home.glob("building-*"):  # by a process that was killed: whoever builds holds the lock
        shutil.rmtree(left, ignore_errors=True)
    making = Path(tempfile.mkdtemp(prefix="building-", dir=home))
    try:
        scratch = making / "scratch"
        scratch.mkdir()
        compile_driver(build.installation, compiler, making / DRIVER)
        write_stubs(needs, making / DRIVER, compiler, scratch)
        _wrap_zig(compiler, making)
        shutil.rmtree(scratch)
        making.chmod(0o755)
        making.rename(build.folder)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


def _wrap_zig(compiler: Compiler, folder: Path) -> None:
    """A ``cc`` for Triton, which compiles a few lines of C for each kernel, on a machine that has only ziglang."""
    if not compiler.is_zig:
        return
    wrapper = folder / "cc"
    command = " ".join(f"'{part}'" for part in compiler.command)
    cache = f"ZIG_GLOBAL_CACHE_DIR='{compiler.cache}' ZIG_LOCAL_CACHE_DIR='{compiler.cache}'"
    wrapper.write_text(f'#!/bin/sh\nexec env -u LD_PRELOAD {cache} {command} -fno-sanitize=undefined "$@"\n')
    wrapper.chmod(0o755)


def _prune(home: Path, keep: Path) -> None:
    """Remove builds that nobody has used for long, but the newest few."""
    builds = sorted((p for p in home.iterdir() if (p / FUNCTIONS).is_file()), key=lambda p: p.stat().st_mtime)
    for path in builds[:-KEPT_BUILDS]:
        if path != keep and time.time() - path.stat().st_mtime > KEPT_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
