"""The report: each measured cell is shown once, predictions beside it; the same results give the same bytes."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from factories import make_environment, make_record, make_spec
from vramprobe.report.rows import cells_of, summaries

from vramprobe import store
from vramprobe.errors import FitError, IncomparableRecords, OutOfRange, StoreError
from vramprobe.record import Oom, Peak, RunRecord, Timeout
from vramprobe.report import pages, render, report
from vramprobe.spec import CellSpec
from vramprobe.units import GIB, MIB


@dataclass(frozen=True)
class FakeRange:
    value: int
    low: int
    high: int


@dataclass(frozen=True)
class FakePrediction:
    peak_allocated_bytes: FakeRange


@dataclass(frozen=True)
class FakeModel:
    fingerprints: tuple[str, ...]


def test_the_stand_ins_have_the_real_shape() -> None:
    from vramprobe.memory_model import MemoryModel
    from vramprobe.predict import Interval, Prediction

    assert Prediction.model_fields["peak_allocated_bytes"].annotation is Interval
    assert set(FakeRange.__dataclass_fields__) <= set(Interval.model_fields)
    assert set(FakeModel.__dataclass_fields__) <= set(MemoryModel.model_fields)


def with_peak(spec: CellSpec, allocated_bytes: int, **overrides: Any) -> RunRecord:
    peak = Peak(phase="backward", step=2, allocated_bytes=allocated_bytes, load_allocated_bytes=1)
    return make_record(spec, peak=peak, **overrides)


@pytest.fixture
def predictor(monkeypatch: pytest.MonkeyPatch) -> dict[int, object]:
    """A stand-in for vramprobe.predict: predictions (or errors to raise) by the cell's seq_len."""
    answers: dict[int, object] = {}

    def predict(spec: CellSpec, model: object) -> object:
        answer = answers[spec.seq_len]
        if isinstance(answer, Exception):
            raise answer
        return answer

    fake = types.ModuleType("vramprobe.predict")
    fake.predict = predict
    monkeypatch.setitem(sys.modules, "vramprobe.predict", fake)
    return answers


def prediction(value_mib: float, low_mib: float, high_mib: float) -> FakePrediction:
    return FakePrediction(FakeRange(*(int(mib * MIB) for mib in (value_mib, low_mib, high_mib))))


def save(folder: Path, records: list[RunRecord]) -> Path:
    for number, record in enumerate(records):
        store.append(folder / "records.jsonl", record.model_copy(update={"attempt_id": f"attempt-{number}"}))
    return folder


def example(folder: Path, predictor: dict[int, object]) -> tuple[Path, FakeModel]:
    """Four measured cells of 100 MiB (two methods, two held out), an out-of-memory and a timed-out one."""
    predictor |= {
        8: prediction(103, 90, 110),
        16: prediction(98, 97, 99),
        32: prediction(101, 95, 120),
        64: prediction(90, 80, 100),
        128: prediction(200, 150, 250),
        256: prediction(400, 300, 500),
    }
    full, lora = (
        [make_spec(seq_len=length) for length in (8, 16)],
        [make_spec(seq_len=length, method="lora", gradient_checkpointing=True) for length in (32, 64)],
    )
    records = [with_peak(spec, 100 * MIB) for spec in (*full, *lora)]
    records.append(
        make_record(make_spec(seq_len=128), outcome=Oom(phase="backward", requested_bytes=GIB, message="|<b>"))
    )
    records.append(make_record(make_spec(seq_len=256), outcome=Timeout(limit_seconds=60)))
    model = FakeModel(fingerprints=(full[0].fingerprint, lora[0].fingerprint))
    return save(folder / "results", records), model


def section(text: str, title: str) -> str:
    return text.split(f"## {title}\n")[1].split("\n## ")[0].split("\n---\n")[0]


def test_without_a_fit_every_cell_is_listed_and_nothing_is_predicted(tmp_path: Path) -> None:
    records = [make_record(), make_record(make_spec(method="qlora", seq_len=32))]
    written = report(save(tmp_path / "results", records), tmp_path / "out")
    assert [path.name for path in written] == ["measured.md", "measured.csv", "by_term.md", "by_term.csv"]
    text = (tmp_path / "out" / "measured.md").read_text()
    assert (
        "| model | method | precision | optimizer | batch × length | checkpointing | peak phase | measured, MiB |"
        in text
    )
    assert "| tiny-llama | full | bf16 | adamw_torch_fused | 2 × 16 | no | backward |" in text
    assert "| qlora nf4, peft prep, r 16, all-linear | bf16 + bf16 (fp32) |" in text
    assert "predicted" not in text
    assert "Summary" not in text


