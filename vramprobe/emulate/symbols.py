"""Collect an installation's needs of NVIDIA's libraries: sonames, functions, symbol versions, data; from its ELF files.

In: an Installation. Out: a Wanted by soname. Reads .dynamic, .dynsym and .gnu.version_r alone, and each file once
(a cache remembers it by path, size and time of change); loads nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from vramprobe.emulate.installation import Installation

# The library that a function belongs to, by its prefix; the first that matches. For names without a symbol version.
PREFIXES = (
    (r"__cuda[A-Z]|cuda[A-Z]", "libcudart"),
    (r"cublasLt", "libcublasLt"),
    (r"cublas", "libcublas"),
    (r"cudnn", "libcudnn"),
    (r"cusparseLt", "libcusparseLt"),
    (r"cusparse", "libcusparse"),
    (r"cusolverMg", "libcusolverMg"),
    (r"cusolver", "libcusolver"),
    (r"cufft", "libcufft"),
    (r"curand", "libcurand"),
    (r"p?nccl[A-Z]", "libnccl"),
    (r"nvrtc", "libnvrtc"),
    (r"_*nvJitLink", "libnvJitLink"),
    (r"cupti", "libcupti"),
    (r"cuFile", "libcufile"),
    (r"nvshmemx?i?_", "libnvshmem_host"),
    (r"nvml", "libnvidia-ml"),
    (r"nvtx", "libnvToolsExt"),
    (r"cudss", "libcudss"),
    (r"cu[A-Z]", "libcuda"),
)
LIBRARIES = tuple(dict.fromkeys(library for _, library in PREFIXES))
CUDA_VERSIONED = ("libcudart", "libcublas", "libcublasLt", "libnvrtc", "libcupti", "libnvJitLink")
ALWAYS = {"libcuda": "libcuda.so.1", "libnvidia-ml": "libnvidia-ml.so.1"}  # opened by name, never linked with
_BUNDLED = re.compile(r"[.-][0-9a-f]{8}$")
_CACHE_FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class FileWants:
    """Symbols that one ELF file needs of NVIDIA's libraries; ``symbols`` are (name, version, soname, is data)."""

    sonames: tuple[str, ...] = ()
    symbols: tuple[tuple[str, str | None, str | None, bool], ...] = ()


@dataclass(kw_only=True)
class Wanted:
    """Symbols that an installation needs of one library: each one's version (None: it has none), and which are data."""

    soname: str
    versions: dict[str, str | None] = field(default_factory=dict)
    data: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)  # who asks, for messages


def library_of(soname: str) -> str:
    """``libcudart.so.13`` → ``libcudart``; so is ``libcudart.faf08d9a.so.13``, as auditwheel names a bundled copy."""
    return _BUNDLED.sub("", soname.split(".so")[0])


def library_of_symbol(name: str) -> str | None:
    """The library that a function of that name belongs to, None if not one of NVIDIA's."""
    return next((library for pattern, library in PREFIXES if re.match(pattern, name)), None)


def wanted(installation: Installation, cache: Path | None = None) -> dict[str, Wanted]:
    """By soname, what the files under ``installation`` want; ``cache`` is a JSON file that spares the next reading.

    Files built for another major version of CUDA than torch's (bitsandbytes ships one for each) want nothing here:
    torch could not load them either.
    """
    remembered = _load_cache(cache)
    seen: dict[str, dict] = {}
    by_soname = {soname: Wanted(soname=soname) for soname in ALWAYS.values()}
    unplaced: list[tuple[str, bool, str]] = []
    for path, key in elf_files(installation):
        entry = remembered.get(str(path))
        if entry is None or entry["key"] != key:
            entry = {"key": key, **asdict(read_file(path))}
        seen[str(path)] = entry
        if not _of_this_cuda(entry["sonames"], installation.cuda[0]):
            continue
        for soname in entry["sonames"]:
            by_soname.setdefault(soname, Wanted(soname=soname)).files.add(path.name)
        for name, version, soname, is_data in entry["symbols"]:
            if soname is None:
                unplaced.append((name, is_data, path.name))
                continue
            library = by_soname.setdefault(soname, Wanted(soname=soname))
            library.versions[name] = version
            library.data |= {name} if is_data else set()
    _place(unplaced, by_soname)
    if cache is not None and seen != remembered:
        _save_cache(cache, seen)
    return dict(sorted(by_soname.items()))


