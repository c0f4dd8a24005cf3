"""What is published can be rebuilt from the records, and says what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from grids import exhaustive, grid

from vramprobe.api import evaluate
from vramprobe.model.card_fit import load_fit
from vramprobe.records import store
from vramprobe.sweep.definition import load_sweep

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "results" / "cpu" / "quickstart"
SIZES = ROOT / "results" / "cpu" / "sizes"

PUBLISHED = ["results/cpu/quickstart", "results/cpu/sizes", "results/claims", "results/emulated"]


@pytest.mark.parametrize("what", grid(PUBLISHED, "results/cpu/quickstart"))
def test_what_is_published_is_what_the_records_give(what: str) -> None:
    """Every committed fit, table, page and plot: reports, the evaluation, the claims."""
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


def test_small_models_predict_larger_ones_to_a_thousandth_of_a_percent() -> None:
    """Five models up to 162M fitted; 47 cells of eleven from 355M to 1.5B held out, full, LoRA and QLoRA."""
    found = evaluate(SIZES)
    total = found.summaries[0]
    assert {score.record.spec.method for score in found.scores} == {"full", "lora", "qlora"}
    assert min(score.num_params for score in found.scores) > 350e6
    assert (total.num_records, len({score.record.spec.model for score in found.scores})) == (47, 11)
    assert total.worst_absolute < 1e-5
    assert total.coverage == 1.0  # larger models than any fitted: 1 % to each side
    worst_bytes = max(abs(score.predicted.value - score.measured_bytes) for score in found.scores)
    assert f"the worst of 47 is {worst_bytes} bytes" in (ROOT / "docs" / "model.md").read_text()


def test_the_demo_keeps_the_issues_promises() -> None:
    """At least 24 cells of four architectures fitted; a larger one held out, within 3 % on average."""
    records = store.read(QUICKSTART).records
    fitted = [record for record in records if not record.held_out]
    held_out = [record for record in records if record.held_out]
    assert len(fitted) >= 24
    assert len({record.spec.model for record in fitted}) >= 4
    assert (
        {record.spec.method for record in fitted}
        == {record.spec.method for record in held_out}
        == {"full", "lora", "qlora"}
    )
    assert min(r.facts.num_params for r in held_out) > max(r.facts.num_params for r in fitted)
    from vramprobe.predict.predict import predict

    model = load_fit(QUICKSTART / "fit.json")
    errors = []
    for record in held_out:
        predicted = predict(record.spec, model).peak_allocated_bytes.value
        errors.append(abs(predicted - record.peak.allocated_bytes) / record.peak.allocated_bytes)
    assert sum(errors) / len(errors) <= 0.03


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
    commands = [line.replace("$(BIN)/", "").replace("$(DEMO)", "out/demo").strip() for line in makefile.splitlines()]
    demo = [
        line for line in commands if line.startswith("vramprobe ") and "emulate" not in line and not line.endswith("\\")
    ]
    assert len(demo) == 4
    assert "\n".join(demo) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_sweep_file_expands(path: Path, device: str) -> None:
    assert load_sweep(path, device=device).cells
