"""A vision-language model's inverse questions: an answer, or the refusal that the forward question has."""

from __future__ import annotations

import pytest
from command_line import vramprobe

from vramprobe import api
from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.errors import SpecError, VramprobeError
from vramprobe.predict import questions

CELL = {"model": "qwen3-vl-8b", "method": "lora", "batch_size": 1, "seq_len": 512, "images": 1}


def test_one_that_does_not_fit_is_answered_with_what_would_help() -> None:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in CELL.items()]
    done = vramprobe("predict", *words, "--gpu", "RTX-4090")
    assert done.returncode == 3, done.stderr
    assert "GeForce RTX 4090: does not fit" in done.stdout
    assert "--gradient-checkpointing" in done.stdout
    assert "--min-gpus" not in done.stdout  # a model with a vision tower is predicted on one GPU


def test_ranks_are_refused_whichever_way_they_are_asked_for() -> None:
    with pytest.raises(SpecError, match="has a vision tower, which is predicted on one GPU; leave sharding, num_gpus"):
        api.predict(sharding="fsdp", num_gpus=4, **CELL)
    with pytest.raises(
        UnsupportedArchitecture, match="has a vision tower, which is predicted on one GPU, so no number"
    ):
        api.min_gpus(gpu="RTX-4090", sharding="fsdp", **CELL)
    with pytest.raises(
        UnsupportedArchitecture, match="has a vision tower, which is predicted on one GPU, so no number"
    ):
        api.min_gpus_by_sharding(gpu="RTX-4090", **CELL)


@pytest.mark.parametrize(
    ("ask", "asked"), [(api.max_seq_len, "seq_len"), (api.max_batch_size, "batch_size")], ids=lambda one: str(one)[:12]
)
def test_the_largest_is_looked_for_from_the_least_that_there_is(ask, asked: str) -> None:
    words = CELL | {"gradient_checkpointing": True, "images": 2}
    del words[asked]
    found = ask(gpu="RTX-4090", **words)
    value = found.fits.value
    assert value >= (4 if asked == "seq_len" else 1)  # two tokens beside each image
    told = questions.predict(gpu="RTX-4090", loop="trainer", **words, **{asked: value})  # no note on others
    assert told == found.fits.prediction
    if asked == "seq_len":
        with pytest.raises(
            VramprobeError, match="not even seq_len 4 with batch_size 1 fits on GeForce RTX 4090"
        ) as refused:
            ask(gpu="RTX-4090", **words | {"method": "full"})
        assert "--min-gpus" not in str(refused.value)  # which has no answer for a vision tower


def test_a_smaller_image_is_among_the_changes() -> None:
    found = api.changes(gpu="RTX-4090", **CELL, image_size="2350x2350")
    [smaller] = [one for one in found if "image_size" in one.options]
    assert smaller.options == {"image_size": "1175x1175"}
    now = api.predict(gpu="RTX-4090", **CELL | {"image_size": "1175x1175"}, replays=False)
    assert smaller.to_bytes == (now.reserved_bytes or now.peak_allocated_bytes).value
