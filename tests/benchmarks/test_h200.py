"""The plumbing of the H200 campaign: its sweeps resolve and fit their boxes, and its scripts say what they should."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from factories import make_environment, make_record, make_spec
from grids import grid

from vramprobe import api, catalog
from vramprobe.records import store
from vramprobe.records.record import Oom, Peak, RunRecord, Timing
from vramprobe.sweep.definition import Sweep, load_sweep
from vramprobe.sweep.plan import Policy

ROOT = Path(__file__).parents[2]
STAGES = ROOT / "benchmarks" / "gpu"
SWEEPS = ROOT / "configs" / "sweeps"
CALIBRATION, EDGES, SPEED = "h200-calibration", "h200-edges", "h200-speed"
HELD_OUT = ("h200-held-out", "h200-claims")
NAMES = (CALIBRATION, *HELD_OUT, EDGES, SPEED)
#: A stage ends what it has begun within ten minutes, so no more than nine may be planned.
BOX_SECONDS = 9 * 60
#: What stage.sh gives a cell before it takes it for hung.
CELL_SECONDS = 240


@pytest.fixture(scope="module", autouse=True)
def _scripts() -> Any:
    sys.path.insert(0, str(ROOT))
    yield
    sys.path.remove(str(ROOT))


def script(name: str) -> ModuleType:
    import importlib

    return importlib.import_module(f"benchmarks.{name}")


@pytest.fixture(scope="module")
def sweeps() -> dict[str, Sweep]:
    return {name: load_sweep(SWEEPS / f"{name}.yaml", device="cuda") for name in NAMES}


def test_every_sweep_of_the_campaign_has_its_stage() -> None:
    text = (STAGES / "stage.sh").read_text()
    assert sorted(re.findall(r"(?<!\w)sweep (h200-[\w-]+)", text)) == sorted(NAMES)
    assert f"${{CELL_SECONDS:-{CELL_SECONDS}}}" in text
    subprocess.run(["bash", "-n", STAGES / "stage.sh"], check=True)
    usage = subprocess.run(
        ["bash", STAGES / "stage.sh", "6"],
        env={"OUT": "/dev/null/no", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert usage.returncode != 0


def stages_run(tmp_path: Path, python: str) -> tuple[int, list[str]]:
    env = {"OUT": str(tmp_path / "out"), "PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), "PYTHON": python}
    done = subprocess.run(["bash", STAGES / "stage.sh", "all"], env=env, capture_output=True, text=True)
    return done.returncode, re.findall(r"^== stage (\w+)$", done.stdout, re.MULTILINE)


def test_one_command_runs_every_stage_and_says_whether_one_failed(tmp_path: Path) -> None:
    stages = ["0", "tests", "1", "predict", "2", "3", "snapshots", "4", "5", "compare"]
    assert stages_run(tmp_path, "/bin/true") == (0, stages)
    status, ran = stages_run(tmp_path, "/bin/false")
    assert status != 0
    assert ran == stages
    (tmp_path / "out" / "predictions-fitted.json").touch()
    assert stages_run(tmp_path, "/bin/true") == (0, [stage for stage in stages if stage != "predict"])


def test_there_are_cells_enough_and_the_fit_sees_none_that_it_is_judged_by(sweeps: dict[str, Sweep]) -> None:
    cells = {name: {spec.fingerprint for spec in sweep.cells} for name, sweep in sweeps.items()}
    assert len(cells[CALIBRATION]) >= 120
    assert len(set.union(*cells.values())) >= 200
    assert not sweeps[CALIBRATION].held_out
    for name in set(NAMES) - {CALIBRATION}:
        assert sweeps[name].held_out == cells[name], name
        assert not cells[name] & cells[CALIBRATION], name
        assert not sweeps[name].notes, name  # no cell stands twice
    fitted = max(spec.num_params for spec in sweeps[CALIBRATION].cells)
    assert fitted < min(spec.num_params for spec in sweeps["h200-held-out"].cells)


@pytest.mark.parametrize("name", grid(NAMES, EDGES, SPEED))
def test_a_stage_is_planned_within_its_box(name: str, tmp_path: Path) -> None:
    plan = api.plan(
        SWEEPS / f"{name}.yaml",
        gpu="H200",
        out=tmp_path,
        engine="formula",
        policy=Policy(skip=False, replicate_share=0.05),
    )
    assert plan.seconds <= BOX_SECONDS
    assert 2 * max(row.seconds for row in plan.rows) <= CELL_SECONDS
    assert "skip" not in plan.actions()


def test_the_claims_sweep_is_what_its_script_makes() -> None:
    claims_sweep = script("gpu.claims_sweep")
    assert claims_sweep.without_plan(claims_sweep.TARGET.read_text()) == claims_sweep.content(), (
        "stale: python benchmarks/gpu/claims_sweep.py, then python tools/planned.py"
    )


def test_each_claims_cell_is_one_that_its_claims_are_judged_by(sweeps: dict[str, Sweep]) -> None:
    from vramprobe.literature.claims.cells import Cells
    from vramprobe.literature.claims.rules import cells_of

    cells, claims = Cells(), {claim.id: claim for claim in catalog.list_claims()}
    lines = [line for line in (SWEEPS / "h200-claims.yaml").read_text().splitlines() if line.startswith("  - {")]
    assert len(lines) == len(sweeps["h200-claims"].cells)
    for line, spec in zip(lines, sweeps["h200-claims"].cells, strict=True):
        for name in line.partition("# ")[2].split(", "):
            meant = [cells.spec(options) for options in cells_of(claims[name])]
            assert spec.fingerprint in {one.model_copy(update={"timing_steps": 0}).fingerprint for one in meant}


@pytest.mark.parametrize("name", NAMES)
def test_the_stand_ins_are_tiny_and_have_the_same_axes(name: str, tmp_path: Path) -> None:
    source = SWEEPS / f"{name}.yaml"
    done = subprocess.run([sys.executable, STAGES / "tiny.py", source, tmp_path], capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / source.name), done.stderr
    tiny = load_sweep(tmp_path / source.name, device="cpu")
    real = load_sweep(source, device="cuda")
    assert tiny.name == real.name
    assert {spec.method for spec in tiny.cells} == {spec.method for spec in real.cells}
    assert {spec.model_label for spec in tiny.cells} == {spec.model_label for spec in real.cells}
    assert {spec.kbit_prep for spec in tiny.cells} == {spec.kbit_prep for spec in real.cells}
    assert max(spec.num_params for spec in tiny.cells) < 1_000_000
    blocks = [len(yaml.safe_load(path.read_text())["cells"]) for path in (source, tmp_path / source.name)]
    assert blocks[0] == blocks[1]


# --- predictions and what became of them ---


def measured(spec: Any, *, share: float = 1.0, **overrides: Any) -> RunRecord:
    """A GPU's record of the cell, whose peak is ``share`` of a gigabyte."""
    size = round(share * 10**9)
    peak = Peak(
        phase="backward",
        step=2,
        allocated_bytes=size,
        reserved_bytes=2 * size,
        device_bytes=3 * size,
        load_allocated_bytes=1,
    )
    return make_record(spec, **({"peak": peak} | overrides))