def elf_files(installation: Installation) -> Iterator[tuple[Path, list[int]]]:
    """Each shared object under the installation but NVIDIA's own, with its size and time of change (bytes, ns)."""
    for site in installation.site_packages:
        for folder, folders, names in os.walk(site):
            if Path(folder) == site:
                folders[:] = [name for name in folders if name != "nvidia"]
            folders.sort()
            for name in sorted(names):
                if ".so" not in name or library_of(name) in LIBRARIES:
                    continue
                path = Path(folder, name)
                if re.search(r"\.so(\.[\d.]+)?$", name) and not path.is_symlink():
                    stat = path.stat()
                    yield path, [stat.st_size, stat.st_mtime_ns]


def read_file(path: Path) -> FileWants:
    """Read the symbols that one file needs; none if it is no ELF file for x86-64, or links with none of NVIDIA's
    libraries.
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.dynamic import DynamicSection
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        try:
            elf = ELFFile(file)
            if elf.get_machine_arch() != "x64":
                return FileWants()
            dynamic = next((s for s in elf.iter_sections() if isinstance(s, DynamicSection)), None)
            needed = [] if dynamic is None else [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]
            sonames = tuple(name for name in needed if library_of(name) in LIBRARIES)
            over_torch = any(name.startswith(("libc10_cuda", "libtorch_cuda")) for name in needed)
            if not sonames and not over_torch:
                return FileWants()
            return FileWants(sonames=sonames, symbols=tuple(_undefined(elf)))
        except ELFError:
            return FileWants()


def _undefined(elf) -> Iterator[tuple[str, str | None, str | None, bool]]:
    """The undefined symbols that are NVIDIA's: by their version's file where they have one, else by their prefix.

    An entry of .dynsym (Elf64_Sym) is 24 bytes: name, info, other, section, value, size; section 0 means undefined.
    """
    table = elf.get_section_by_name(".dynsym")
    if table is None:
        return
    strings = elf.get_section(table["sh_link"]).data()
    numbers = elf.get_section_by_name(".gnu.version")
    indices = [] if numbers is None else [n for (n,) in struct.iter_unpack("<H", numbers.data())]
    needs = _version_needs(elf)
    for index, (at, info, _, section, _, _) in enumerate(struct.iter_unpack("<IBBHQQ", table.data())):
        if section or not at or strings.startswith(b"_Z", at):
            continue
        version, soname = needs.get(indices[index] & 0x7FFF, (None, None)) if indices else (None, None)
        if soname is not None and library_of(soname) not in LIBRARIES:
            continue  # libc's, libstdc++'s
        name = strings[at : strings.index(b"\0", at)].decode()
        if soname is not None or library_of_symbol(name) is not None:
            yield name, version, soname, info & 0xF == 1  # STT_OBJECT


def _version_needs(elf) -> dict[int, tuple[str, str]]:
    """.gnu.version_r: a version's index → its name and the soname that must have it."""
    section = elf.get_section_by_name(".gnu.version_r")
    if section is None:
        return {}
    return {
        aux["vna_other"]: (aux.name, need.name) for need, auxiliaries in section.iter_versions() for aux in auxiliaries
    }


def _of_this_cuda(sonames: tuple[str, ...], major: int) -> bool:
    """Return True if a file that needs these is built for this CUDA; libraries with own numbers say nothing."""
    versioned = (soname for soname in sonames if library_of(soname) in CUDA_VERSIONED)
    return all(re.search(rf"\.so\.{major}(\.|$)", soname) for soname in versioned)


def _place(unplaced: list[tuple[str, bool, str]], by_soname: dict[str, Wanted]) -> None:
    """Give each symbol without a version to every soname of its library that is wanted."""
    for name, is_data, file in unplaced:
        for library in by_soname.values():
            if library_of(library.soname) == library_of_symbol(name):
                library.versions.setdefault(name, None)
                library.files.add(file)
                library.data |= {name} if is_data else set()


def _load_cache(cache: Path | None) -> dict[str, dict]:
    try:
        held = json.loads(cache.read_text()) if cache is not None else {}
    except (OSError, ValueError):
        return {}
    return held["files"] if held.get("format") == _CACHE_FORMAT else {}


def _save_cache(cache: Path, files: dict[str, dict]) -> None:
    """Losing it costs a second; so a folder that cannot be written is no error here."""
    temporary = cache.with_name(f"{cache.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps({"format": _CACHE_FORMAT, "files": files}))
        temporary.replace(cache)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
