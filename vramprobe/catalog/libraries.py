"""The libraries that cells are recorded and run with: what is pinned in what ships.

In: data/emulated_environment.txt, whose versions are constraints.txt's. Out: package → version.
"""

from collections.abc import Mapping
from functools import cache

from vramprobe.catalog.shipped import data_file

#: Those whose versions decide what a training step allocates.
DECIDING = ("torch", "transformers", "peft", "bitsandbytes")


@cache
def pinned_libraries() -> Mapping[str, str]:
    """Pinned versions of the libraries of :data:`DECIDING`, in that order."""
    lines = data_file("emulated_environment.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.replace("===", "==").split("==") for line in lines if "==" in line and line[0] != "#")
    return {name: pins[name] for name in DECIDING}


def in_words(versions: Mapping[str, str | None]) -> str:
    """``torch 2.13.0, transformers 5.23.0, …``, as far as they are known."""
    return ", ".join(f"{name} {versions[name]}" for name in DECIDING if versions.get(name))