def test_predictions_stand_beside_measurements_and_held_out_cells_apart(tmp_path: Path, predictor) -> None:
    results, model = example(tmp_path, predictor)
    written = report(results, tmp_path / "out", model=model, fit_path="fit.json")
    assert [path.suffix for path in written] == [".md", ".csv", ".md", ".csv", ".svg", ".png"]
    text = (tmp_path / "out" / "measured.md").read_text()
    held_out, in_fit = section(text, "Held out of the fit"), section(text, "In the fit")
    heading = "| measured, MiB | predicted, MiB | at least, MiB | at most, MiB | error, % |"
    assert heading in held_out
    assert heading in in_fit
    assert "| 2 × 16 | no | backward | 100.0 | 98.0 | 97.0 | 99.0 | -2.00 |" in held_out
    assert "| 2 × 64 | yes | backward | 100.0 | 90.0 | 80.0 | 100.0 | -10.00 |" in held_out
    assert "| 2 × 8 | no | backward | 100.0 | 103.0 | 90.0 | 110.0 | +3.00 |" in in_fit
    assert "2 × 16 " not in in_fit


def test_the_summary_is_right(tmp_path: Path, predictor) -> None:
    results, model = example(tmp_path, predictor)
    report(results, tmp_path / "out", model=model)
    rows = section((tmp_path / "out" / "measured.md").read_text(), "Summary").strip().splitlines()[2:]
    assert rows == [  # group, n, mean |error|, worst |error|, worst under-prediction, inside the interval
        "| held out, all | 2 | 6.00 | 10.00 | -10.00 | 50 |",
        "| held out, full | 1 | 2.00 | 2.00 | -2.00 | 0 |",
        "| held out, lora | 1 | 10.00 | 10.00 | -10.00 | 100 |",
        "| in the fit, all | 2 | 2.00 | 3.00 | – | 100 |",
        "| in the fit, full | 1 | 3.00 | 3.00 | – | 100 |",
        "| in the fit, lora | 1 | 1.00 | 1.00 | – | 100 |",
    ]


def test_failures_are_shown(tmp_path: Path, predictor) -> None:
    results, model = example(tmp_path, predictor)
    report(results, tmp_path / "out", model=model)
    rows = section((tmp_path / "out" / "measured.md").read_text(), "Cells without a result").strip().splitlines()[2:]
    assert len(rows) == 2
    assert rows[0].endswith("| 2 × 128 | no | oom | in backward: 1.00 GiB requested |")
    assert rows[1].endswith("| 2 × 256 | no | timeout | no end after 60 s |")


def test_only_failures_make_a_report_too(tmp_path: Path) -> None:
    results = save(tmp_path / "results", [make_record(outcome=Timeout(limit_seconds=60))])
    report(results, tmp_path / "out")
    text = (tmp_path / "out" / "measured.md").read_text()
    assert "No cell finished; see below." in text
    assert "no end after 60 s" in text
    assert "No cell was traced." in (tmp_path / "out" / "by_term.md").read_text()


def test_predictions_without_any_measurement_make_no_plot(tmp_path: Path, predictor) -> None:
    predictor[16] = prediction(1, 1, 1)
    results = save(tmp_path / "results", [make_record(outcome=Timeout(limit_seconds=60))])
    written = report(results, tmp_path / "out", model=FakeModel(fingerprints=()))
    assert {path.suffix for path in written} == {".md", ".csv"}


def test_the_csv_has_every_cell_with_exact_values(tmp_path: Path, predictor) -> None:
    results, model = example(tmp_path, predictor)
    report(results, tmp_path / "out", model=model)
    rows = list(csv.DictReader((tmp_path / "out" / "measured.csv").read_text().splitlines()))
    records = {record.fingerprint: record for record in store.read(results).records}
    assert {row["fingerprint"] for row in rows} == set(records)
    assert [row["outcome"] for row in rows] == ["ok", "ok", "ok", "ok", "oom", "timeout"]
    best = next(row for row in rows if row["batch_by_length"] == "2 × 16")
    assert (best["measured_bytes"], best["predicted_bytes"], best["low_bytes"]) == (
        str(100 * MIB),
        str(98 * MIB),
        str(97 * MIB),
    )
    assert (best["held_out"], best["gradient_checkpointing"], float(best["error_percent"])) == ("true", "false", -2.0)
    assert (rows[4]["measured_bytes"], rows[4]["error_percent"]) == ("", "")
    assert rows[4]["predicted_bytes"] == str(200 * MIB)


