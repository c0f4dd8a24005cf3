"""The sweep files that ship under data/sweeps/ (the repository's configs/sweeps), by name.

In: what a user typed for a sweep. Out: the file's path. Reads no sweep; sweep/definition.py does.
"""

from __future__ import annotations

from pathlib import Path

from vramprobe.catalog.shipped import data_file


def list_sweeps() -> list[str]:
    """Names of the sweeps that ship, without .yaml."""
    return sorted(path.stem for path in data_file("sweeps").glob("*.yaml"))


def sweep_file(name: str | Path) -> Path:
    """The shipped file of that name, whatever its case; else ``name`` as a path, which nobody has looked for yet.

    Names win over a local file, as those of models do; write ``./24gb`` for the file. A Path is never a name.
    """
    if isinstance(name, str) and name.lower() in list_sweeps():
        return data_file(f"sweeps/{name.lower()}.yaml")
    return Path(name)