def predicted(spec: Any, value: int) -> dict[str, Any]:
    tiers = {
        tier: [times * value, times * value - 1, times * value + 1]
        for times, tier in enumerate(("allocated", "reserved", "device"), 1)
    }
    return {
        "cell_id": spec.cell_id,
        "fingerprint": spec.fingerprint,
        "method": spec.method,
        "formula": tiers,
        "trace": "no such thing",
    }


def test_what_is_measured_can_no_longer_be_predicted(tmp_path: Path) -> None:
    predictions = script("gpu.predictions")
    cells = [make_spec(), make_spec(seq_len=32)]
    assert predictions.measured_already(tmp_path, cells) == []
    store.append(tmp_path / "records.jsonl", make_record(make_spec(seq_len=64)))
    assert predictions.measured_already(tmp_path, cells) == []
    store.append(tmp_path / "records.jsonl", make_record(cells[1]))
    assert predictions.measured_already(tmp_path, cells) == [cells[1].cell_id]
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(f"cells: [{{model: {cells[1].model}, method: full, batch_size: 2, seq_len: 32}}]")
    before = sorted(tmp_path.iterdir())
    command = [sys.executable, STAGES / "predictions.py", tmp_path, sweep, "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "are measured already" in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_the_committed_predictions_are_of_the_sweeps_cells_and_clean(sweeps: dict[str, Sweep]) -> None:
    """A sweep that changes before it is run is predicted anew: bash benchmarks/gpu/stage.sh predict."""
    content = json.loads((ROOT / "results" / "h200" / "predictions.json").read_text())
    assert content["kind"].startswith("predictions, made before the cells were run; nothing here is measured")
    assert content["dirty"] is False
    told = {cell["fingerprint"]: cell for cell in content["cells"]}
    assert set(told) == {spec.fingerprint for name in HELD_OUT for spec in sweeps[name].cells}
    for cell in told.values():
        assert cell["trace"]["allocated"][0] <= cell["trace"]["reserved"][0], cell["cell_id"]


def test_a_prediction_is_written_by_both_engines_in_the_tiers_that_are_known() -> None:
    predictions = script("gpu.predictions")
    spec = make_spec()
    row = predictions.row(spec, "s", {"formula": predictions.by_formula(spec, None), "trace": "not this one"})
    value, low, high = row["formula"]["allocated"]
    assert low <= value <= high
    assert set(row["formula"]) == {"allocated"}  # without a fit, arithmetic knows no other tier
    assert row["trace"] == "not this one"
    assert "no arithmetic" in predictions.by_formula(make_spec(padding=True), None)
    content = {"kind": "k", "cells": [row, row]}
    text = predictions.text_of(content)
    assert json.loads(text) == content
    assert sum(line.startswith("  {") for line in text.splitlines()) == 2


def test_errors_are_by_engine_tier_and_method() -> None:
    compare = script("gpu.compare")
    full, lora = make_spec(), make_spec(method="lora")
    records = {one.fingerprint: measured(one, share=share) for one, share in ((full, 1.0), (lora, 2.0))}
    content = {"cells": [predicted(full, 10**9), predicted(lora, 18 * 10**8)]}
    pairs = compare.pairs_of(content, records)
    assert {pair.engine for pair in pairs} == {"formula"}
    errors = {(pair.tier, pair.method): pair.error for pair in pairs}
    assert errors == {
        (tier, method): pytest.approx(error)
        for tier in compare.TIERS
        for method, error in (("full", 0.0), ("lora", -0.1))
    }
    table = compare.accuracy(pairs)
    assert "| formula | allocated | full | 1 | 0.00 % | 0.00 % | – | 1 of 1 | – |" in table
    assert (
        "| formula | allocated | all | 2 | 5.00 % | -10.00 % | -10.00 % | 1 of 2 | missed: 1 % mean, 3 % worst |"
        in table
    )
    assert "| met: 1 % mean, 3 % worst |" in compare.accuracy([pair for pair in pairs if pair.method == "full"])
    assert "No cell" in compare.accuracy([])


def test_a_cell_that_ran_out_of_memory_is_named_and_no_error() -> None:
    compare = script("gpu.compare")
    spec = make_spec()
    gone = make_record(spec, outcome=Oom(phase="backward", message="out"))
    content, records = {"cells": [predicted(spec, 10**9)]}, {spec.fingerprint: gone}
    assert compare.pairs_of(content, records) == []
    assert compare.out_of_memory(content, records) == [spec.cell_id]


def test_a_prediction_that_came_late_is_told(tmp_path: Path) -> None:
    compare = script("gpu.compare")
    spec = make_spec()
    record = measured(spec)
    for days, said in ((-1, False), (1, True)):
        moment = datetime.fromisoformat(record.started_at) + timedelta(days=days)
        content = {
            "made_at": moment.isoformat(),
            "commit": "c",
            "dirty": False,
            "fit": None,
            "card": None,
            "cells": [predicted(spec, 10**9)],
        }
        (tmp_path / "predictions.json").write_text(json.dumps(content))
        text = "".join(compare.predicted(tmp_path, {spec.fingerprint: record}))
        assert "1 of 1 cells run since" in text
        assert ("1 BEFORE it was made" in text) is said


def test_cells_that_were_run_on_another_gpu_than_predicted_are_told() -> None:
    compare = script("gpu.compare")
    on = {
        name: make_record(environment=make_environment(device_name=name))
        for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
    }
    said = compare.run_elsewhere("H200 SXM", list(on.values()))
    assert said.startswith("1 of them on NVIDIA H100 80GB HBM3, not on the H200 SXM")
    assert compare.run_elsewhere("H200 SXM", [on["NVIDIA H200"]]) is None
    assert compare.run_elsewhere(None, list(on.values())) is None  # predicted for a CPU


#: Stands for python3: as a sweep it writes a record, a lock and a failed cell's log, and ends as it is told.
STUB = """#!/bin/sh
folder=$(echo "$*" | sed 's/.*--out \\([^ ]*\\).*/\\1/')
echo '{{}}' >> $folder/records.jsonl
touch $folder/.lock
echo why > $folder/logs/cell.log
{end}
"""


@pytest.mark.parametrize(
    ("end", "status", "left"),
    [
        ("exit 1", 1, {"h200-edges/records.jsonl", "h200-edges.logs.tgz"}),
        ("kill -KILL $PPID", -9, {"h200-edges/records.jsonl", "h200-edges/.lock"}),  # the ten minutes are over
    ],
    ids=["ended", "killed"],
)
def test_a_stage_leaves_few_files_to_carry_home(end: str, status: int, left: set[str], tmp_path: Path) -> None:
    """Eight come back from a lent machine: logs must not take the records' place."""
    stub = tmp_path / "python"
    stub.write_text(STUB.format(end=end))
    stub.chmod(0o755)
    out = tmp_path / "out"
    for _ in range(2):  # a second time, on what the first one left
        done = subprocess.run(["bash", STAGES / "stage.sh", "3"], env=lent(tmp_path, out, PYTHON=str(stub)))
        assert done.returncode == status
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file() and not path.is_symlink()}
    assert {name for name in files if "/logs/" not in name} == left
    assert not [path for path in out.rglob("logs") if path.is_dir() and not path.is_symlink()]


