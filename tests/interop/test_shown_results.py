"""Every result of the Python API shows itself: a sentence, a DataFrame, HTML, a plot; and the verbs are in ``dir``."""

import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from command_line import OUT_OF_MEMORY

import vramprobe
from vramprobe import api
from vramprobe.errors import VramprobeError
from vramprobe.interop.watch import WatchedRun
from vramprobe.records.profile import read_profiles
from vramprobe.records.shown import Shown

PROFILES = Path(__file__).parents[2] / "benchmarks" / "rollouts" / "features.jsonl"
CELL = {"model": "smollm2-135m", "method": "lora", "batch_size": 2, "seq_len": 1024}  # whose recipe ships


@cache
def results() -> dict[type, Any]:
    """One result of each class."""
    one, other = read_profiles(PROFILES)[:2]
    recommended = {"model": "smollm2-135m", "method": "lora", "gpus": ["RTX-4090"], "max_gpus": 1, "seq_len": 1024}
    made = [
        vramprobe.predict(gpu="RTX-4090", **CELL),
        vramprobe.techniques(),
        vramprobe.techniques(gpu="RTX-4090", model="llama-3.1-8b", method="lora", batch_size=1, seq_len=2048),
        vramprobe.explain(OUT_OF_MEMORY),
        one,
        vramprobe.diff(one, other),
        vramprobe.recommend(tokens="1M", **recommended),
        vramprobe.recommend(budget=1, most="tokens", **recommended),
        WatchedRun(profile=one),
    ]
    return {type(each): each for each in made}


def shown_classes() -> Iterator[type]:
    todo = [Shown]
    while todo:
        found = todo.pop().__subclasses__()
        todo += found
        yield from (one for one in found if one.__module__.startswith("vramprobe."))


def test_every_class_that_shows_itself_is_here() -> None:
    assert set(results()) == set(shown_classes())


@pytest.mark.parametrize(
    "name",
    ["JudgedPrediction", "TechniqueList", "Ranking", "Report", "ProfileRecord", "Difference", "Recommendation", "Most",
     "WatchedRun"],
)  # fmt: skip
def test_a_result_is_a_sentence_a_frame_html_and_a_plot(name: str) -> None:
    result = next(one for kind, one in results().items() if kind.__name__ == name)
    assert len(result.headline().splitlines()) == 1
    frame, html = result.to_frame(), result._repr_html_()
    assert len(frame) == len(result.rows())
    assert all(str(frame[column].dtype) == "Int64" for column in frame if column.endswith("_bytes"))
    assert html.count("<tr>") == (len(frame) + 1 if len(frame) else 0)
    if name == "Report":  # a message alone has no bytes by line
        with pytest.raises(VramprobeError, match="nothing to draw"):
            result.plot()
    else:
        assert result.plot().patches


def test_a_prediction_s_rows_are_its_terms() -> None:
    found = vramprobe.predict(gpu="RTX-4090", **CELL)
    assert found.to_frame()["num_bytes"].sum() == found.peak_allocated_bytes.value
    assert found.verdict.verdict in found.headline()
    assert vramprobe.predict(**CELL).verdict is None


def test_what_a_page_would_run_is_escaped() -> None:
    html = _Named()._repr_html_()
    assert "&lt;b&gt;" in html
    assert "&lt;i&gt;" in html
    assert "<b><b>" not in html


class _Named(Shown):
    def headline(self) -> str:
        return "<b>"

    def rows(self) -> list[dict[str, Any]]:
        return [{"name": "<i>", "num_bytes": None}]


def test_the_verbs_are_there_and_are_calls_and_packages() -> None:
    assert set(vramprobe.__all__) <= set(dir(vramprobe))
    for name in ("diff", "explain", "predict", "profile", "recommend", "techniques"):
        assert inspect.signature(getattr(vramprobe, name)) == inspect.signature(getattr(api, name))
    from vramprobe.predict import verdict

    assert vramprobe.predict.verdict is verdict
    with pytest.raises(AttributeError, match="no attribute 'predicts'"):
        vramprobe.predicts  # noqa: B018


def test_a_frame_s_unknown_bytes_are_missing() -> None:
    assert _Named().to_frame()["num_bytes"].isna().all()
    assert isinstance(_Named().to_frame()["num_bytes"].dtype, pd.Int64Dtype)
