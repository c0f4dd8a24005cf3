"""Predictions as arrays: to the byte what predict says of each cell, with and without a fit."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from factories import CONSTANT_BYTES, TRUE, specs, synthetic

from vramprobe.errors import OutOfRange, VramprobeError
from vramprobe.model.fit import fit
from vramprobe.model.memory_model import MemoryModel, Spread
from vramprobe.predict.grid import CellArrays, predict_cells, predict_grid, verdicts
from vramprobe.predict.predict import predict
from vramprobe.predict.prediction import Interval
from vramprobe.predict.verdict import verdict
from vramprobe.spec import CellSpec, resolve
from vramprobe.terms import Course
from vramprobe.units import GIB

SETUPS: list[dict[str, Any]] = [
    {"model": "llama-3.1-8b", "method": "qlora", "gradient_checkpointing": True},
    {"model": "llama-3.2-1b", "method": "full", "recipe": "mixed", "optim": "adamw_torch"},
    {"model": "smollm2-135m", "method": "full", "attn": "eager", "grad_accum": 4},
    {"model": "pythia-410m", "method": "lora", "lora_dropout": 0.1},
    {"model": "gpt2", "method": "full", "optim": "adafactor", "gradient_checkpointing": True},
    {"model": "opt-350m", "method": "lora"},
    {"model": "llama-2-7b", "method": "lora", "fused_linear_cross_entropy": True},
]
#: On a GPU alone.
TILED = {"model": "llama-3.2-3b", "method": "lora", "loss": "chunked_nll"}
PAIRS = {"model": "qwen2.5-0.5b", "method": "full", "trainer": "dpo"}


@dataclass(frozen=True)
class Card:
    name: str
    total_bytes: int | None
    shares_host_memory: bool = False


@pytest.fixture(scope="module")
def model() -> MemoryModel:
    """A fit with coefficients of many digits, a constant, and all three tiers."""
    one = fit([synthetic(spec, TRUE, CONSTANT_BYTES) for spec in specs()])
    tiers = {
        "reserved_over_allocated": Spread(value=1.0831, low=1.01234, high=1.1731),
        "device_over_reserved_bytes": Spread(value=5.5e8, low=4.1e8, high=6.7e8),
    }
    return one.model_copy(update=tiers)


def spec_of(words: dict[str, Any], device: str = "cuda") -> CellSpec:
    return resolve(batch_size=2, seq_len=8, device=device, **words)


def same(cells: CellArrays, where: tuple[int, ...], spec: CellSpec, model: MemoryModel | None) -> None:
    """Everything that a Prediction and the arrays both have."""
    one = predict(spec, model, allow_extrapolation=True)
    assert {cause: int(sizes[where]) for cause, sizes in cells.terms.items() if sizes[where]} == one.terms
    for name in ("peak_allocated_bytes", "reserved_bytes", "device_bytes"):
        found, expected = getattr(cells, name), getattr(one, name)
        if expected is None:
            assert found is None
        else:
            assert Interval(**{key: int(sizes[where]) for key, sizes in found._asdict().items()}) == expected, name
    assert cells.places[cells.peak_place[where]] == (one.peak_phase, one.peak_label)
    assert cells.peak_phase[where] == one.peak_phase
    assert cells.constant_bytes[where] == one.constant_bytes
    try:
        predict(spec, model)
        assert not cells.is_far[where]
    except OutOfRange:
        assert cells.is_far[where]


@pytest.mark.parametrize("with_fit", [False, True])
@pytest.mark.parametrize("words", [*SETUPS, TILED, PAIRS], ids=lambda words: words["model"])
def test_a_grid_is_to_the_byte_what_predict_says(words: dict[str, Any], with_fit: bool, model: MemoryModel) -> None:
    given, spec = model if with_fit else None, spec_of(words)
    rng = np.random.default_rng(7)
    batch_sizes = np.unique(np.concatenate([[1, 2], np.exp(rng.uniform(0, 7, 12)).astype(int)]))
    seq_lens = np.unique(np.concatenate([[1, 2, 1024], np.exp(rng.uniform(0, 6.9, 12)).astype(int)]))
    cells = predict_grid(spec, batch_sizes[:, None], seq_lens, given)
    assert cells.is_far.shape == (batch_sizes.size, seq_lens.size)
    for i, batch_size in enumerate(batch_sizes.tolist()):
        for j, seq_len in enumerate(seq_lens.tolist()):
            assert (cells.batch_size[i, j], cells.seq_len[i, j]) == (batch_size, seq_len)
            same(cells, (i, j), spec.model_copy(update={"batch_size": batch_size, "seq_len": seq_len}), given)


@pytest.mark.parametrize("with_fit", [False, True])
def test_many_different_cells_keep_their_order(with_fit: bool, model: MemoryModel) -> None:
    given = model if with_fit else None
    rng = np.random.default_rng(3)
    many = [
        spec_of(SETUPS[rng.integers(len(SETUPS))], device=("cpu", "cuda")[rng.integers(2)]).model_copy(
            update={"batch_size": int(rng.integers(1, 9)), "seq_len": int(rng.integers(1, 1025))}
        )
        for _ in range(300)
    ]
    cells = predict_cells(many, given)
    for index, spec in enumerate(many):
        same(cells, (index,), spec, given)


def test_a_grid_across_chunks_is_as_a_grid_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(SETUPS[0])
    whole = predict_grid(spec, np.arange(1, 41)[:, None], np.arange(1, 101))
    monkeypatch.setattr("vramprobe.predict.grid._CHUNK", 7)
    parts = predict_grid(spec, np.arange(1, 41)[:, None], np.arange(1, 101))
    assert (whole.peak_allocated_bytes.value == parts.peak_allocated_bytes.value).all()
    assert (whole.peak_place == parts.peak_place).all()


def test_terms_are_rounded_before_they_are_compared_and_the_first_of_equals_wins(
    monkeypatch: pytest.MonkeyPatch, model: MemoryModel
) -> None:
    """Halves of 3 and 3 bytes are 2 and 2 bytes, as much as the 4 that half of 7 rounds to, though 3 is below 3.5."""
    halves = model.model_copy(update={"coefficients": {"weights": 0.5, "gradients": 0.5}, "constant_bytes": {}})
    size = dict.fromkeys(("none", "three", "seven"), (0,) * 6) | {"three": (3, *(0,) * 5), "seven": (7, *(0,) * 5)}
    first = (("forward", "first"), [(size["none"], {"weights": size["three"], "gradients": size["three"]})])
    second = (("backward", "second"), [(size["none"], {"weights": size["seven"]})])
    monkeypatch.setattr(Course, "polynomials", lambda course: [first, second])
    cells = predict_grid(spec_of(SETUPS[0]), 2, 8, halves)
    assert cells.peak_allocated_bytes.value - cells.terms.pop("workspaces") == 4
    assert cells.peak_phase == "forward"
    assert {cause: int(sizes) for cause, sizes in cells.terms.items()} == {"weights": 2, "gradients": 2}


def test_memory_never_falls_with_batch_or_length() -> None:
    """What the bisections of predict/largest.py rest on."""
    for words in SETUPS:
        cells = predict_grid(spec_of(words), np.arange(1, 65)[:, None], np.arange(1, 257))
        peak = cells.peak_allocated_bytes.value
        assert (np.diff(peak, axis=0) > 0).all(), words
        assert (np.diff(peak, axis=1) > 0).all(), words


@pytest.mark.parametrize("with_fit", [False, True])
def test_verdicts_are_those_of_verdict(with_fit: bool, model: MemoryModel) -> None:
    given, spec = model if with_fit else None, spec_of(SETUPS[3])
    card = Card("card", 24 * GIB)
    batch_sizes = list(range(1, 60))
    found = verdicts(predict_grid(spec, batch_sizes, 512, given), card)
    expected = [
        verdict(
            predict(spec.model_copy(update={"batch_size": b, "seq_len": 512}), given, allow_extrapolation=True), card
        ).verdict
        for b in batch_sizes
    ]
    assert found.tolist() == expected
    assert set(expected) == {"fits", "tight", "does not fit"}
    assert [one for one, other in pairwise(expected) if one != other] == ["fits", "tight"]


@pytest.mark.parametrize(
    ("batch_sizes", "seq_lens", "message"),
    [
        ([0, 1], [8], "batch_sizes: must be whole numbers of 1 or more"),
        ([1], [8.5], "seq_lens: must be whole numbers of 1 or more"),
        ([10**30], [8], "batch_sizes: must be whole numbers"),
        ([10**9], [10**9], "more than 8 PiB"),
        ([], [8], "no cells were given"),
    ],
)
def test_sizes_that_cannot_be_are_clear_errors(batch_sizes: list, seq_lens: list, message: str) -> None:
    with pytest.raises(VramprobeError, match=message):
        predict_grid(spec_of(SETUPS[0]), batch_sizes, seq_lens)


def test_importing_loads_no_numpy() -> None:
    code = "import sys, vramprobe.predict.grid; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
