"""The report's pages: each measured cell is shown once, predictions beside it, and where nobody measured."""

import base64
import csv
import io
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import PIL.Image
import pytest
from factories import TINY_LLAMA_PARAMS, make_environment, make_record, make_spec, unpadded
from PIL.PngImagePlugin import PngInfo
from predictions import some_prediction

from vramprobe.errors import FitError, IncomparableRecords, StaleReport, StoreError
from vramprobe.model.card_fit import CardFit
from vramprobe.predict import expected
from vramprobe.predict.at_hand import NoRecipe
from vramprobe.predict.prediction import Interval, Prediction
from vramprobe.records import store, writing
from vramprobe.records.outcomes import Oom, Timeout
from vramprobe.records.phase_memory import Peak
from vramprobe.records.record import RunRecord
from vramprobe.records.whole import read_whole
from vramprobe.report.by_size import LADDER, by_size, params_in_words
from vramprobe.report.cells import cells_of, summaries
from vramprobe.report.formats import files_of
from vramprobe.report.plots.drawn import read_stamp
from vramprobe.report.publish import Material, build, command_of, documents, gather, publish
from vramprobe.report.speed import rate_of, speed
from vramprobe.spec import CellSpec
from vramprobe.units import GIB, MIB


def report(results: Path, out: Path, *, model: CardFit | None = None, fit_path: str | None = None) -> list[Path]:
    """The pages alone, written: the plots have tests of their own (test_plots.py)."""
    material = gather(read_whole(results), results, command_of(results, out, model, fit_path), model)
    files = {name: content for document in documents(material) for name, content in files_of(document).items()}
    return publish(out, files)


def with_peak(spec: CellSpec, allocated_bytes: int, **overrides: Any) -> RunRecord:
    peak = Peak(phase="backward", step=2, allocated_bytes=allocated_bytes, load_allocated_bytes=1)
    return make_record(spec, peak=peak, **overrides)


