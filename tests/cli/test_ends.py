"""Odd terminals and pipes: a closed reader, no columns, and numbers that no machine holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import HERE, vramprobe

from vramprobe import api
from vramprobe.errors import SpecError

#: A cell whose recipe ships: another would say on stderr that it is being recorded.
CELL = ["predict", "--model=smollm2-135m", "--method=lora", "--batch-size=2", "--seq-len=1024"]


@pytest.mark.parametrize("words", [CELL, ["models"], [*CELL, "--json"]], ids=" ".join)
def test_a_reader_that_has_enough_is_no_failure(words: list[str]) -> None:
    read, written = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "vramprobe", *words]
    done = subprocess.run(command, stdout=written, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": HERE})
    os.close(written)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("columns", ["0", "-3", "x", ""])
def test_columns_that_are_no_number_are_left_out(columns: str, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert vramprobe(*CELL).stdout.startswith("peak 3.04 GiB allocated")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--batch-size=99999999999999999999", "batch_size: 99999999999999999999 given; must be at most 2,147,483,647"),
        ("--seq-len=999999999999", "seq_len: 999999999999 given; must be at most"),
        ("--grad-accum=99999999999999999999", "grad_accum: 99999999999999999999 given; must be at most"),
        ("--num-gpus=99999999999999999999", "num_gpus: 99999999999999999999 given; must be from 1 to 1,048,576"),
    ],
)
def test_a_number_that_no_machine_holds_is_one_line(option: str, said: str) -> None:
    cell = ["predict", "--model=smollm2-135m", "--method=lora", "--batch-size=1", "--seq-len=1999999999", option]
    done = vramprobe(*cell, *(["--sharding=fsdp"] if "gpus" in option else []))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert said in done.stderr


def test_what_a_cell_lacks_is_named_in_python() -> None:
    for lacking, words in (
        ("model", {"method": "lora", "batch_size": 1, "seq_len": 5}),
        ("method, seq_len", {"model": "gpt2", "batch_size": 1}),
    ):
        with pytest.raises(SpecError, match=f"{lacking}: missing; a cell needs model, method, batch_size, seq_len"):
            api.predict(**words)


def test_a_file_of_prices_without_a_column_says_which_it_has(tmp_path: Path) -> None:
    (tmp_path / "pr.csv").write_text("gpu,usd\nT4,1\n")
    with pytest.raises(SpecError, match=r"has no column provider.*, but gpu, usd; a file of prices has the columns"):
        api.recommend(model="gpt2", method="lora", seq_len=64, tokens="1M", prices=tmp_path / "pr.csv")
