"""Campaigns: files and their mistakes, stages in their order, boundaries found with few cells, kills, one budget.

Cells are played: their peak is a hidden multiple of what is predicted, and what is above the card runs out of memory.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from command_line import vramprobe
from emulated import require_emulation
from factories import TINY_LLAMA_PATH, make_environment, make_record, make_spec, synthetic

from vramprobe import api
from vramprobe.errors import SpecError
from vramprobe.measure.isolation import new_ticket
from vramprobe.predict.questions import given_fit
from vramprobe.records import store
from vramprobe.records.outcomes import Error, Oom
from vramprobe.records.record import Environment, RunRecord
from vramprobe.spec import CellSpec
from vramprobe.sweep import runner, stages
from vramprobe.sweep.bookkeeping import Bookkeeping
from vramprobe.sweep.boundary import Predicted, next_steps, predicted_counts
from vramprobe.sweep.campaign import Campaign, campaign_in
from vramprobe.sweep.card import Card, Rate
from vramprobe.sweep.definition import Sweep
from vramprobe.sweep.jobs import Job
from vramprobe.sweep.limits import limits
from vramprobe.sweep.on_data import Data
from vramprobe.sweep.plan import SweepPolicy
from vramprobe.sweep.progress import Progress, RunSummary
from vramprobe.units import GIB

SEEN = make_environment(device_name="Test GPU", nvml_total_bytes=8 * GIB)
CARD = Card(name="Test GPU", total_bytes=8 * GIB, gpu=None)
WHOLE = """
name: whole
stages:
  largest:
    boundary: batch_size
    predict_with: model
    after: held-out
    sweep:
      cells: [{model: [smollm2-135m, smollm2-360m], method: lora, gradient_checkpointing: true, seq_len: 2048}]
  held-out:
    predict_with: model
    sweep: {cells: [{model: smollm2-360m, method: lora, batch_size: 2, seq_len: [512, 1024]}]}
  model: {fit: calibration}
  calibration:
    sweep:
      cells: [{model: smollm2-135m, method: lora, batch_size: 2, seq_len: [512, 544, 576, 608, 640, 672, 704, 736]}]
