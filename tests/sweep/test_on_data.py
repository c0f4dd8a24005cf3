"""A sweep on a data set: its cells at their longest batches, the padding beside them, in `plan` and in `run`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vramprobe import api
from vramprobe.cli.verbs import app
from vramprobe.errors import SpecError
from vramprobe.sweep.definition import Sweep, load_sweep
from vramprobe.sweep.on_data import Data, on_data

SWEEP = """
cells:
  - {model: smollm2-135m, method: lora, batch_size: [1, 2], seq_len: [100, 1000, 2000]}
"""


@pytest.fixture
def sweep_file(tmp_path: Path) -> Path:
    path = tmp_path / "sweep.yaml"
    path.write_text(SWEEP)
    return path


@pytest.fixture
def sweep(sweep_file: Path) -> Sweep:
    return load_sweep(sweep_file, device="cuda")


def test_each_cell_is_at_its_longest_batch_and_truncations_above_all_rows_are_one(sweep: Sweep) -> None:
    found = on_data(sweep, Data([50, 400, 30, 700], "sequential", pad_to_multiple_of=64))
    assert [(cell.batch_size, cell.seq_len) for cell in found.cells] == [(1, 128), (1, 704), (2, 128), (2, 704)]
    assert len(found.notes) == 2
    padding = found.data[found.cells[-1].fingerprint]
    assert (padding.num_truncated, padding.num_tokens) == (0, 1180)
    assert padding.num_padded_tokens == 2 * 448 + 2 * 704
    assert found.data[found.cells[0].fingerprint].num_truncated == 2


def test_what_is_held_out_stays_so(sweep: Sweep) -> None:
    held = frozenset(cell.fingerprint for cell in sweep.cells if cell.batch_size == 2)
    found = on_data(Sweep(**vars(sweep) | {"held_out": held}), Data([300]))
    assert [cell.batch_size for cell in found.cells if cell.fingerprint in found.held_out] == [2, 2]
    assert len(found.held_out) == 2


def test_a_length_that_a_cell_cannot_have_names_the_cell(tmp_path: Path) -> None:
    path = tmp_path / "cp.yaml"
    words = "sharding: fsdp, num_gpus: 4, cp_size: 2"
    path.write_text(f"cells:\n  - {{model: smollm2-135m, method: full, batch_size: 1, seq_len: 512, {words}}}\n")
    with pytest.raises(SpecError, match=r"smollm2-135m.*longest batch, 301 tokens"):
        on_data(load_sweep(path, device="cuda"), Data([301]))


def test_a_plan_shows_padding_and_what_is_truncated(sweep_file: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("50\n400\n30\n700\n")
    words = ["plan", str(sweep_file), "--gpu", "RTX-4090", "--lengths", str(tmp_path / "rows.txt")]
    words += ["--sampler", "sequential"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "padding  truncated" in done.output
    assert "b2s700" in done.output
    cells = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)["cells"]
    (cell,) = (one for one in cells if "b2s100" in one["cell_id"])
    assert cell["data"]["num_truncated"] == 2
    plain = api.plan(sweep_file, gpu="RTX-4090", only="b2s100", seq_len=100).rows[0]
    assert cell["peak_allocated_bytes"]["value"] == plain.prediction.peak_allocated_bytes.value


def test_options_of_lengths_alone_are_wrong_usage(sweep_file: Path) -> None:
    for words in (["--sampler", "packing"], ["--pad-to-multiple-of", "8"]):
        done = CliRunner().invoke(app, ["plan", str(sweep_file), "--gpu", "RTX-4090", *words])
        assert done.exit_code == 2
        assert "need --lengths" in done.output
    for words, said in ((["p50=3"], "add max="), (["max=9", "--sampler", "sorted"], "allowed: random")):
        done = CliRunner().invoke(app, ["plan", str(sweep_file), "--gpu", "RTX-4090", "--lengths", *words])
        assert done.exit_code == 1
        assert said in str(done.exception)
