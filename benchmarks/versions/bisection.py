"""Which release of which package made a run take more or less: bisected between two stacks.

In: a stack to start from, another one, and a function that runs it with other versions of some packages. Out: the two
neighbouring releases between which the peak moves. A release that does not run is passed over.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from packaging.version import Version

from benchmarks.frameworks.stacks import PINS, compiled, pins

#: In this order, packages are tried one by one.
PACKAGES = ("transformers", "trl", "peft", "accelerate", "bitsandbytes", "torch")
_SHARE = 0.5  # of the jump: less is no trace of it
_Sized = Callable[[dict[str, str]], int | None]
_Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Release:
    """Peaks in bytes with two releases of a package, none of which that runs is between, and all else alike."""

    package: str
    before: str
    after: str
    before_bytes: int
    after_bytes: int


def traced(
    start: str,
    end: str,
    sized: _Sized,
    *,
    versions: Callable[[str], list[str]],
    package: str | None = None,
    jump_bytes: int,
    say: _Say,
) -> Release | None:
    """The release that moves the peak of ``start`` towards that of ``end``, which is ``jump_bytes`` away.

    ``sized``: the peak of ``start`` with these packages changed, None where that does not run. ``versions``: all
    releases of a package. None where no package does half of the jump by itself.
    """
    here, there = pins(start), pins(end)
    if (first := sized({})) is None:
        say(f"{start} itself does not run")
        return None
    differing = [one for one in (PACKAGES if package is None else [package]) if here.get(one) != there.get(one)]
    for name in differing:
        last = sized({name: there[name]})
        said = "does not run" if last is None else f"{last - first:+,} of {jump_bytes:+,} bytes"
        say(f"{start} with {name} {there[name]} instead of {here[name]}: {said}")
        if last is not None and (last - first) / jump_bytes >= _SHARE:
            return bisected(name, here[name], there[name], (first, last), versions(name), sized, say)
    return None


def bisected(
    package: str, start: str, end: str, peaks: tuple[int, int], known: list[str], sized: _Sized, say: _Say
) -> Release:
    """``peaks``: with ``start`` and with ``end``; the step nearest to the middle between them is looked for."""
    low, high = sorted((start, end), key=Version)
    between = sorted((one for one in known if Version(low) < Version(one) < Version(high)), key=Version)
    line = [start, *(between if low == start else reversed(between)), end]
    sizes = {start: peaks[0], end: peaks[1]}
    middle = sum(peaks) / 2
    while len(line) > 2:
        at = len(line) // 2
        name = line[at]
        size = sized({package: name})
        say(f"{package} {name}: {'does not run' if size is None else f'{size:,} bytes'}, {len(line) - 2} were left")
        if size is None:
            del line[at]
            continue
        sizes[name] = size
        line = line[at:] if (size < middle) == (peaks[0] < middle) else line[: at + 1]
    before, after = line  # both ran: they are the ends, or took an end's place
    return Release(package=package, before=before, after=after, before_bytes=sizes[before], after_bytes=sizes[after])


def changed_pins(start: str, end: str, changed: dict[str, str], *, uv: str) -> dict[str, str]:
    """The packages of ``start`` with other versions of some, and of what those need beside."""
    if not changed:
        return pins(start)
    day = max((PINS / f"{name}.in").read_text().split("\n", 1)[0].strip("# ").split()[0] for name in (start, end))
    known = pins(start)
    wanted = {name: known[name] for name in (*PACKAGES, "datasets", "setuptools", "nvidia-ml-py")} | changed
    lines = compiled([f"{name}=={version}" for name, version in wanted.items()], [day], known=known | changed, uv=uv)
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def released(package: str) -> list[str]:
    """Every release of a package that is no candidate, by pip."""
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"Available versions: (.*)", said)
    return [one for one in (found[1].split(", ") if found else []) if not Version(one).is_prerelease]