"""


class Killed(BaseException):
    """The process is gone: nothing after it is written."""


class Played:
    """Runs sweeps as api.run does, on a card of 8 GiB whose cells take ``true`` times what is predicted."""

    num_slots = 1

    def __init__(self, dies: Callable[[], bool] = lambda: False, true: float = 1.03) -> None:
        self.ran: list[CellSpec] = []
        self._dies, self._true = dies, true
        self.seconds_each = 0.0

    def __call__(
        self,
        load: Callable[..., Sweep],
        *,
        choose: Callable[[Job], Sweep],
        out: Path,
        on_event: Callable[[Progress], None],
        fit: Path | None = None,
        **given: Any,
    ) -> RunSummary:
        job = Job(load(device="cuda", overrides={}), out, CARD, given_fit(fit), Rate(3600.0, "a dollar a second"))
        return runner.run(
            choose(job),
            out,
            card=CARD,
            fit=job.fit,
            rate=job.rate,
            executor=self,
            on_event=on_event,
            policy=SweepPolicy(audit_share=0.0),
            limits=limits(job.rate, **given),
        )

    def context_of(self, spec: CellSpec) -> Environment:
        return SEEN

    def instrument_of(self, spec: CellSpec) -> str:
        return "cuda"

    def require(self, specs: Iterable[CellSpec]) -> None: ...

    def run(self, books: Bookkeeping) -> None:
        books.describe = lambda spec, outcome: make_record(spec, instrument="cuda", outcome=outcome, environment=SEEN)
        for index, row in enumerate(books.plan.rows, start=1):
            event = books.due(index, row)
            if event is not None:
                ticket = new_ticket(books.logs)
                event = books.announce(event, ticket)
                books.clock.begin()
                books.journal_start(event, ticket)
                if self._dies():
                    raise Killed
                self.ran.append(row.spec)
                record = self.record(row.spec).model_copy(update={"attempt_id": ticket.attempt_id})
                books.finish(event, ticket, record, 0.1)

    def record(self, spec: CellSpec) -> RunRecord:
        found = synthetic(spec, self._true, instrument="cuda", environment=SEEN)
        if found.peak.allocated_bytes < 7 * GIB:
            return found
        outcome = Oom(phase="backward", step=1, requested_bytes=GIB, allocated_bytes=7 * GIB, message="out of memory")
        return make_record(spec, instrument="cuda", environment=SEEN, outcome=outcome)


def campaign(folder: Path, text: str = WHOLE) -> Campaign:
    file = folder / "some.yaml"
    file.write_text(text)
    found = campaign_in(file)
    assert found is not None
    return found


def run(asked: Campaign, folder: Path, played: Played, **words: Any) -> dict[str, stages.StageResult]:
    results = stages.run_stages(asked, folder, played, on_stage=lambda name: lambda event: None, **words)
    return {result.name: result for result in results}


def test_stages_run_in_the_order_of_what_they_need_and_a_boundary_is_found_by_few_cells(tmp_path: Path) -> None:
    played = Played()
    results = run(campaign(tmp_path), tmp_path / "out", played)
    assert list(results) == ["calibration", "model", "held-out", "largest"]
    assert results["model"].fit.num_records == 8
    assert results["held-out"].mean_absolute_error < 0.02
    for one in results["largest"].boundaries:
        assert one.is_exact, one
        ends = [played.record(one.spec.model_copy(update={"batch_size": size})) for size in (one.runs, one.fails)]
        assert [end.outcome.kind for end in ends] == ["ok", "oom"]
    assert len(played.ran) <= 8 + 2 + 2 * 5
    again = Played()
    kept = run(campaign(tmp_path), tmp_path / "out", again)
    assert again.ran == []
    assert kept["largest"].boundaries == results["largest"].boundaries


def test_predictions_are_written_before_the_cells_run_and_are_not_changed_later(tmp_path: Path) -> None:
    asked, out = campaign(tmp_path), tmp_path / "out"
    run(asked, out, Played())
    file = out / "held-out" / stages.PREDICTIONS
    before = file.read_text()
    assert {len(json.loads(before))} == {2}
    (out / "model" / stages.FIT).unlink()
    with (out / "calibration" / runner.JOURNAL).open("a") as journal:  # one more record: another fit
        spec = asked.sweep("calibration", device="cuda", overrides={"batch_size": 4}).cells[0]
        journal.write(Played().record(spec).to_json_line() + "\n")
    run(asked, out, Played())
    assert file.read_text() == before


@pytest.mark.parametrize("seed", range(3))
def test_a_kill_at_any_moment_costs_the_running_cell_alone(seed: int, tmp_path: Path) -> None:
    expected = run(campaign(tmp_path), tmp_path / "whole", Played())
    starts, deaths = itertools.count(), random.Random(seed).sample(range(0, 14, 2), 4)  # never a cell three times
    played = Played(dies=lambda: next(starts) in deaths)
    for _ in deaths:
        with pytest.raises(Killed):
            run(campaign(tmp_path), tmp_path / "out", played)
    results = run(campaign(tmp_path), tmp_path / "out", played)
    assert results["largest"].boundaries == expected["largest"].boundaries
    assert results["model"].fit.data_fingerprint == expected["model"].fit.data_fingerprint
    found = Counter(record.fingerprint for record in store.read(tmp_path / "out").records)
    assert found == Counter(record.fingerprint for record in store.read(tmp_path / "whole").records)
    assert max(found.values()) == 1


def test_limits_are_for_all_stages_and_a_budget_counts_earlier_runs(tmp_path: Path) -> None:
    asked, out = campaign(tmp_path), tmp_path / "out"
    first = run(asked, out, Played(), max_cells=9)
    assert {name: result.stopped_by for name, result in first.items()} == {
        "calibration": None,
        "model": None,
        "held-out": "limit",
    }
    assert json.loads((out / stages.SPENT).read_text())["dollars"] > 0
    (out / stages.SPENT).write_text('{"dollars": 1e6}')
    played = Played()
    assert list(run(asked, out, played, max_dollars=1e6 + 1).values())[-1].stopped_by == "budget"
    assert played.ran == []
    assert run(asked, out, played, max_dollars=2e6)["largest"].stopped_by is None


def test_a_limit_that_one_stage_has_used_up_lets_the_next_begin_nothing(tmp_path: Path) -> None:
    played = Played()
    results = run(campaign(tmp_path), tmp_path / "out", played, max_cells=8)
    assert (len(played.ran), list(results)[-1], results["held-out"].stopped_by) == (8, "held-out", "limit")


def test_a_cell_that_fails_ends_the_search_and_is_tried_again_by_the_next_run(tmp_path: Path) -> None:
    class Broken(Played):
        def record(self, spec: CellSpec) -> RunRecord:
            if spec.batch_size < 3:
                return super().record(spec)
            failed = Error(error_type="ValueError", message="boom")
            return make_record(spec, instrument="cuda", environment=SEEN, outcome=failed)

    asked, broken = campaign(tmp_path), Broken()
    found = run(asked, tmp_path / "out", broken)["largest"].boundaries
    assert [one.next_count for one in found] == [None, None]
    assert all(one.why.endswith("ended as error") for one in found)
    assert max(Counter(spec.fingerprint for spec in broken.ran).values()) == 1
    assert all(one.is_exact for one in run(asked, tmp_path / "out", Played())["largest"].boundaries)


@pytest.mark.parametrize("truth", range(0, 41))
def test_the_search_ends_at_the_truth_wherever_it_is(truth: int) -> None:
    """Whatever was predicted, as long as the interval holds it; with few cells where the prediction is right."""
    for likely in (1, 5, 20, 39):
        predicted, runs, fails, num_cells = (
            Predicted(surely=min(likely, truth), likely=likely, possibly=40),
            None,
            None,
            0,
        )
        while (steps := next_steps(predicted, runs, fails)) is not None:
            num_cells += 1
            assert runs is None or steps > runs
            assert fails is None or steps < fails
            runs, fails = (steps, fails) if steps <= truth else (runs, steps)
        assert (runs or 0) == truth
        assert fails == (truth + 1 if truth < 40 else None)
        assert num_cells <= 2 + 2 * abs(truth - likely).bit_length()


def test_without_a_recipe_the_search_begins_at_one_step() -> None:
    spec = make_spec(device="cuda")
    predicted = predicted_counts(spec, "seq_len", 4, CARD, None)
    assert predicted == Predicted(surely=0, likely=1, possibly=2**20)
    assert [next_steps(predicted, *known) for known in ((None, None), (1, None), (9, None), (9, 12))] == [1, 2, 17, 10]


def test_nothing_is_fitted_to_emulated_runs(tmp_path: Path) -> None:
    class Emulated(Played):
        def instrument_of(self, spec: CellSpec) -> str:
            return "emulated"

        def record(self, spec: CellSpec) -> RunRecord:
            return super().record(spec).model_copy(update={"instrument": "emulated"})

    results = run(campaign(tmp_path), tmp_path / "out", Emulated(true=1.0))
    assert results["model"].fit is None
    assert results["held-out"].mean_absolute_error == 0
    assert all(one.is_exact for one in results["largest"].boundaries)


def test_a_prediction_without_room_runs_nothing() -> None:
    assert next_steps(Predicted(surely=0, likely=0, possibly=0), None, None) is None


STAGES = "stages:\n  one: {sweep: quickstart}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stages: {one: {}}", "stages → one: give either sweep or fit"),
        (
            STAGES + "  two: {fit: [one], boundary: seq_len}",
            "stages → two: boundary and predict_with belong to a sweep",
        ),
        (STAGES + "  two: {sweep: quickstart, step: 2}", "stages → two: step belongs to a boundary"),
        (STAGES + "  two: {fit: [tow]}", "stage two: no stage 'tow'; the stages are one, two"),
        (STAGES + "  two: {sweep: quickstart, predict_with: one}", "stage two: predict_with one is no fit"),
        (STAGES + "  two: {fit: one}\n  three: {fit: two}", "stage three: two is a fit and has no records"),
        ("stages: {a: {sweep: quickstart, after: b}, b: {sweep: quickstart, after: a}}", "stages wait for each other"),
        (
            STAGES + "  two: {sweep: quickstart, boundary: lora_r}",
            "boundary: Input should be 'batch_size' or 'seq_len'",
        ),
        (STAGES + "  two: {sweeep: quickstart}", "stages → two → sweeep: Extra inputs are not permitted"),
        (STAGES + "  a/b: {sweep: quickstart}", "should match pattern"),
    ],
)
def test_each_mistake_has_its_message(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        campaign(tmp_path, text)
    assert said in str(caught.value)
    assert "some.yaml" in str(caught.value)


def test_a_sweep_is_no_campaign_and_a_campaign_takes_no_options_of_one(tmp_path: Path) -> None:
    assert campaign_in("quickstart") is None
    with pytest.raises(SpecError, match="it has no stages"):
        api.campaign("quickstart")
    with pytest.raises(SpecError, match="--shard is for a sweep"):
        api.campaign("edges", shard="1/2")
    with pytest.raises(SpecError, match="--lengths is for a sweep"):
        api.campaign("edges", data=Data([5]))
    with pytest.raises(SpecError, match="needs a folder for its results"):
        api.campaign("edges", on="ray")


def test_a_campaign_may_come_through_a_pipe(tmp_path: Path) -> None:
    """It is read once."""
    pipe = tmp_path / "piped.yaml"
    os.mkfifo(pipe)
    content = (Path(__file__).parents[2] / "vramprobe" / "data" / "campaigns" / "edges.yaml").read_text()
    command = ["plan", str(pipe), "--gpu", "RTX-4090", "--out", str(tmp_path / "out")]
    process = subprocess.Popen([sys.executable, "-m", "vramprobe", *command], stdout=subprocess.PIPE, text=True)
    pipe.write_text(content)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "stage calibration" in said


def test_the_campaign_that_ships_is_planned_for_a_gpu(tmp_path: Path) -> None:
    plans = api.plan_campaign("edges", gpu="RTX-4090", out=tmp_path)
    assert list(plans) == ["calibration", "held-out", "largest-batch", "longest-sequence"]
    for name in ("largest-batch", "longest-sequence"):
        assert {row.verdict for row in plans[name].rows} <= {"fits", "risky"}
    assert all(row.spec.seq_len % 256 == 0 for row in plans["longest-sequence"].rows)


def test_a_boundary_needs_a_gpu(tmp_path: Path) -> None:
    sweep = f"{{cells: [{{model: {TINY_LLAMA_PATH}, method: full, seq_len: 8}}]}}"
    (tmp_path / "some.yaml").write_text(f"stages: {{edge: {{boundary: batch_size, sweep: {sweep}}}}}")
    done = vramprobe("run", "some.yaml", "--device", "cpu", "--out", "out", cwd=tmp_path)
    assert done.returncode == 1
    assert "there is none here; --emulate GPU gives one" in done.stderr


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_an_emulated_card_runs_out_of_memory_right_behind_the_boundary(tmp_path: Path) -> None:
    require_emulation()
    sweep = (
        "{defaults: {timing_steps: 0, limit_vram: 2GiB}, cells: [{model: smollm2-135m, method: lora, seq_len: 256}]}"
    )
    (tmp_path / "some.yaml").write_text(f"stages: {{edge: {{boundary: batch_size, sweep: {sweep}}}}}")
    done = vramprobe("run", "some.yaml", "--emulate", "RTX-4090", "--out", "out", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (boundary,) = json.loads(done.stdout.splitlines()[-1])["boundaries"]
    assert boundary["is_exact"]


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_kill_9_of_a_real_campaign_loses_no_record_and_doubles_none(tmp_path: Path) -> None:
    small = f"model: {TINY_LLAMA_PATH}, seq_len: [16, 32], timing_steps: 0"
    (tmp_path / "some.yaml").write_text(
        f"stages:\n  one: {{sweep: {{cells: [{{{small}, method: [full, lora], batch_size: [1, 2]}}]}}}}\n"
        f"  other: {{after: one, sweep: {{cells: [{{{small}, method: full, batch_size: 4}}]}}}}\n"
    )
    words = [sys.executable, "-m", "vramprobe", "run", "some.yaml", "--device", "cpu", "--out", "out"]

    def num_records() -> int:
        return sum(len(stages.read_records(folder)) for folder in (tmp_path / "out").glob("*"))

    for wanted in (3, 9):
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(words, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
        while num_records() < wanted and process.poll() is None:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert vramprobe(*words[3:], cwd=tmp_path).returncode == 0
    found = Counter(record.fingerprint for record in store.read(tmp_path / "out").records)
    assert sorted(found.values()) == [1] * 10
