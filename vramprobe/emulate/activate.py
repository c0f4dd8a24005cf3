"""The environment variables under which a process, and every process that it starts, sees the emulated GPU.

In: a Build, an emulated machine's folder. Out: a dict for subprocess. Changes no file and not this process.

The stubs, which bring the driver, are preloaded by their files: the dynamic loader then takes a library that asks for
``libcudart.so.13`` to be served, by its soname, before it looks at RPATH (where torch's wheels name NVIDIA's packages)
or at the system's folders (where a real driver is). LD_LIBRARY_PATH alone would lose to RPATH; it is set for the short
names (``libcuda.so``).
"""

import os
from collections.abc import Mapping
from pathlib import Path

from vramprobe.emulate import MACHINE_VARIABLE
from vramprobe.emulate.build import Build

# What speaks of the real machine's cards, or of another driver; an emulated machine shows all of its own.
_OF_THE_REAL_MACHINE = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_INJECTION64_PATH",
    "TRITON_LIBCUDA_PATH",
)


def emulated_environment(build: Build, machine: Path, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """``base`` (default: this process's environment) changed so that processes see ``machine``, a machine's folder."""
    plain = plain_environment(base)
    environment = {name: value for name, value in plain.items() if name not in _OF_THE_REAL_MACHINE}
    environment |= {
        MACHINE_VARIABLE: str(machine),
        "LD_PRELOAD": _joined(*map(str, build.stubs), plain.get("LD_PRELOAD", "")),
        "LD_LIBRARY_PATH": _joined(str(build.folder), plain.get("LD_LIBRARY_PATH", "")),
        "PATH": _joined(str(programs_folder(machine)), plain.get("PATH", os.defpath)),
        "TRITON_LIBCUDA_PATH": str(build.folder),
        "PYTHONFAULTHANDLER": "1",  # an unknown function aborts: say which Python line called it
    }
    compiler = build.folder / "cc"
    if compiler.is_file():
        environment.setdefault("CC", str(compiler))
    return environment


def plain_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """``base`` without an emulated GPU; unchanged where there is none."""
    base = os.environ if base is None else base
    environment = dict(base)
    machine = environment.pop(MACHINE_VARIABLE, None)
    if machine is None:
        return environment
    programs = str(programs_folder(Path(machine)))
    environment["PATH"] = _joined(*(part for part in environment.get("PATH", "").split(":") if part != programs))
    folder = environment.pop("TRITON_LIBCUDA_PATH", "")
    environment.pop("PYTHONFAULTHANDLER", None)
    if environment.get("CC") == str(Path(folder, "cc")):
        del environment["CC"]
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        parts = [part for part in environment.get(name, "").split(":") if part]
        kept = [part for part in parts if folder not in (part, os.path.dirname(part))]
        environment[name] = ":".join(kept)
        if not kept:
            del environment[name]
    return environment


def programs_folder(machine: Path) -> Path:
    """Return the folder of the emulated machine's programs, as ``nvidia-smi``: first on PATH."""
    return machine / "bin"


def _joined(*parts: str) -> str:
    return ":".join(part for part in parts if part)
