"""Published files can be rebuilt from the records, and say what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from grids import exhaustive, grid

from vramprobe.records import store
from vramprobe.sweep.definition import load_sweep

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "results" / "cpu" / "quickstart"

PUBLISHED = ["results/claims", "results/emulated", "results/techniques"]


@pytest.mark.parametrize("what", grid(PUBLISHED, "results/techniques"))
def test_what_is_published_is_what_the_records_give(what: str) -> None:
    """Every committed table, page and plot: reports, the claims, the techniques."""
    words = [sys.executable, "tools/reports.py", "--check", what]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_committed_records_are_the_quickstart_sweeps_cells() -> None:
    sweep = load_sweep(ROOT / "configs" / "sweeps" / "quickstart.yaml", device="cpu")
    records = store.read(QUICKSTART).records
    assert {record.fingerprint for record in records} == {cell.fingerprint for cell in sweep.cells}
    assert {record.outcome.kind for record in records} == {"ok"}
    assert {record.fingerprint for record in records if record.held_out} == sweep.held_out
    assert not any(record.environment.dirty for record in records)


@pytest.mark.parametrize("pages", grid(["README.md", "docs", "benchmarks"], "README.md"))
def test_the_generated_blocks_of_the_pages_are_fresh(pages: str) -> None:
    words = [sys.executable, "tools/readme.py", "--check", pages]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@exhaustive
def test_what_the_sweep_files_say_they_cost_is_fresh() -> None:
    done = subprocess.run([sys.executable, "tools/planned.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("24gb", "48gb", "80gb", "h200"):
        assert re.search(r"#   about .* min, \$[0-9.]+ at ", (ROOT / "configs" / "sweeps" / f"{name}.yaml").read_text())


def test_the_readmes_commands_are_the_makefiles() -> None:
    makefile = (ROOT / "Makefile").read_text()
    target = makefile.split("\ndemo-gpu:")[1].split("\n\n")[0]
    commands = [line.replace("$(BIN)/", "").replace("$(DEMO)", "out/demo").strip() for line in target.splitlines()]
    demo = [line for line in commands if line.startswith("vramprobe ")]
    assert len(demo) == 4
    assert "\n".join(demo) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_sweep_file_expands(path: Path, device: str) -> None:
    assert load_sweep(path, device=device).cells
