"""Causes of more or less memory under one stack than under the one before: causes.toml, and what a bisection found.

In: causes.toml and the journal. Out: the causes of a jump. A jump without one is ``unexplained``, and stays so until
somebody has found it.
"""

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from packaging.version import Version

from benchmarks.frameworks.stacks import pins

UNEXPLAINED = "unexplained"
FILE = Path(__file__).with_name("causes.toml")


@dataclass(frozen=True, kw_only=True)
class Cause:
    """``stacks``: the last before and the first after. ``runs``: names, with ``*``. ``release``: package and version.
    ``bisected``: the run whose bisection came to that release; empty where it was read in the source alone.
    """

    stacks: tuple[str, str]
    runs: tuple[str, ...]
    release: str
    why: str
    source: str
    bisected: str = ""

    def applies(self, run: str, before: str, after: str) -> bool:
        """Tell whether it is of this run and between these stacks, whose names are in the order of their days."""
        is_between = before <= self.stacks[0] and self.stacks[1] <= after
        return is_between and any(fnmatchcase(run, pattern) for pattern in self.runs)


def list_causes() -> list[Cause]:
    """In the file's order."""
    found = tomllib.loads(FILE.read_text()).get("cause", [])
    return [Cause(**entry | {"stacks": tuple(entry["stacks"]), "runs": tuple(entry["runs"])}) for entry in found]


def step_of(cause: Cause, entries: list[dict[str, Any]]) -> tuple[str, int, int] | None:
    """(the release before, peak with it, peak with the cause's own), from the journal's bisection and the run that it
    began from; else None.
    """
    package, version = cause.release.split()
    sizes = {}
    for entry in entries:
        if entry["run"] != cause.bisected or entry["outcome"] != "ok":
            continue
        changed = entry.get("changed", {} if entry["stack"] == cause.stacks[0] else None)
        if changed is not None and not set(changed) - {package}:
            sizes[(pins(cause.stacks[0]) | changed)[package]] = entry["peak_bytes"]
    earlier = [one for one in sizes if Version(one) < Version(version)]
    if version not in sizes or not earlier:
        return None
    before = max(earlier, key=Version)
    return before, sizes[before], sizes[version]
