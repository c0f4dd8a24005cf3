"""The files that ship under data/sweeps/ and data/campaigns/ (the repository's configs/), by name.

In: what a user typed for a sweep. Out: the file's path. Reads no sweep; sweep/definition.py does.
"""

from pathlib import Path

from vramprobe.catalog.shipped import data_file


def list_sweeps() -> list[str]:
    """Names of the sweeps that ship, without .yaml."""
    return sorted(path.stem for path in data_file("sweeps").glob("*.yaml"))


def sweep_file(name: str | Path) -> Path:
    """The shipped sweep or campaign of that name, whatever its case; else ``name`` as a path, not looked for yet.

    Names win over a local file, as those of models do; write ``./24gb`` for the file. A Path is never a name.
    """
    if isinstance(name, Path):
        return name
    for folder in ("sweeps", "campaigns"):
        if name.lower() in {path.stem for path in data_file(folder).glob("*.yaml")}:
            return data_file(f"{folder}/{name.lower()}.yaml")
    return Path(name)
