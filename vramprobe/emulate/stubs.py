"""One small library per soname that an installation wants: each function a jump to the driver.

In: what is wanted, the driver that was built, a compiler, an empty folder. Out: the libraries in that folder, and
functions.csv, which says of each function what a call of it does. Data symbols are left out: who wants one fails to
load with its name, where zeros would be garbage.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from vramprobe.catalog.shipped import data_file
from vramprobe.emulate.queries import Query, not_supported
from vramprobe.emulate.rules import PREFIX, Kind, Rule, rule_for
from vramprobe.emulate.symbols import Wanted, library_of, library_of_symbol
from vramprobe.emulate.toolchain import Compiler

DRIVER = "libvramprobe_driver.so"
FUNCTIONS = "functions.csv"


def exported_names(library: Path) -> frozenset[str]:
    """The names that a shared library defines for others."""
    from elftools.elf.elffile import ELFFile

    with library.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".dynsym").iter_symbols()
        return frozenset(symbol.name for symbol in symbols if symbol.name and symbol["st_shndx"] != "SHN_UNDEF")


def write_stubs(wanted: dict[str, Wanted], driver: Path, compiler: Compiler, scratch: Path) -> list[Path]:
    """Build every soname's library beside ``driver``; ``scratch`` is a folder for what only the compiler reads.

    Raises BuildError with the compiler's own words.
    """
    exported = exported_names(driver)
    with ThreadPoolExecutor(max_workers=2) as pool:  # the compiler is a process of its own; two cores are few
        work = [pool.submit(_write_stub, library, exported, driver, compiler, scratch) for library in wanted.values()]
        built = [future.result() for future in work]
    with (driver.parent / FUNCTIONS).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["soname", "function", "kind", "routine"])
        for path, rules in built:
            writer.writerows([path.name, name, rule.kind, rule.routine] for name, rule in rules.items())
    _link_short_names([path for path, _ in built])
    return [path for path, _ in built]


def functions_of(library: Wanted, exported: frozenset[str]) -> dict[str, Rule]:
    """Each function that a soname's stub has: what is wanted, what the driver has, all of CUDA's own interface."""
    base = library_of(library.soname)
    emulated = {name.removeprefix(PREFIX) for name in exported if name.startswith(PREFIX)}
    names = {name for name in library.versions if name not in library.data}
    names |= {name for name in emulated if library_of_symbol(name) == base}
    names |= {name for name in _cuda_functions() if library_of_symbol(name) == base}
    return {name: rule_for(name, exported, library.soname) for name in sorted(names)}


@cache
def _cuda_functions() -> tuple[str, ...]:
    """The driver's and the runtime's whole interface: what is compiled at run time stands in no file to be read."""
    lines = data_file("cuda_functions.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if not line.startswith("#"))


def assembly(functions: dict[str, Rule], soname: str) -> str:
    """The stub's code. A call of a name that the driver lacks hands over that name and the soname, in rdi and rsi.

    The status "not supported" of its library goes in edx.
    """
    lines = [".text"]
    strings = [f'.Lsoname: .string "{soname}"']
    status = not_supported(soname)
    for number, (name, rule) in enumerate(functions.items()):
        lines += [f".globl {name}", f".type {name}, @function", f"{name}:"]
        if rule.query is not None:
            lines += _answer(rule.query)
        if rule.kind in (Kind.ALLOWED, Kind.ANSWERED, Kind.UNKNOWN):
            lines += [f"  leaq .L{number}(%rip), %rdi", "  leaq .Lsoname(%rip), %rsi", f"  movl ${status or 0}, %edx"]
            strings.append(f'.L{number}: .string "{name}"')
        lines += [f"  jmp {rule.routine}@PLT", f".size {name}, .-{name}"]
    return "\n".join([*lines, ".section .rodata", *strings, '.section .note.GNU-stack,"",@progbits', ""])


_REGISTERS = ("rdi", "rsi", "rdx", "rcx", "r8", "r9")  # of arguments 1 to 6 (System V's calling convention)


def _place(argument: int) -> str:
    """Return the operand where the caller left its argument, counted from 1."""
    return f"%{_REGISTERS[argument - 1]}" if argument <= 6 else f"{8 * (argument - 6)}(%rsp)"


def _answer(query: Query) -> list[str]:
    """Code that writes what ``query`` says; what the routine is to look at goes to rcx and r8."""
    if query.is_device_result:
        return [f"  movq {_place(query.arguments[0])}, %rcx"]
    lines = []
    for argument in query.arguments:
        store = "movl" if query.num_bytes == 4 else "movq"
        lines += [f"  movq {_place(argument)}, %rax", "  testq %rax, %rax", "  je 1f"]
        lines += [f"  {store} ${query.value}, (%rax)", "1:"]
    if query.info is not None:
        number = "$1" if query.num_infos is None else _place(query.num_infos)
        lines += [f"  movq {_place(query.info)}, %rcx", f"  movq {number}, %r8"]
    return lines


def version_script(library: Wanted, functions: dict[str, Rule]) -> str:
    """The symbol versions that are asked for; a name that nobody versions goes where most of its neighbours are."""
    nodes = defaultdict(list)
    for name in functions:
        nodes[library.versions.get(name)].append(name)
    versioned = {node: names for node, names in nodes.items() if node is not None}
    if not versioned:
        return ""
    largest = max(versioned, key=lambda node: len(versioned[node]))
    versioned[largest] = versioned[largest] + nodes.get(None, [])
    return "".join(f"{node} {{ global: {' '.join(f'{n};' for n in names)} }};\n" for node, names in versioned.items())


def _write_stub(
    library: Wanted, exported: frozenset[str], driver: Path, compiler: Compiler, scratch: Path
) -> tuple[Path, dict[str, Rule]]:
    functions = functions_of(library, exported)
    source, versions = scratch / f"{library.soname}.s", scratch / f"{library.soname}.map"
    source.write_text(assembly(functions, library.soname))
    out = driver.parent / library.soname
    options = [f"-Wl,-soname,{library.soname}", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed"]
    if not compiler.is_zig:  # fewer segments to map: every process pays for them, the shell and make too
        options += ["-Wl,-z,noseparate-code", "-Wl,-z,norelro", "-Wl,--hash-style=gnu"]
    if script := version_script(library, functions):
        versions.write_text(script)
        options.append(f"-Wl,--version-script={versions}")
    compiler.run("-shared", "-nostdlib", *options, "-o", str(out), str(source), str(driver))
    return out, functions


def _link_short_names(libraries: list[Path]) -> None:
    """``libcuda.so`` beside ``libcuda.so.1``: for who links with -lcuda (Triton up to 3.5) or opens that name."""
    for path in libraries:
        short = path.with_name(re.sub(r"\.so\..*", ".so", path.name))
        if not short.exists():
            short.symlink_to(path.name)
