"""Lengths of a data set: files and quantiles as read, batches counted by hand, the replay against predict's own."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vramprobe.cli.verbs import app
from vramprobe.errors import SpecError
from vramprobe.lengths.answer import answer
from vramprobe.lengths.batches import Shape, make_batches
from vramprobe.lengths.fragmentation import reserved_over_steps
from vramprobe.lengths.padding import padded_data
from vramprobe.lengths.reading import read_lengths
from vramprobe.predict import at_hand
from vramprobe.predict.questions import cell, predict

CELL = {"model": "smollm2-135m", "method": "lora", "batch_size": 2, "seq_len": 512}
WORDS = ["predict", "--model", "smollm2-135m", "--method", "lora", "--batch-size", "2", "--seq-len", "512"]


@pytest.mark.parametrize(
    ("name", "text", "column", "expected"),
    [
        ("plain.txt", "3\n\n5\n", "", [3, 5]),
        ("table.csv", "id,tokens\na,3\nb,5\n", ":tokens", [3, 5]),
        ("histogram.csv", "length,count\n3,2\n5,0\n7,1\n", "", [3, 3, 7]),
        ("rows.jsonl", '{"input_ids": [1, 2, 3]}\n{"input_ids": [1]}\n', "", [3, 1]),
        ("rows.jsonl", '{"n": 4}\n{"n": 9}\n', ":n", [4, 9]),
    ],
)
def test_each_kind_of_file_is_read(tmp_path: Path, name: str, text: str, column: str, expected: list[int]) -> None:
    (tmp_path / name).write_text(text)
    assert read_lengths(f"{tmp_path / name}{column}") == expected


def test_the_histogram_that_ships_is_that_of_its_source() -> None:
    """19,366 conversations; the sum of their tokens, the median and the longest as counted in the source's file."""
    found = sorted(read_lengths("azure-chat"))
    assert (len(found), sum(found)) == (19_366, 26_450_535)
    assert (found[0], found[9682], found[-1]) == (64, 1412, 14_089)


