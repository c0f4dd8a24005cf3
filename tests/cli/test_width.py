"""Width of what the command prints: no line is wider than the terminal, and none is broken within a word that fits."""

import io
from pathlib import Path

import pytest
from grids import grid
from rich.console import Console
from typer.testing import CliRunner

from vramprobe.cli.options import ANSWERED
from vramprobe.cli.verbs import app
from vramprobe.report.definition import Column, Table
from vramprobe.report.formats import terminal

ROOT = Path(__file__).parents[2]
RESULTS = str(ROOT / "results" / "cpu" / "quickstart")
LARGE = ["predict", "--model", "llama-3.1-8b", "--method", "qlora", "--batch-size", "1", "--gpu", "RTX-3060"]
SMALL = ["--model", "smollm2-135m", "--method", "lora", "--seq-len", "512"]
#: Verbs whose lines are all within the terminal. Of plan, run, check, fit and report some are names and paths, which
#: are there to be copied and stay on one line.
FITTING = {
    "claims": ["claims"],
    "claims --id": ["claims", "--id", "L1-12"],
    "calibrate": ["calibrate", RESULTS],
    "models": ["models"],
    "gpus": ["gpus"],
    "check": ["check", RESULTS],
    "predict": [*LARGE, "--seq-len", "2048"],
    "predict --max-batch": ["predict", *SMALL, "--gpu", "RTX-3060", "--max-batch"],
    "recommend": ["recommend", *SMALL, "--tokens", "1M"],
    "recommend tokens": ["recommend", *SMALL, "--budget", "1"],
}


def shown(words: list[str], columns: int) -> list[str]:
    done = CliRunner().invoke(app, words, env={"COLUMNS": str(columns)})
    assert done.exit_code in ANSWERED, done.output
    return done.output.splitlines()


@pytest.mark.parametrize("verb", grid(FITTING, *(verb for verb in FITTING if verb != "claims")))
def test_no_line_is_wider_than_80_columns(verb: str) -> None:
    lines = shown(FITTING[verb], 80)
    assert len(lines) >= 2
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize(
    "verb", grid(["claims", "claims --id", "calibrate", "models", "gpus"], "claims --id", "models", "gpus")
)
def test_tables_stay_within_40_columns_too(verb: str) -> None:
    assert max(map(len, shown(FITTING[verb], 40))) <= 40


def table(*rows: tuple[str, str, str]) -> Table:
    headings = enumerate(("name", "error", "why"))
    columns = [Column(name, name, lambda row, at=at: row[at], is_number=name == "error") for at, name in headings]
    return Table(title="Any", columns=columns, rows=rows)


def lines_of(one: Table, width: int) -> list[str]:
    console = Console(width=width, highlight=False, file=(out := io.StringIO()))
    terminal.show([one], [], console)
    return [line.rstrip() for line in out.getvalue().splitlines()]


ROW = ("transformer-math", "+12.50 %, -3.00 %", "all of it is kept")


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (60, ["name                          error  why", "transformer-math  +12.50 %, -3.00 %  all of it is kept"]),
        (
            46,
            [
                "name                  error  why",
                "transformer-math  +12.50 %,  all of it is kept",
                "                    -3.00 %",
            ],
        ),
        (
            32,
            [
                "name                 error why",
                "transformer-math +12.50 %, all",
                "                   -3.00 % of it",
                "                           is",
                "                           kept",
            ],
        ),
        (
            28,
            [
                "name             error why",
                "transformer- +12.50 %, all",
                "math           -3.00 % of it",
                "                       is",
                "                       kept",
            ],
        ),
        (20, ["transformer-math", "  error: +12.50 %,", "  -3.00 %", "  why: all of it is", "  kept"]),
    ],
)
def test_a_narrow_table_folds_between_words_then_within_names_then_into_blocks(width: int, expected: list[str]) -> None:
    assert lines_of(table(ROW), width) == expected
