"""Published figures: bytes are what the source meant, and the rows that are cells of ours are what was run."""

import subprocess
import sys

import pytest

from benchmarks.tables import read_csv
from benchmarks.truth import published
from benchmarks.truth.published_rows import PublishedRow, cell_of, list_published
from vramprobe import catalog
from vramprobe.spec import CellSpec

CELLS = {row.line: cell for row in list_published() if (cell := cell_of(row)) is not None}


def row_of(line: int) -> PublishedRow:
    return next(row for row in list_published() if row.line == line)


def test_five_rows_of_899_are_cells() -> None:
    assert len(list_published()) == 899
    assert sorted(CELLS) == [22, 90, 140, 148, 156]


@pytest.mark.parametrize(
    ("line", "cell_id", "lora_dtype"),
    [
        (22, "mistral-7b-v0.1_qlora-nf4-trl-r16-q_proj+k_proj+v_proj+o_proj_bf16+bf16_adamw_b8s4096_ckpt", "fp32"),
        (140, "mistral-7b-v0.1_full_fp16_adamw_b8s4096_ckpt", None),
        (148, "mistral-7b-v0.1_qlora-nf4-peft-r16-q_proj+k_proj+v_proj+o_proj_fp16+fp16_adamw_b4s4096_ckpt", "fp32"),
        (156, "mistral-7b-v0.1_qlora-nf4-none-r16-q_proj+k_proj+v_proj+o_proj_fp16+fp16_adamw_b8s4096_ckpt", "fp32"),
    ],
)
def test_a_rows_cell_is_what_was_run(line: int, cell_id: str, lora_dtype: str | None) -> None:
    spec = cell_of(row_of(line))
    assert isinstance(spec, CellSpec)
    assert (spec.cell_id, spec.lora_dtype) == (f"{cell_id}_flash_attention_2", lora_dtype)
    assert cell_of(row_of(line), device="cpu").cell_id == cell_id


@pytest.mark.parametrize(
    ("line", "metric", "memory_bytes"),
    [
        (2, "max_allocated", 15193274880),  # raw bytes in the notes beat 14.150 GiB
        (3, "nvidia-smi", 18102 * 2**20),  # raw MiB
    ],
)
def test_raw_numbers_are_taken_to_the_byte(line: int, metric: str, memory_bytes: int) -> None:
    assert (row_of(line).metric, row_of(line).memory_bytes) == (metric, memory_bytes)


def test_gb_gib_and_unknown_units_are_kept_apart() -> None:
    def first(source: str) -> PublishedRow:
        return next(row for row in list_published() if row.source.startswith(source))

    assert first("litgpt config_hub").memory_bytes == 17_430_000_000  # 17.43 GB, printed as bytes / 1e9
    assert first("ms-swift Benchmark.md (2024-01").memory_bytes == round(23.85 * 2**30)
    assert first("Qwen2.5 examples").memory_bytes is None  # 42.18 "GB"


def test_same_architecture_means_the_same_parameters() -> None:
    for line, cell in CELLS.items():
        assert catalog.find_model(cell.model).n_params == row_of(line).n_params


def test_a_run_that_pins_no_versions_had_the_days_newest() -> None:
    assert row_of(148).versions["bitsandbytes"] == (0, 43, 1)
    assert row_of(22).versions["transformers"] == (4, 48, 1)


def test_the_committed_table_is_of_the_rows_that_are_cells() -> None:
    done = subprocess.run([sys.executable, published.__file__, "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    rows = read_csv(published.TABLE)
    assert {int(row["line"]): row["cell"] for row in rows} == {line: cell.cell_id for line, cell in CELLS.items()}
    for row in rows:
        assert int(row["measured_bytes"]) == row_of(int(row["line"])).memory_bytes
        assert abs(int(row["emulated_bytes"]) - int(row["measured_bytes"])) <= 512