def test_quantiles_are_where_they_were_given() -> None:
    found = read_lengths("min=10 p50=600 p99=3000 max=8192 rows=101")
    assert found == sorted(found)
    assert (len(found), found[0], found[50], found[99], found[100]) == (101, 10, 600, 3000, 8192)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("p50=600", "add max="),
        ("p50=600 max=6", "may not fall"),
        ("median=600 max=700", "median=600"),
        ("no-such-file.txt", "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused(given: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        read_lengths(given)


def test_text_is_not_tokenized_and_an_unknown_column_names_those_there(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,tokens\nhello,3\n")
    with pytest.raises(SpecError, match="the file has text, tokens"):
        read_lengths(f"{tmp_path / 'a.csv'}")
    with pytest.raises(SpecError, match=r"'hello'.*tokenized first"):
        read_lengths(f"{tmp_path / 'a.csv'}:text")


def test_batches_are_padded_to_their_longest_row_and_truncated() -> None:
    found = make_batches([3, 9, 20, 5, 1], batch_size=2, max_length=10, sampler="sequential", pad_to_multiple_of=4)
    assert [batch.shape for batch in found] == [Shape(2, 12), Shape(2, 12), Shape(1, 4)]
    assert [batch.rows for batch in found] == [(1, 0), (2, 3), (4,)]
    assert [batch.num_tokens for batch in found] == [12, 15, 1]


@pytest.mark.parametrize("sampler", ["random", "group_by_length"])
def test_a_seed_repeats_its_order_and_every_row_comes_once(sampler: str) -> None:
    lengths = list(range(1, 102))
    words = {"batch_size": 4, "max_length": 500, "sampler": sampler}
    first, again, other = (make_batches(lengths, **words, seed=seed) for seed in (7, 7, 8))
    assert first == again != other
    assert sorted(row for batch in first for row in batch.rows) == list(range(101))


def test_grouping_by_length_pads_less_and_begins_with_the_longest() -> None:
    lengths = [1 + (37 * row) % 1000 for row in range(1000)]
    samplers = ("group_by_length", "random")
    grouped, at_random = (make_batches(lengths, batch_size=8, max_length=1000, sampler=one) for one in samplers)
    padded = [sum(batch.shape.num_tokens for batch in batches) for batches in (grouped, at_random)]
    assert padded[0] < padded[1] / 1.3
    assert grouped[0].shape.seq_len == 1000


def test_packs_are_best_fit() -> None:
    found = make_batches([6, 5, 4, 3, 2], batch_size=1, max_length=10, sampler="packing")
    assert sorted(batch.num_tokens for batch in found) == [10, 10]
    with pytest.raises(SpecError, match="allowed: random"):
        make_batches([1, 2], batch_size=1, max_length=9, sampler="sorted")


def test_the_worst_batch_is_the_longest_and_predicted_as_predict_does() -> None:
    found, batches = answer([600] * 50 + [1500] + [600] * 49, gpu="RTX-4090", **CELL | {"seq_len": 2048})
    worst = found.peaks[-1]
    assert (worst.seq_len, worst.rows[0], worst.num_rows) == (1500, 50, 2)
    assert batches[worst.batch].rows == worst.rows
    assert worst.allocated_bytes == predict(gpu="RTX-4090", **CELL | {"seq_len": 1500}).peak_allocated_bytes.value
    assert [one.seq_len for one in found.peaks[:2]] == [600, 600]
    assert found.padding_share == pytest.approx(900 / (49 * 1200 + 3000))
    assert found.max_length.rows_cut_share == 0


def test_a_cut_counts_rows_and_tokens() -> None:
    long = 8000
    found, _ = answer([600] * 99 + [long], gpu="RTX-3060", pad_to_multiple_of=64, **CELL | {"seq_len": long})
    limit = found.max_length
    assert limit.value is not None
    assert 600 < limit.value < long
    assert limit.value % 64 == 0
    assert limit.rows_cut_share == 0.01
    assert limit.tokens_cut_share == (long - limit.value) / (59_400 + long)


def test_the_replay_of_one_shape_is_that_of_predict() -> None:
    (course,), notes = reserved_over_steps([Shape(2, 512)], 3, settings=[("", 0)], **CELL)
    played = at_hand.replay_at_hand(cell(device="cuda", **CELL))
    assert course.peak_allocated_bytes == played.peak.allocated_bytes
    assert course.peak_reserved_bytes == played.peak.reserved_bytes
    assert notes == []


def test_varied_shapes_fragment_and_expandable_segments_reserve_less() -> None:
    shapes = [Shape(2, 520 + (277 * step) % 400) for step in range(20)]
    settings = [("", 0), ("", 1), ("expandable_segments:True", 0)]
    (default, emptied, expandable), _ = reserved_over_steps(shapes, 30, settings=settings, **CELL)
    assert default.num_steps == len(default.reserved_bytes) == 30
    assert default.peak_reserved_bytes > default.first_reserved_bytes
    assert emptied.last_reserved_bytes < default.last_reserved_bytes
    assert expandable.peak_reserved_bytes < default.peak_reserved_bytes
    assert expandable.peak_reserved_bytes >= expandable.peak_allocated_bytes


def test_the_step_that_runs_out_of_memory_is_named() -> None:
    shapes = [Shape(2, 512)] * 5 + [Shape(8, 8192)]
    (course,), _ = reserved_over_steps(shapes, 20, gpu="RTX-4090", settings=[("", 0)], **CELL)
    assert (course.num_steps, course.oom_step) == (5, 6)
    with pytest.raises(SpecError, match="--grad-accum 4"):
        reserved_over_steps(shapes, 2, **CELL | {"grad_accum": 4})


def test_predict_shows_the_data_the_worst_batch_and_the_replay() -> None:
    lengths = "min=520 p50=600 max=1000 rows=100"
    words = [*WORDS[:-1], "900", "--lengths", lengths, "--gpu", "RTX-4090", "--replay-steps", "5"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    for part in ("100 rows", "1,000 (row 99)", "truncated", "50 batches (random, seed 0)", "5 steps", "worst batch:"):
        assert part in done.output
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert found["lengths"]["peaks"][-1]["allocated_bytes"] == found["peak_allocated_bytes"]["value"]
    assert len(found["replay"]) == 6


@pytest.mark.parametrize("words", [["--replay-steps", "5"], ["--lengths", "max=9", "--python", "python"]])
def test_options_that_do_not_go_together_are_wrong_usage(words: list[str]) -> None:
    done = CliRunner().invoke(app, [*WORDS, *words])
    assert done.exit_code == 2
    assert "--lengths" in done.output


def test_padding_is_counted_by_batch() -> None:
    data = padded_data([3, 10, 5, 40], batch_size=2, max_length=20, sampler="sequential", pad_to_multiple_of=4)
    assert (data.num_tokens, data.num_padded_tokens, data.longest) == (3 + 10 + 5 + 20, 2 * 12 + 2 * 20, 20)
    assert data.padded(380) == 640
    assert data.padding_share == pytest.approx(1 - 38 / 64)


RECOMMEND = ["recommend", "--model", "smollm2-135m", "--method", "lora", "--seq-len", "512", "--gpu", "RTX-4090"]


def test_a_recommendation_pays_for_padding_and_fits_the_longest_batch(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("100\n400\n" * 50)
    words = [*RECOMMEND, "--batch-size", "2", "--sampler", "sequential", "--lengths", str(tmp_path / "rows.txt")]
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert (found["tokens"], found["seq_len"]) == (100 * 400, 400)  # each pair of rows is as long as its longer one
    given = CliRunner().invoke(app, [*words, "--tokens", "25k", "--json"])
    assert json.loads(given.stdout)["tokens"] == 40_000
    assert "25k tokens of the data are 40k with 37.5 % padding" in given.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lengths", "azure-chat"], "needs --batch-size"),
        (["--lengths", "azure-chat", "--batch-size", "2", "--longest"], "drop --longest"),
        (["--tokens", "1M", "--sampler", "packing"], "need --lengths"),
    ],
)
def test_what_a_recommendation_for_lengths_lacks_is_told(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, [*RECOMMEND, *words], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert said in result.stderr
