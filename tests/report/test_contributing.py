"""docs/contributing.md names every file that adding one of a kind touches: each file that names one that is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| (?P<kind>[^|]+) \| (?P<touch>[^|]+) \| (?P<what>[^|]+) \|$", re.MULTILINE)

#: A kind of the page's table → one of it that is there, as the code writes it.
ONE_OF_EACH = {
    "an optimizer": "^adagrad,,",
    "a GPU": "L40S",
    "the CUDA context of a GPU": "cudaMemGetInfo's context",
    "a model": "seed-oss-36b",
    "a model family": r"\"phi3\"|^\[phi3\]$",
    "a quantization format": r"\bfp4\b",
    "an adapter": r"\bdora\b",
    "a trainer of TRL": '"reward"',
    "a head and loss": '"chunked_nll"',
    "a sharding": '"zero1?"',
}
#: Where names are data of others (published rows, claims, machines of clouds, sweeps, options of other programs), or a
#: module has the name of the kind itself.
_OTHERS = (
    "vramprobe/cli/wrong_usage.py",
    "vramprobe/literature/",
    "vramprobe/data/gpu_hints",
    "vramprobe/data/published",
    "vramprobe/data/claim",
    "vramprobe/data/formulas",
    "vramprobe/data/techniques",
    "vramprobe/data/sweeps/",
)


#: How many files of the package one may touch at most, a module of its own included.
MOST_FILES = {"an optimizer": 2, "an adapter": 4, "a model family": 1, "a sharding": 3}
_OWN_MODULES = {"a sharding": 1}


def rows() -> dict[str, tuple[set[str], str]]:
    """Kind → the files that its row names, and what it says to do."""
    page = (ROOT / "docs" / "contributing.md").read_text().partition("## Add one")[2].partition("\n## ")[0]
    found = {row["kind"]: (set(re.findall(r"`([^`]+)`", row["touch"])), row["what"]) for row in _ROW.finditer(page)}
    del found["to add"]
    return found


def naming(pattern: str) -> set[str]:
    """The package's files in which the pattern is found."""
    paths = [path for kind in ("py", "js", "csv", "toml") for path in (ROOT / "vramprobe").rglob(f"*.{kind}")]
    names = {str(path.relative_to(ROOT)) for path in paths if re.search(pattern, path.read_text(), re.MULTILINE)}
    return {name for name in names if not name.startswith(_OTHERS)}


def test_the_table_has_each_kind() -> None:
    others = {"a library release", "a memory-saving technique", "the CUDA context of a GPU"}
    assert set(rows()) == {*ONE_OF_EACH, *others}


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_each_file_that_names_one_is_in_its_row(kind: str) -> None:
    touch, what = rows()[kind]
    told = touch | set(re.findall(r"`([^`]+)`", what))
    missing = {name for name in naming(ONE_OF_EACH[kind]) if name not in told}
    assert missing == set()
    assert touch <= naming(ONE_OF_EACH[kind]), "the row names a file that has none"


@pytest.mark.parametrize("kind", MOST_FILES)
def test_adding_one_touches_a_handful_of_files(kind: str) -> None:
    touch, _ = rows()[kind]
    assert len(touch) + _OWN_MODULES.get(kind, 0) <= MOST_FILES[kind]
