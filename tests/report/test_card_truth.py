"""Accuracy of an emulation against a GPU, from records of both with known differences."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from factories import make_environment, make_oom, make_record, make_spec

from vramprobe import api
from vramprobe.catalog import contexts
from vramprobe.catalog.own import CACHE_VARIABLE
from vramprobe.errors import SpecError
from vramprobe.records import writing
from vramprobe.records.phase_memory import Peak
from vramprobe.records.record import RunRecord, Timing
from vramprobe.report.card_truth import card_truth_document, card_truth_gpu, context_row, truth_in_words, truth_rows
from vramprobe.report.formats import markdown
from vramprobe.spec import CellSpec
from vramprobe.units import KIB, MIB


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of its own, into which the context is written."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    contexts.own_rows.cache_clear()
    yield
    contexts.own_rows.cache_clear()


GPU = {"device_name": "NVIDIA H100 80GB HBM3", "nvml_total_bytes": 80 * 2**30}
CELLS = [make_spec(model="smollm2-135m", device="cuda", seq_len=size) for size in (128, 256, 512)]


def ran(spec: CellSpec, allocated_bytes: int, reserved_bytes: int, context_bytes: int, **more: Any) -> RunRecord:
    peak = Peak(
        phase="backward", step=2, allocated_bytes=allocated_bytes, reserved_bytes=reserved_bytes, load_allocated_bytes=1
    )
    words = {"instrument": "cuda", "environment": make_environment(**GPU), "context_bytes": context_bytes, "peak": peak}
    return make_record(spec, **(words | more))


def emulated(spec: CellSpec, *amounts: int, **more: Any) -> RunRecord:
    machine = make_environment(**GPU, emulator="abc")
    return ran(spec, *amounts, **({"instrument": "emulated", "environment": machine} | more))


MEASURED = [
    ran(CELLS[0], 1000 * MIB, 1200 * MIB, 500 * MIB, timing=Timing(step_seconds=[0.2, 0.4, 0.3], total_seconds=2)),
    ran(CELLS[1], 2000 * MIB, 2200 * MIB, 500 * MIB),
    make_oom(CELLS[2], instrument="cuda", attempt_id="oom"),
]
EMULATED = [
    emulated(CELLS[0], 1000 * MIB, 1202 * MIB, 520 * MIB, attempt_id="e1"),
    emulated(CELLS[1], 2000 * MIB + 20 * KIB, 2200 * MIB, 520 * MIB, attempt_id="e2"),
    emulated(CELLS[2], 3000 * MIB, 3200 * MIB, 520 * MIB, attempt_id="e3"),
]


def test_each_cell_has_both_sides_and_their_difference() -> None:
    first, second, third = truth_rows(MEASURED, EMULATED)
    assert (first["allocated_difference_bytes"], second["allocated_difference_bytes"]) == (0, 20 * KIB)
    assert (first["reserved_difference_bytes"], first["context_difference_bytes"]) == (2 * MIB, 20 * MIB)
    assert second["allocated_error"] == 20 * KIB / (2000 * MIB)
    assert first["first_step_seconds"] == 0.3
    assert first["step_ratio"] == first["predicted_step_seconds"] / 0.3
    assert (third["first_outcome"], third["emulated_outcome"], third["allocated_difference_bytes"]) == (
        "oom",
        "ok",
        None,
    )


def test_what_it_comes_to_is_said_tier_by_tier() -> None:
    lines = truth_in_words(truth_rows(MEASURED, EMULATED))
    assert lines[0] == (
        f"allocated: 1 of 2 cells within 1 KiB; mean difference 10.00 KiB, worst 20.00 KiB ({CELLS[1].cell_id})"
    )
    assert lines[1].startswith("reserved: 1 of 2 cells within 1 KiB; mean difference 1.00 MiB, worst 2.00 MiB")
    assert lines[2].startswith("context: 0 of 2 cells within 1 KiB; mean difference 20.00 MiB")
    assert lines[3].startswith("step time: predicted over measured")
    assert lines[4] == "outcome: 1 of 3 cells ended otherwise"
    assert truth_in_words(truth_rows(MEASURED, []))[0] == "allocated: no cell has both sides"


def test_a_page_of_two_emulations_calls_nothing_measured() -> None:
    page = markdown.page(card_truth_document(EMULATED, EMULATED, "vramprobe calibrate-gpu"))
    assert "# Emulated twice: emulated NVIDIA H100 80GB HBM3" in page
    assert "nothing about a GPU" in page
    assert "on the GPU" not in page
    assert "Measured" not in page
    real = markdown.page(card_truth_document(MEASURED, EMULATED, "vramprobe calibrate-gpu"))
    assert "# Measured and emulated: NVIDIA H100 80GB HBM3" in real
    assert "on the GPU, MiB" in real


def test_the_page_is_written_from_whatever_there_is(tmp_path: Path) -> None:
    assert api.card_truth(tmp_path).lines[-1] == "outcome: 0 of 0 cells ended otherwise"
    assert card_truth_gpu(tmp_path) is None
    for record in MEASURED:
        writing.append(tmp_path / "measured" / "records.jsonl", record)
    assert api.card_truth_gpu(tmp_path) == "H100-SXM"
    found = api.card_truth(tmp_path)
    assert found.files[0] == tmp_path / "truth.md"
    assert "not run" in found.files[0].read_text()


def test_the_context_of_a_real_gpu_is_kept_and_read_before_the_row_that_ships(tmp_path: Path) -> None:
    (tmp_path / "measured").mkdir()
    for record in (*MEASURED, ran(CELLS[2], MIB, MIB, 700 * MIB, attempt_id="m3")):
        writing.append(tmp_path / "measured" / "records.jsonl", record)
    before = contexts.context_of("H100 SXM5 80GB")
    assert before is not None
    assert before.basis == "by its multiprocessors"
    lines = api.card_truth(tmp_path).lines
    assert lines[-1] == f"context: 700 MiB at most, for later verdicts on this GPU in {tmp_path}/cache/contexts.csv"
    found = contexts.context_of("H100 SXM5 80GB")
    assert found is not None
    assert (found.basis, found.value_bytes) == ("measured here", 700 * MIB)
    api.card_truth(tmp_path)
    (row,) = contexts.own_rows()  # once for a card
    assert (row.grade, row.loaded, row.board) == ("measured", "step", GPU["device_name"])
    other = contexts.context_of("H200 SXM")
    assert other is not None
    assert other.basis == "measured"
    contexts.own_contexts().write_text("gpu,board\nH100 SXM5 80GB,\n")
    contexts.own_rows.cache_clear()
    with pytest.raises(SpecError, match=r"contexts\.csv cannot be read .* it needs the columns gpu, board, loaded"):
        contexts.context_of("H100 SXM5 80GB")


def test_without_a_folder_to_keep_it_in_the_context_is_said_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "measured").mkdir()
    writing.append(tmp_path / "measured" / "records.jsonl", MEASURED[0])
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    assert contexts.own_rows() == ()
    assert api.card_truth(tmp_path).lines[-1].startswith("context: 500 MiB at most, not kept for later verdicts: ")


def test_an_emulated_gpu_leaves_no_context() -> None:
    assert context_row(EMULATED) is None
    row = context_row(MEASURED)
    assert row is not None
    assert (row.mib, row.what) == (500, "the most of 2 cells: NVML less torch's reserved memory")
