"""CardFit: what is outside of it, and its file."""

import copy
import json
import re
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from factories import make_spec

from vramprobe.errors import FitError
from vramprobe.model import card_fit
from vramprobe.model.card_fit import CardFit, load_fit, save_fit

RATIO = {"value": 1.0, "low": 0.9, "high": 1.2}
WHOLE: dict[str, Any] = {
    "card": "H100-SXM",
    "gaps": {"num_records": 9, "allocated": RATIO, "reserved": RATIO},
    "models": ["gpt2"],
    "num_params": {"low": 10**8, "high": 10**9},
    "num_tokens": {"low": 32, "high": 64},
    "choices": {"method": ["full"], "optim": ["adamw_torch", "sgd"]},
    "left_out": {},
    "data_fingerprint": "0123",
    "versions": {},
    "vramprobe_version": "0.1.0",
}


@pytest.fixture
def model() -> CardFit:
    return CardFit.model_validate(WHOLE)


@pytest.mark.parametrize(
    ("options", "num_params", "card", "words"),
    [
        ({}, 10**8, "H100-SXM", []),
        ({}, None, None, []),
        ({"seq_len": 2}, 10**8, "H100-SXM", []),  # fewer tokens: an interval's end never falls as a cell grows
        ({"seq_len": 33}, 10**8, "H100-SXM", ["66 tokens (fitted: up to 64)"]),
        ({}, 99_000_000, "H100-SXM", ["99M parameters (fitted: 100M to 1B)"]),
        ({}, 2 * 10**9, "H100-SXM", ["2B parameters (fitted: 100M to 1B)"]),
        ({}, 10**8, "T4", ["card T4"]),
        ({"method": "lora", "optim": "adafactor"}, 10**8, "H100-SXM", ["method lora", "optim adafactor"]),
    ],
)
def test_what_no_record_is_like_is_named(
    options: dict[str, Any], num_params: int | None, card: str | None, words: list[str], model: CardFit
) -> None:
    spec = make_spec(**{"device": "cuda", "optim": "adamw_torch"} | options)
    assert model.outside(spec, num_params, card) == words


def test_a_saved_fit_reads_back_the_same(model: CardFit, tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    save_fit(model, path)
    assert load_fit(path) == model
    with pytest.raises(FitError, match="cannot write the fit"):
        save_fit(model, tmp_path / "no such folder" / "fit.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the fit"),
        ("{", "not JSON"),
        ('{"a": 1}', "no fit"),
        ('{"gaps": {}, "format": 99}', "format 99"),
        ('{"coefficients": {}, "format": 2}', "has format 2, this vramprobe reads 4; fit again: vramprobe fit RESULTS"),
        ('{"overall": {}, "format": 3}', "has format 3, this vramprobe reads 4"),
        ('{"gaps": {}, "format": 4}', "damaged at"),
    ],
)
def test_a_bad_fit_file_is_a_clear_error(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(FitError, match=message):
        load_fit(path)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("gaps", "allocated", "value"), float("nan"), "gaps.allocated.value"),
        (("gaps", "allocated", "high"), float("inf"), "gaps.allocated.high"),
        (("gaps", "allocated", "low"), 1.1, "must be in this order"),
        (("gaps", "reserved"), {"value": -1.0, "low": -1.1, "high": 1.2}, "a ratio of -1.0"),
        (("gaps", "num_records"), 0, "gaps.num_records"),
        (("num_tokens", "high"), 10**400, "num_tokens.high"),
        (("card",), None, "card"),
        (("luck",), 1, "luck"),
    ],
)
def test_a_damaged_fit_is_refused_when_it_is_read(
    keys: tuple[str, ...], value: Any, message: str, tmp_path: Path
) -> None:
    data = copy.deepcopy(WHOLE | {"format": card_fit.FORMAT})
    reduce(getitem, keys[:-1], data)[keys[-1]] = value
    path = tmp_path / "fit.json"
    path.write_text(json.dumps(data))
    with pytest.raises(FitError, match=f"is damaged.*{re.escape(message)}.*fit again"):
        load_fit(path)
