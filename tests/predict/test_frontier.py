"""The longest sequence for each number of rows: what max_seq_len says of each, until nothing worth it fits."""

import json

import pytest
from command_line import vramprobe

from vramprobe import api
from vramprobe.errors import SpecError, VramprobeError
from vramprobe.predict.frontier import LEAST_TOKENS

WORDS = {"model": "smollm2-135m", "method": "full", "gpu": "4GiB"}


def test_each_row_has_the_longest_sequence_of_so_many() -> None:
    found = api.frontier(**WORDS)
    sizes = [row.batch_size for row in found.rows]
    assert sizes == [2**power for power in range(len(sizes))]
    assert len(sizes) > 3
    for row in (found.rows[0], found.rows[2]):
        one = api.max_seq_len(batch_size=row.batch_size, **WORDS)
        assert (row.fits, row.tight) == (one.fits and one.fits.value, one.tight and one.tight.value)
    assert (found.rows[-1].tight or found.rows[-1].fits) >= LEAST_TOKENS
    after = api.max_seq_len(batch_size=2 * sizes[-1], **WORDS)
    assert (after.tight or after.fits).value < LEAST_TOKENS


def test_a_frontier_of_what_does_not_fit_or_is_given_is_refused() -> None:
    with pytest.raises(VramprobeError, match="not even seq_len 1 with batch_size 1 fits"):
        api.frontier(model="llama-3.1-8b", method="full", gpu="RTX-3060")
    with pytest.raises(SpecError, match="seq_len was given: drop it, or ask max_seq_len"):
        api.frontier(seq_len=512, **WORDS)


def test_both_questions_at_once_are_a_table() -> None:
    words = ("predict", "--model", "smollm2-135m", "--method", "full", "--gpu", "4GiB", "--max-batch", "--max-seq-len")
    found = api.frontier(widen=True, **WORDS)
    lines = vramprobe(*words).stdout.splitlines()
    said = " ".join(" ".join(lines[:2]).split())
    assert said == "GPU of 4GiB: the longest sequence for each number of rows, predicted, not measured"
    assert [line.split()[:2] for line in lines[3:5]] == [
        [str(row.batch_size), f"{row.fits:,}" if row.fits else "none"] for row in found.rows[:2]
    ]
    assert json.loads(vramprobe(*words, "--json").stdout) == found.model_dump(mode="json")
    refused = vramprobe(*words, "--batch-size", "2")
    assert refused.returncode == 2
    assert "--max-batch asks for the --batch-size that fits, so drop --batch-size" in refused.stderr