def lent(tmp_path: Path, out: Path, **more: str) -> dict[str, str]:
    site = tmp_path / "site"
    site.mkdir(exist_ok=True)
    (site / ".done").touch()  # the wheels are installed
    return {"OUT": str(out), "SITE": str(site), "PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)} | more


def test_a_lent_call_takes_up_what_was_measured_and_starts_nothing_late(tmp_path: Path) -> None:
    before = tmp_path / "results" / "h200-speed" / "records.jsonl"
    before.parent.mkdir(parents=True)
    before.write_text("{}\n")
    out = tmp_path / "out"
    out.mkdir()
    env = lent(tmp_path, out, RESULTS=str(tmp_path / "results"), CALL_SECONDS="0", PYTHON="/bin/false")
    done = subprocess.run(["bash", STAGES / "lent.sh", "4", "3"], env=env, capture_output=True, text=True)
    assert done.returncode == 124
    assert done.stderr.count("no time left") == 2
    assert "VRAMPROBE_COMMIT is not set" in done.stderr
    assert [path for path in out.rglob("*") if path.is_file()] == [out / "h200-speed" / "records.jsonl"]


def test_a_rate_is_tokens_over_the_median_step() -> None:
    compare = script("gpu.compare")
    spec = make_spec()
    timing = Timing(step_seconds=[0.5, 0.1, 0.2], total_seconds=1.0)
    assert f"| {spec.cell_id} | 3 | 0.2000 | 160 | – |" in compare.speed([make_record(spec, timing=timing)])
    assert "Nothing timed" in compare.speed([make_record(spec, timing=timing.model_copy(update={"step_seconds": []}))])


def test_the_time_of_a_sweep_adds_up() -> None:
    sweep_time = script("speed.sweep_time")
    began = datetime(2026, 3, 1, tzinfo=UTC)

    def attempt(seconds: float, **timing: Any) -> RunRecord:
        outcome = {} if timing else {"outcome": Oom(phase="load", message="out")}
        moment = (began + timedelta(seconds=seconds)).isoformat()
        return make_record(started_at=moment, timing=Timing(total_seconds=10.0, **timing), **outcome)

    whole = {
        "load_seconds": 2.0,
        "first_step_seconds": 1.0,
        "traced_seconds": 3.0,
        "history_seconds": 0.5,
        "step_seconds": [0.25, 0.25],
    }
    time = sweep_time.sweep_time([attempt(0, **whole), attempt(12), attempt(1000, **whole)])  # and a pause
    assert (time.num_attempts, time.wall_seconds) == (3, 32.0)
    assert (time.load_seconds, time.warm_up_seconds, time.step_seconds) == (4.0, 2.0, 6.0)
    assert (time.failed_seconds, time.overhead_seconds) == (10.0, 10.0)
    older = {key: value for key, value in whole.items() if key != "first_step_seconds"}
    assert sweep_time.sweep_time([attempt(0, **older)]).row()[4] == "–"
    assert sweep_time.sweep_time([]) is None


def test_every_fact_that_a_cpu_knows_is_of_a_closed_form() -> None:
    """By hand for a llama of width 2, MLP 3, one head of size 4: the seven linears and their adapters."""
    facts = script("gpu.facts")
    widths = facts.Widths(h=2, f=3, q=4, kv=4, n_h=1)
    assert widths.params == 2 * 4 * 2 + 2 * 2 * 4 + 3 * 2 * 3
    assert widths.inputs == 3 * 2 + 4 + 2 * 2 + 3  # q, k, v; o; gate, up; down
    assert widths.lora == 8 * ((2 + 4) * 3 + (4 + 2) + (2 + 3) * 3)
    assert widths.attention == 2 * 16 + 4
    assert facts.SAVED["full, all bf16"][1](widths, 1) == 16 * 2 + 8 * 3 + 36 + 8


class Bench:
    """Facts' bench, of made-up records: what the caching allocator adds to what was asked for is in ``slack``."""

    device = "cuda"

    def __init__(self, kernels: dict[bool, list[str]] | None = None, reserved: Any = (0,)) -> None:
        self.kernels, self.reserved, self.failing = kernels or {}, iter(reserved), "full"

    def run(self, size: Any, **options: Any) -> Any:
        if options["method"] == self.failing:
            raise RuntimeError("out of memory")
        facts = SimpleNamespace(attention_kernels=self.kernels.get(options.get("padding", False), []))
        slack = 900_000 * (size.num_layers == 6)
        phase = SimpleNamespace(
            name="backward",
            requested_peak_bytes=10**6 * size.num_layers,
            allocated_peak_bytes=10**6 * size.num_layers + slack,
        )
        peak = SimpleNamespace(allocated_bytes=phase.allocated_peak_bytes, reserved_bytes=next(self.reserved, 0))
        ledger = SimpleNamespace(saved_activations_bytes=0, unaccounted_bytes=0)
        spec = SimpleNamespace(num_tokens=512)
        return SimpleNamespace(facts=facts, phases=[phase], peak=peak, ledger=ledger, spec=spec, context_bytes=None)


def test_a_case_that_fails_leaves_the_others_to_be_measured() -> None:
    facts = script("gpu.facts")
    found = list(facts.saved_activations(Bench()))
    assert len(found) == 2 * len(facts.SAVED)
    assert [fact.says for fact in found].count("the check itself failed") == 4  # two of full, at two sizes
    assert not any(fact.holds for fact in found)


def test_facts_are_of_what_was_asked_for_and_not_of_what_the_allocator_adds() -> None:
    facts, bench = script("gpu.facts"), Bench()
    bench.failing = "none"
    assert all(fact.holds for fact in facts.depth(bench))


@pytest.mark.parametrize(("reserved", "holds"), [((0, 20 * 2**20), True), ((0, 20 * 2**20 + 1), False)])
def test_a_replicate_may_reserve_a_segment_more(reserved: Any, holds: bool) -> None:
    facts = script("gpu.facts")
    found = {fact.name: fact for fact in facts.repeats(Bench(reserved=reserved))}
    assert found["replicates: reserved"].holds is holds
    assert found["replicates: allocated"].holds is True


@pytest.mark.parametrize(
    ("without", "padded", "holds"),
    [
        ("ScaledDotProductFlashAttention", "ScaledDotProductEfficientAttention", True),
        ("ScaledDotProductFlashAttention", "ScaledDotProductFlashAttention", False),
        ("ScaledDotProductCudnnAttention", "ScaledDotProductCudnnAttention", None),  # no flash to be turned off
    ],
)
def test_padding_turns_flash_off_only_where_it_was_on(without: str, padded: str, holds: bool | None) -> None:
    facts, bench = script("gpu.facts"), Bench({False: [without], True: [padded]})
    bench.failing = "none"
    (found,) = facts.attention(bench)
    assert found.holds is holds


def test_facts_are_written_as_they_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = script("gpu.facts")
    monkeypatch.setattr(facts, "Bench", lambda *arguments: nullcontext(Bench()))
    told = facts.Fact(name="one", says="", expected=None, found=1.0, unit="", holds=True)

    def breaks(bench: Any) -> Any:
        yield told
        assert json.loads((tmp_path / "facts.json").read_text())[0]["name"] == "one"
        raise ValueError("broken")

    monkeypatch.setattr(facts, "CHECKS", (breaks,))
    assert [fact.holds for fact in facts.check_all("cuda", tmp_path / "facts.json")] == [True, False]
    assert "broken" in (tmp_path / "facts.json").read_text()


def test_snapshots_compare_like_cells() -> None:
    snapshots = script("gpu.snapshots")
    cells = snapshots.specs()
    assert len({spec.fingerprint for spec in cells}) == len(cells) == len(snapshots.CELLS)
    assert {spec.method for spec in cells} == {"full", "lora", "qlora"}


@pytest.mark.parametrize(("said", "known"), [("0" * 40, "0" * 40), ("main", None), ("", None)])
def test_a_copy_without_git_says_which_commit_it_was_taken_from(
    said: str, known: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lent machine gets the files alone."""
    from vramprobe.measure import environment

    monkeypatch.setattr(environment, "__file__", str(tmp_path / "vramprobe" / "measure" / "environment.py"))
    monkeypatch.setenv("VRAMPROBE_COMMIT", said)
    assert environment._commit.__wrapped__() == (known, None)


def test_a_comparison_of_nothing_is_one_line(tmp_path: Path) -> None:
    """``stage.sh compare`` before any stage has run."""
    done = subprocess.run([sys.executable, STAGES / "compare.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("compare.py: no .jsonl file in ")
    assert done.stderr.count("\n") == 1