@pytest.fixture
def predictor(monkeypatch: pytest.MonkeyPatch) -> dict[int, object]:
    """A stand-in for predictions by recipes at hand (or errors to raise) by the cell's seq_len."""
    answers: dict[int, object] = {}

    def predict(spec: CellSpec, gpu: object, model: object = None) -> object:
        answer = answers.get(spec.seq_len, NoRecipe("none is at hand"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(expected, "predict_at_hand", predict)
    return answers


def prediction(value_mib: float, low_mib: float, high_mib: float) -> Prediction:
    return some_prediction(
        peak_phase="backward",
        peak_allocated_bytes=Interval(value=int(value_mib * MIB), low=int(low_mib * MIB), high=int(high_mib * MIB)),
    )


def fit_of(*specs: CellSpec) -> CardFit:
    """A fit to these cells, of which a page reads no more."""
    return CardFit.model_construct(fingerprints=tuple(spec.fingerprint for spec in specs), data_fingerprint="made up")


def save(folder: Path, records: list[RunRecord]) -> Path:
    for number, record in enumerate(records):
        writing.append(folder / "records.jsonl", record.model_copy(update={"attempt_id": f"attempt-{number}"}))
    return folder


def example(folder: Path, predictor: dict[int, object]) -> tuple[Path, CardFit]:
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
    model = fit_of(full[0], lora[0])
    return save(folder / "results", records), model


def section(text: str, title: str) -> str:
    return text.split(f"## {title}\n")[1].split("\n## ")[0].split("\n---\n")[0]


def test_on_the_cpu_every_cell_is_listed_and_nothing_is_predicted(tmp_path: Path) -> None:
    records = [make_record(), make_record(make_spec(method="qlora", seq_len=32))]
    written = report(save(tmp_path / "results", records), tmp_path / "out")
    kinds = ("md", "csv", "tex", "html")
    pages = ("by_size", "measured", "by_term", "speed", "formulas")
    assert [path.name for path in written] == [f"{name}.{kind}" for name in pages for kind in kinds]
    text = unpadded((tmp_path / "out" / "measured.md").read_text())
    assert (
        "In every row: optimizer adamw_torch_fused; checkpointing no.\n\n"
        "| model | method | precision | batch × length | peak phase | measured, MiB |"
    ) in text
    assert "| tiny-llama | full | bf16 | 2 × 16 | backward |" in text
    assert "| qlora nf4, peft prep, r 16, all-linear | bf16 + bf16 (fp32) |" in text
    assert "predicted" not in text
    assert "Summary" not in text


def test_predictions_stand_beside_measurements_and_held_out_cells_apart(tmp_path: Path, predictor) -> None:
    results, model = example(tmp_path, predictor)
    written = report(results, tmp_path / "out", model=model, fit_path="fit.json")
    assert {path.name for path in written} >= {"by_size.md", "measured.tex", "by_term.html", "formulas.csv"}
    text = unpadded((tmp_path / "out" / "measured.md").read_text())
    held_out, in_fit = section(text, "Held out of the fit"), section(text, "In the fit")
    heading = "| measured, MiB | predicted, MiB | at least, MiB | at most, MiB | error, % |"
    assert heading in held_out
    assert heading in in_fit
    assert "| 2 × 16 | no | backward | 100.0 | 98.0 | 97.0 | 99.0 | -2.00 |" in held_out
    assert "| 2 × 64 | yes | backward | 100.0 | 90.0 | 80.0 | 100.0 | -10.00 |" in held_out
    assert "In every row: optimizer adamw_torch_fused." in held_out
    assert "| 2 × 8 | no | backward | 100.0 | 103.0 | 90.0 | 110.0 | +3.00 |" in in_fit
    assert "2 × 16 " not in in_fit


def test_without_a_fit_a_recipe_at_hand_predicts_and_what_has_none_has_a_dash(tmp_path: Path, predictor) -> None:
    predictor |= {8: prediction(103, 90, 110)}
    records = [with_peak(make_spec(seq_len=length), 100 * MIB) for length in (8, 16)]
    report(save(tmp_path / "results", records), tmp_path / "out")
    text = unpadded((tmp_path / "out" / "measured.md").read_text())
    assert "a dash where there is none, which vramprobe predict would record" in text
    assert "| 2 × 8 | backward | 100.0 | 103.0 | 90.0 | 110.0 | +3.00 |" in section(text, "Cells")
    assert "| 2 × 16 | backward | 100.0 | – | – | – | – |" in section(text, "Cells")
    assert section(text, "Summary").strip().splitlines()[2:] == ["| predicted, all | 1 | 3.00 | 3.00 | – | 100 |"]
    assert "held_out" not in (tmp_path / "out" / "measured.csv").read_text()


def test_the_summary_is_right(tmp_path: Path, predictor) -> None:
    results, model = example(tmp_path, predictor)
    report(results, tmp_path / "out", model=model)
    rows = section(unpadded((tmp_path / "out" / "measured.md").read_text()), "Summary").strip().splitlines()[2:]
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
    found = section(unpadded((tmp_path / "out" / "measured.md").read_text()), "Cells without a result")
    assert "In every row: precision bf16; optimizer adamw_torch_fused; checkpointing no." in found
    assert [line for line in found.splitlines() if line.startswith("| tiny")] == [
        "| tiny-llama | full | 2 × 128 | oom | in backward: 1.00 GiB requested |",
        "| tiny-llama | full | 2 × 256 | timeout | no end after 60 s |",
    ]


def test_only_failures_make_a_report_too(tmp_path: Path) -> None:
    results = save(tmp_path / "results", [make_record(outcome=Timeout(limit_seconds=60))])
    report(results, tmp_path / "out")
    text = unpadded((tmp_path / "out" / "measured.md").read_text())
    assert "No cell finished; see below." in text
    assert "no end after 60 s" in text
    assert "No cell was traced." in unpadded((tmp_path / "out" / "by_term.md").read_text())


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
    text = unpadded((tmp_path / "out" / "by_term.md").read_text())
    assert (
        "| total, MiB | weights, MiB | gradients, MiB | optimizer state, MiB | batch, MiB | saved activations, MiB |"
        in text
    )
    assert "1 measured cells were not traced and are left out" in text


def test_large_amounts_are_in_gib(tmp_path: Path) -> None:
    report(save(tmp_path / "results", [with_peak(make_spec(), 10 * GIB + GIB // 4)]), tmp_path / "out")
    text = unpadded((tmp_path / "out" / "measured.md").read_text())
    assert "| measured, GiB |" in text
    assert "| 10.25 |" in text


def test_why_there_is_no_prediction_is_said(tmp_path: Path, predictor) -> None:
    predictor |= {8: prediction(103, 90, 110), 16: FitError("no terms for t5")}
    records = [with_peak(make_spec(seq_len=length), 100 * MIB) for length in (8, 16)]
    report(save(tmp_path / "results", records), tmp_path / "out", model=fit_of())
    text = unpadded((tmp_path / "out" / "measured.md").read_text())
    held_out, remarks = section(text, "Held out of the fit"), section(text, "About the predictions")
    assert "| 100.0 | 103.0 | 90.0 | 110.0 | +3.00 |" in held_out
    assert "| 100.0 | – | – | – | – |" in held_out
    assert "no terms for t5" in remarks
    assert "No cell: the fit was made from other records." in section(text, "In the fit")


def test_the_attempt_that_counts_is_shown_once(tmp_path: Path) -> None:
    first = with_peak(make_spec(), 100 * MIB, started_at="2026-03-01T00:00:00Z")
    again = with_peak(make_spec(), 200 * MIB, started_at="2026-03-02T00:00:00Z")
    failed = make_record(started_at="2026-03-03T00:00:00Z", outcome=Timeout(limit_seconds=1))
    report(save(tmp_path / "results", [failed, again, first]), tmp_path / "out")
    text = unpadded((tmp_path / "out" / "measured.md").read_text())
    assert section(text, "Cells").count("| tiny-llama |") == 1
    assert "| 200.0 |" in text
    assert "3 records of 1 cell; of 2 more attempts only the one that counts is shown" in text
    assert "measured 2026-03-01 to 2026-03-03" in text


def test_the_footer_says_where_it_comes_from_and_how_to_rebuild_it(tmp_path: Path, predictor) -> None:
    results, model = example(tmp_path, predictor)
    report(results, tmp_path / "out", model=model, fit_path="my fit.json")
    for name in ("measured.md", "by_term.md"):
        text = (tmp_path / "out" / name).read_text()
        assert "- instrument cpu\n- device Test CPU @ 2.00GHz\n- python 3.11.9, accelerate 1.15.0," in text
        assert "torch 2.13.0+cpu" in text
        assert "6 records of 6 cells" in text
        assert f"```\nvramprobe report {results} -o {tmp_path}/out --fit 'my fit.json'\n```\n" in text


def test_a_torn_line_and_mixed_versions_are_said(tmp_path: Path) -> None:
    other = make_environment(versions={"torch": "2.13.1"})
    results = save(tmp_path / "results", [make_record(), make_record(make_spec(seq_len=8), environment=other)])
    with (results / "records.jsonl").open("ab") as file:
        file.write(b'{"format":')
    report(results, tmp_path / "out")
    text = unpadded((tmp_path / "out" / "measured.md").read_text())
    assert "half-written line of 10 bytes" in text
    assert "torch 2.13.0+cpu and 2.13.1" in text


def test_a_long_failure_is_shortened_only_in_markdown(tmp_path: Path) -> None:
    results = save(tmp_path / "results", [make_record(outcome=Oom(phase="load", message="x" * 500))])
    report(results, tmp_path / "out")
    assert "x" * 201 not in unpadded((tmp_path / "out" / "measured.md").read_text())
    assert "…" in unpadded((tmp_path / "out" / "measured.md").read_text())
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
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "records.jsonl").touch()
    with pytest.raises(StoreError, match="holds no record"):
        report(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(StoreError, match=r"cannot write .*file: File exists; choose another folder"):
        report(good, tmp_path / "file")


def test_summaries_without_predictions_are_none() -> None:
    assert summaries(cells_of([make_record()], None)) == []


def material(records: list[RunRecord], model: Any = None) -> Material:
    return Material(
        cells=cells_of(records, model), records=records, model=model, origin=["instrument cpu"], command="x"
    )


def test_each_table_has_unique_column_names(tmp_path: Path, predictor) -> None:
    results, model = example(tmp_path, predictor)
    for document in documents(gather(read_whole(results), results, "vramprobe report", model)):
        for table in (*document.tables, document.data):
            names = [column.name for column in table.columns]
            assert len(names) == len(set(names)), (document.name, table.title)


# -- by size and method ------------------------------------------------------------------------------------------------


def test_sizes_stand_in_rows_and_methods_in_columns() -> None:
    """A method that one model was measured with is no column among those that compare models."""
    records = [with_peak(make_spec(num_layers=depth), 1000 * depth * MIB) for depth in (1, 2)]
    records += [with_peak(make_spec(method="lora", num_layers=1), MIB)]
    (table,) = by_size(cells_of(records, None), None, [], "x").tables
    assert table.title == "2 × 16 tokens, checkpointing off"
    assert [column.heading for column in table.shown] == ["model", "parameters", "full, GiB"]
    assert [row[::2] for row in table.texts()] == [["tiny-llama@1layers", "0.98"], ["tiny-llama@2layers", "1.95"]]
    assert table.caption == "full: bf16, adamw_torch_fused."


def test_a_method_of_one_model_is_shown_where_there_is_no_other() -> None:
    records = [with_peak(make_spec(method="lora"), MIB)]
    (table,) = by_size(cells_of(records, None), None, [], "x").tables
    assert [column.heading for column in table.shown][2:] == ["lora, MiB"]
    assert table.caption == "lora: r 16, all-linear, bf16 + bf16 (fp32), adamw_torch_fused."


def test_what_is_predicted_is_marked_and_what_has_no_recipe_is_not_printed(predictor) -> None:
    predictor[16] = prediction(2048, 1024, 4096)
    model = None
    records = [with_peak(make_spec(num_layers=depth), GIB) for depth in (1, 2)]
    records += [with_peak(make_spec(method="lora", model=model), GIB) for model in ("pythia-70m", "gpt2")]
    document = by_size(cells_of(records, None), model, [], "x")
    shown = {row[0]: row[2:] for row in document.tables[0].texts()}
    assert shown["tiny-llama@2layers"] == ["1.00", "≈ 2.00"]
    assert shown["gpt2"] == ["≈ 2.00", "1.00"]
    assert list(shown)[-len(LADDER) :] == list(LADDER)
    assert shown[LADDER[-1]] == ["≈ 2.00", "≈ 2.00"]
    lines = list(csv.DictReader(files_of(document)["by_size.csv"].decode().splitlines()))
    measured = [line for line in lines if line["is_measured"] == "true"]
    assert {line["low_bytes"] for line in measured} == {""}
    assert len(measured) == 4
    assert {line["peak_allocated_bytes"] for line in lines if line["is_measured"] == "false"} == {str(2 * GIB)}
    del predictor[16]
    shown = {row[0]: row[2:] for row in by_size(cells_of(records, None), model, [], "x").tables[0].texts()}
    assert shown["gpt2"] == ["–", "1.00"]
    assert LADDER[-1] not in shown


def test_columns_with_one_method_say_what_sets_them_apart() -> None:
    options = ({"dtype": "bf16"}, {"dtype": "fp32"}, {"dtype": "fp32", "optim": "adamw_torch"})
    records = [with_peak(make_spec(num_layers=depth, **one), MIB) for depth in (1, 2) for one in options]
    (table,) = by_size(cells_of(records, None), None, [], "x").tables
    assert {column.heading for column in table.shown[2:]} == {
        "full bf16, MiB",
        "full fp32 adamw_torch_fused, MiB",
        "full fp32 adamw_torch, MiB",
    }


def test_params_are_written_as_guides_do() -> None:
    counts = (TINY_LLAMA_PARAMS, 70_400_000, 999_885_952, 1_235_814_400, 70_553_706_496)
    assert [params_in_words(count) for count in counts] == ["125K", "70.4M", "1B", "1.24B", "70.6B"]


# -- speed and cost ----------------------------------------------------------------------------------------------------


def test_speed_is_tokens_over_the_median_step(tmp_path: Path) -> None:
    """20.5 ms for two micro-batches of 2 × 16 tokens; a CPU has no price."""
    document = speed(material([make_record(make_spec(grad_accum=2))]).cells, [], "x")
    (row,) = csv.DictReader(files_of(document)["speed.csv"].decode().splitlines())
    assert float(row["tokens_per_second"]) == pytest.approx(2 * 2 * 16 / 0.0205)
    assert "usd_per_billion_tokens" not in row
    assert "On the CPU, 2 threads." in files_of(document)["speed.md"].decode()
    untimed = make_record(timing=make_record().timing.model_copy(update={"step_seconds": []}))
    assert speed(material([untimed]).cells, [], "x") is None


def test_a_measured_gpu_has_its_price() -> None:
    from vramprobe import catalog

    there = make_environment(device_name="NVIDIA H100 80GB HBM3", num_threads=None)
    record = make_record(make_spec(device="cuda"), instrument="cuda", environment=there)
    document = speed(material([record]).cells, [], "x")
    offers = [one for one in catalog.list_prices("H100-SXM") if one.terms == "on-demand"]
    hourly = min(one.usd_per_gpu_hour for one in offers)
    (row,) = csv.DictReader(files_of(document)["speed.csv"].decode().splitlines())
    assert float(row["usd_per_billion_tokens"]) == pytest.approx(hourly * 1e9 / (2 * 16 / 0.0205) / 3600)
    assert f"At ${hourly:.2f} per hour (" in document.tables[0].caption
    assert rate_of(make_record(instrument="cuda")) is None  # a GPU that the catalog does not know
    assert rate_of(make_record(environment=there)) is None  # not measured on it


# -- the whole ---------------------------------------------------------------------------------------------------------


def test_a_report_is_the_same_each_time_and_a_check_names_what_is_not(tmp_path: Path) -> None:
    results = save(tmp_path / "results", [make_record(), make_record(make_spec(method="lora"))])
    out = tmp_path / "out"
    files = build(results, out)
    assert {"peak_by_term.svg", "peak_by_term.png", "by_size.md", "formulas.tex"} <= set(files)
    with pytest.raises(StaleReport, match=f"{len(files)} of {len(files)} files are stale"):
        publish(out, files, check=True)
    assert not out.exists()
    publish(out, files)
    assert publish(out, build(results, out), check=True) == [out / name for name in files]
    (out / "by_term.csv").unlink()
    (out / "measured.md").write_text("x")
    with pytest.raises(StaleReport) as caught:
        publish(out, files, check=True)
    assert str(caught.value).splitlines() == [
        f"2 of {len(files)} files are stale:",
        f"  {out / 'measured.md'} differs from what the records give",
        f"  {out / 'by_term.csv'} is missing",
    ]
    assert (out / "measured.md").read_text() == "x"


def test_a_check_compares_what_pictures_show_and_not_who_drew_them(tmp_path: Path) -> None:
    """Another matplotlib or freetype may draw the same in its own way; the same one only with other last digits."""
    results = save(tmp_path / "results", [make_record(), make_record(make_spec(method="lora"))])
    out, files = tmp_path / "out", build(results, tmp_path / "out")
    svg, png, page = files["peak_by_term.svg"], files["peak_by_term.png"], files["index.html"]
    stamp = PIL.Image.open(io.BytesIO(png)).text["Description"]
    others = stamp.replace(f"matplotlib {matplotlib.__version__}", "matplotlib 3.0.1")
    older = svg.replace(stamp.encode(), others.encode()).replace(b"<path", b"<path ")
    blank = PIL.Image.new("RGBA", size_of(png))
    on_page = partial(page.replace, base64.b64encode(svg))
    noise = re.sub(rb"(?<= x=\")\d+\.\d+", lambda found: b"%.5f" % (float(found[0]) + 0.001), svg)
    fresh = [
        {"peak_by_term.svg": older, "index.html": on_page(base64.b64encode(older))},
        {"peak_by_term.svg": noise},
        {"peak_by_term.png": png_of(PIL.Image.open(io.BytesIO(png)), stamp, compress_level=0)},
        {"peak_by_term.png": png_of(blank, others)},
    ]
    shows = read_stamp(svg).shows
    stale = [
        {"index.html": on_page(base64.b64encode(older)).replace(b"<table", b"<table ")},
        {"index.html": on_page(base64.b64encode(older.replace(shows.encode(), b"0" * 16)))},
        {
            "index.html": on_page(
                base64.b64encode(svg) + b'"><img src="data:image/svg+xml;base64,' + base64.b64encode(svg)
            )
        },
        {"peak_by_term.svg": older.replace(shows.encode(), b"0" * 16)},
        {"peak_by_term.svg": older[:-20]},
        {"peak_by_term.svg": svg.replace(b"<path", b"<path ")},
        {"peak_by_term.svg": re.sub(rb"(?<= x=\")\d+\.\d+", b"1.0", svg)},
        {"peak_by_term.svg": png},
        {"peak_by_term.png": png_of(blank, stamp)},
        {"peak_by_term.png": png_of(blank, others.replace(shows, "0" * 16))},
        {"peak_by_term.png": png_of(PIL.Image.new("RGBA", (7, 7)), others)},
        {"peak_by_term.png": png[: len(png) // 2]},
        {"peak_by_term.png": b"none"},
    ]
    for changed in fresh:
        assert all(files[name] != content for name, content in changed.items())
        publish(out, files | changed)
        assert publish(out, files, check=True)
    for changed in stale:
        publish(out, files | changed)
        with pytest.raises(StaleReport, match=f"1 of {len(files)} files are stale:\n  .*{next(iter(changed))} differs"):
            publish(out, files, check=True)


def size_of(png: bytes) -> tuple[int, int]:
    return PIL.Image.open(io.BytesIO(png)).size


def png_of(image: PIL.Image.Image, description: str, **options: int) -> bytes:
    """The image as a PNG that says this of itself."""
    buffer, text = io.BytesIO(), PngInfo()
    text.add_text("Description", description)
    image.save(buffer, "png", pnginfo=text, **options)
    return buffer.getvalue()


def test_a_models_name_or_a_message_is_only_text_everywhere(tmp_path: Path) -> None:
    """HTML, LaTeX and Markdown in a name, and in what an error said."""
    evil = "<b onclick=x>_$x^2$|&\\`*[a](b)"
    named = make_record(make_spec().model_copy(update={"model": evil}))
    failed = make_record(make_spec(seq_len=8), outcome=Oom(phase="load", message=f"no room for {evil}"))
    files = build(save(tmp_path / "results", [named, failed]), "out")
    texts = {name: content.decode() for name, content in files.items() if not name.endswith((".png", ".svg"))}
    in_html, in_markdown = (
        "&lt;b onclick=x&gt;_$x^2$|&amp;\\`*[a](b)",
        r"&lt;b onclick=x&gt;\_\$x^2\$\|&amp;\\\`\*\[a\](b)",
    )
    in_latex = r"\ensuremath{<}b onclick=x\ensuremath{>}\_\$x\textasciicircum{}2\$\ensuremath{|}\&\textbackslash{}"
    for page, count in (("by_size", 1), ("by_term", 1), ("measured", 2)):
        assert [texts[f"{page}.{kind}"].count("<b onclick") for kind in ("md", "html", "tex")] == [0, 0, 0]
        assert texts[f"{page}.html"].count(in_html) == texts[f"{page}.md"].count(in_markdown) == count
        assert texts[f"{page}.tex"].replace(r"\allowbreak{}", "").count(in_latex) == count
    assert evil in texts["measured.csv"]


def test_cuda_records_bring_the_claims_they_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    from vramprobe.literature import claims

    seen: list[RunRecord] = []
    monkeypatch.setattr(claims, "judge_claims", lambda records: seen.extend(records) or [])
    record = make_record(make_spec(device="cuda"), instrument="cuda")
    assert [one.name for one in documents(material([record]))][-1] == "claims"
    assert seen == [record]


def test_the_terminal_shows_the_held_out_cells_and_one_line_per_page(
    tmp_path: Path, predictor, capsys: pytest.CaptureFixture[str]
) -> None:
    from vramprobe.cli.display import print_report

    results, model = example(tmp_path, predictor)
    index = tmp_path / "out" / "index.html"
    print_report([index, *report(results, tmp_path / "out", model=model)])
    shown = capsys.readouterr().out
    assert "## Held out of the fit" in shown
    assert "## In the fit" not in shown
    *pages, last = shown.splitlines()
    assert "\n".join(pages).count(str(tmp_path / "out")) == 6
    assert f"{tmp_path / 'out' / 'by_size'}  .md .csv .tex .html" in pages
    assert last.startswith(f"open {index} in a browser")


def test_reporting_needs_no_torch(tmp_path: Path) -> None:
    results = save(tmp_path / "results", [make_record()])
    heavy = ("torch", "transformers", "huggingface_hub")
    code = (
        "import sys; from vramprobe import api; api.report(sys.argv[1], sys.argv[2]);"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(results), str(tmp_path / "out")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"