def test_the_peak_by_term_adds_up(tmp_path: Path) -> None:
    record = make_record(make_spec(dtype="fp32"))
    untraced = make_record(make_spec(seq_len=8), ledger=record.ledger.model_copy(update={"at_peak": None}))
    report(save(tmp_path / "results", [record, untraced]), tmp_path / "out")
    (row,) = csv.DictReader((tmp_path / "out" / "by_term.csv").read_text().splitlines())
    total = int(row["total_bytes"])
    parts = [int(value) for name, value in row.items() if name.endswith("_bytes") and name != "total_bytes"]
    assert len(parts) == 7
    assert sum(parts) == total == record.peak.allocated_bytes
    text = (tmp_path / "out" / "by_term.md").read_text()
    assert (
        "| total, MiB | weights, MiB | gradients, MiB | optimizer state, MiB | batch, MiB | saved activations, MiB |"
        in text
    )
    assert "1 measured cells were not traced and are left out" in text


def test_large_amounts_are_in_gib(tmp_path: Path) -> None:
    report(save(tmp_path / "results", [with_peak(make_spec(), 10 * GIB + GIB // 4)]), tmp_path / "out")
    text = (tmp_path / "out" / "measured.md").read_text()
    assert "| measured, GiB |" in text
    assert "| 10.25 |" in text


def test_a_prediction_outside_the_range_or_refused_is_said(tmp_path: Path, predictor) -> None:
    predictor |= {
        8: OutOfRange("8 tokens is below the fit's 64", prediction(103, 90, 110)),
        16: FitError("no terms for t5"),
    }
    records = [with_peak(make_spec(seq_len=length), 100 * MIB) for length in (8, 16)]
    report(save(tmp_path / "results", records), tmp_path / "out", model=FakeModel(fingerprints=()))
    text = (tmp_path / "out" / "measured.md").read_text()
    held_out, remarks = section(text, "Held out of the fit"), section(text, "About the predictions")
    assert "| 100.0 | 103.0 | 90.0 | 110.0 | +3.00 |" in held_out
    assert "| 100.0 | – | – | – | – |" in held_out
    assert "8 tokens is below the fit's 64" in remarks
    assert "no terms for t5" in remarks
    assert "No cell: the fit was made from other records." in section(text, "In the fit")


def test_the_attempt_that_counts_is_shown_once(tmp_path: Path) -> None:
    first = with_peak(make_spec(), 100 * MIB, started_at="2026-03-01T00:00:00Z")
    again = with_peak(make_spec(), 200 * MIB, started_at="2026-03-02T00:00:00Z")
    failed = make_record(started_at="2026-03-03T00:00:00Z", outcome=Timeout(limit_seconds=1))
    report(save(tmp_path / "results", [failed, again, first]), tmp_path / "out")
    text = (tmp_path / "out" / "measured.md").read_text()
    assert section(text, "Cells").count("| tiny-llama |") == 1
    assert "| 200.0 |" in text
    assert "3 records of 1 cells; of 2 more attempts only the one that counts is shown" in text
    assert "measured 2026-03-01 to 2026-03-03" in text


def test_the_footer_says_where_it_comes_from_and_how_to_rebuild_it(tmp_path: Path, predictor) -> None:
    results, model = example(tmp_path, predictor)
    report(results, tmp_path / "out", model=model, fit_path="my fit.json")
    for name in ("measured.md", "by_term.md"):
        text = (tmp_path / "out" / name).read_text()
        assert "- instrument `cpu`\n- device Test CPU @ 2.00GHz\n- python 3.11.9, accelerate 1.15.0," in text
        assert "torch 2.13.0+cpu" in text
        assert "6 records of 6 cells" in text
        assert f"```\nvramprobe report {results} -o {tmp_path}/out --fit 'my fit.json'\n```\n" in text


def test_a_torn_line_and_mixed_versions_are_said(tmp_path: Path) -> None:
    other = make_environment(versions={"torch": "2.13.1"})
    results = save(tmp_path / "results", [make_record(), make_record(make_spec(seq_len=8), environment=other)])
    with (results / "records.jsonl").open("ab") as file:
        file.write(b'{"format":')
    report(results, tmp_path / "out")
    text = (tmp_path / "out" / "measured.md").read_text()
    assert "half-written line of 10 bytes" in text
    assert "torch 2.13.0+cpu and 2.13.1" in text


def test_the_same_results_give_the_same_bytes(tmp_path: Path, predictor) -> None:
    results, model = example(tmp_path, predictor)
    written = report(results, tmp_path / "out", model=model)
    before = [path.read_bytes() for path in written]
    shutil.rmtree(tmp_path / "out")
    assert [path.read_bytes() for path in report(results, tmp_path / "out", model=model)] == before
    svg = (tmp_path / "out" / "predicted_vs_measured.svg").read_text()
    assert "<dc:date>" not in svg
    assert before[-1].startswith(b"\x89PNG")


def test_the_plot_has_a_legend_entry_per_method_and_set(tmp_path: Path, predictor) -> None:
    from matplotlib.figure import Figure

    from vramprobe.report import plot

    results, model = example(tmp_path, predictor)
    cells = [cell for cell in cells_of(store.read(results).records, model) if cell.error_percent is not None]
    upper, lower = Figure().subplots(2)
    plot._draw(upper, lower, cells)
    labels = [text.get_text() for text in upper.get_legend().get_texts()]
    assert labels == ["equal", "full, in the fit", "full, held out", "lora, in the fit", "lora, held out"]
    heights = [float(bars[0].get_ydata()[0]) for bars in lower.containers]
    assert heights == pytest.approx([3, -2, 1, -10])  # the errors, in percent


def test_markdown_cells_cannot_break_the_page() -> None:
    columns = [render.Column("a", "x|y", lambda row: row), render.Column("b", None, lambda row: 1)]
    text = render.to_markdown(columns, ["a|b <script>\n*c* `d` [e](f) & \\|", "", None])
    assert text.splitlines() == [
        r"| x\|y |",
        "| --- |",
        r"| a\|b &lt;script&gt; \*c\* \`d\` \[e\](f) &amp; \\\| |",
        "| – |",
        "| – |",
    ]


def test_a_long_failure_is_shortened_only_in_markdown(tmp_path: Path) -> None:
    results = save(tmp_path / "results", [make_record(outcome=Oom(phase="load", message="x" * 500))])
    report(results, tmp_path / "out")
    assert "x" * 201 not in (tmp_path / "out" / "measured.md").read_text()
    assert "…" in (tmp_path / "out" / "measured.md").read_text()
    assert "x" * 500 in (tmp_path / "out" / "measured.csv").read_text()


def test_what_cannot_be_reported(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there are no results at"):
        report(tmp_path / "nowhere", tmp_path / "out")
    mixed = [make_record(), make_record(make_spec(seq_len=8), instrument="cuda")]
    results = save(tmp_path / "results", mixed)
    with pytest.raises(IncomparableRecords, match="instrument"):
        report(results, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    good = save(tmp_path / "good", [make_record()])
    with pytest.raises(StoreError, match=r"cannot write the report to .*file: .*choose another folder"):
        report(good, tmp_path / "file")


def test_what_was_simulated_is_left_out_and_counted(tmp_path: Path) -> None:
    """Of a cell that was measured too, and of one that was not; a later one does not take a measurement's place."""
    measured, other = make_record(), make_spec(seq_len=8)
    simulated = {"instrument": "simulated", "started_at": "2027-01-01T00:00:00Z"}
    predicted = [make_record(attempt_id="one", **simulated), make_record(other, attempt_id="two", **simulated)]
    report(save(tmp_path / "results", [measured, *predicted]), tmp_path / "out")
    page = (tmp_path / "out" / "measured.md").read_text()
    assert "- left out: 2 simulated records (predicted, not measured)\n" in page
    assert "- 1 records of 1 cells\n" in page
    table = (tmp_path / "out" / "measured.csv").read_text()
    assert measured.fingerprint in table
    assert other.fingerprint not in table
    with pytest.raises(StoreError, match=r"nothing was measured in .*: its 2 records are simulated"):
        report(save(tmp_path / "simulated", predicted), tmp_path / "none")


def test_summaries_without_predictions_are_none() -> None:
    assert summaries(cells_of([make_record()], None)) == []


def test_each_table_has_unique_column_names() -> None:
    unit = pages._unit([1])
    for columns in (pages._measured_columns(unit, is_predicted=True), pages._failure_columns(), pages._SUMMARY_COLUMNS):
        names = [column.name for column in columns]
        assert len(names) == len(set(names))


def test_reporting_needs_no_torch(tmp_path: Path) -> None:
    results = save(tmp_path / "results", [make_record()])
    code = (
        "import sys; from vramprobe.report import report; report(sys.argv[1], sys.argv[2]);"
        "print([name for name in ('torch', 'transformers', 'pandas', 'matplotlib') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(results), str(tmp_path / "out")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"
