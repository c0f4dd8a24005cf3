"""The table of out-of-memory errors: what explain says of each report is what the table says, and a run is repeated."""

import io
from dataclasses import replace

import pytest
from grids import grid
from predictions import some_prediction
from scripts import script

from vramprobe.catalog import find_gpu
from vramprobe.explain.report import report_of
from vramprobe.predict.prediction import Interval, Prediction
from vramprobe.predict.verdict import usable_bytes
from vramprobe.resolve import resolve
from vramprobe.units import GIB


def test_explain_says_of_each_report_what_the_table_says() -> None:
    tables, oom = script("tables"), script("truth.oom")
    rows = {row["source"]: row for row in tables.read_csv(oom.TABLE)}
    reports = oom.reports()
    assert [report["source"] for report in reports] == list(rows)
    for report in reports:
        said, row = report_of(io.BytesIO(report["text"].encode())), rows[report["source"]]
        assert row["requested_bytes"] == str(said.oom.requested)
        assert (row["explained_cause"], row["explained_phase"]) == (said.explanation.cause, said.phase.name)
        assert "cell" in report or report["why"].startswith("not repeated: ")
        assert "cell" not in report or report["assumed"]


def test_a_run_is_repeated_from_its_configuration_and_the_memory_left() -> None:
    oom = script("truth.oom")
    (report,) = (one for one in oom.reports() if one["source"] == "huggingface/trl#3172")
    again = oom.repeated(report, room=11_353_571_984)
    assert again.phase == "load"
    assert again.requested == -(-3584 * 18_944 * 2 // 2**21) * 2**21  # a weight of an MLP in 16 bits, to 2 MiB


@pytest.mark.parametrize("is_recorded", grid([True, False], False))
def test_a_run_on_several_gpus_is_predicted_near(is_recorded: bool, monkeypatch) -> None:
    """Nothing is repeated of it: the order of its requests is not known."""
    oom = script("truth.oom")
    if not is_recorded:
        monkeypatch.setattr(oom, "near", lambda spec, records: of_bytes(32 * GIB))
    ranks = next(one for one in oom.reports() if one["source"] == "hiyouga/LlamaFactory#260")
    assert oom.repeated(ranks, room=31 * GIB).phase == "does not fit"


def test_a_phase_counts_as_the_same_as_far_as_a_repetition_tells_it() -> None:
    same = script("truth.oom").same_phase
    assert same({"phase": "backward", "repeated_phase": "forward or backward"})
    assert same({"phase": "prepare", "repeated_phase": "load"})
    assert same({"phase": "optimizer_step", "repeated_phase": "fits"}) is False
    assert same({"phase": "evaluation", "repeated_phase": "forward"}) is None
    assert same({"phase": "", "repeated_phase": "load"}) is None


def of_bytes(size: int) -> Prediction:
    exact = Interval(value=size, low=size, high=size)
    return some_prediction(peak_allocated_bytes=exact, reserved_bytes=exact)


def test_a_published_run_is_judged_with_what_was_not_said() -> None:
    verdicts = script("truth.published_verdicts")
    verdicts.predicted_on = lambda spec, gpu: of_bytes(40 * GIB if spec.method == "full" else GIB)
    card = find_gpu("T4")
    words = {"source": "here", "gpu": card, "ran": False}
    of = {"model": "gpt2", "device": "cuda"}
    spec = resolve(**of, method="full", batch_size=4, seq_len=1024, dtype="fp32", autocast="none")
    small = resolve(**of, method="lora", batch_size=1, seq_len=64)
    runs = [verdicts.PublishedRun(name=name, spec=one, **words) for name, one in (("full", spec), ("small", small))]
    full, fits = verdicts.judged(runs)
    assert full.said.usable_bytes == usable_bytes(card, device_is_known=False)
    assert full.said.needed_bytes.high > 1.099 * full.said.needed_bytes.value  # versions alone
    assert fits.said.verdict == "fits"
    lines = verdicts.section([full, fits, replace(fits, run=replace(runs[1], ran=True))])
    assert len([line for line in lines if line.startswith("| here | small |")]) == 1  # the one that ran is right


def test_peers_stand_beside_the_same_runs() -> None:
    verdicts = script("truth.published_verdicts")
    verdicts.predicted_on = lambda spec, gpu: of_bytes(60 * GIB)
    spec = resolve(device="cuda", model="llama-3.1-8b", method="full", batch_size=1, seq_len=64)
    words = {"source": "here", "gpu": find_gpu("RTX-4090"), "spec": spec}
    runs = [verdicts.PublishedRun(name="one", ran=False, **words), verdicts.PublishedRun(name="two", ran=True, **words)]
    lines = verdicts._beside_peers(list(verdicts.judged(runs)))
    assert lines[0].count(" ran: fits") == 1
    ours, *others = lines[2:]
    assert ours == "| vramprobe predict | 0 | 0 | 1 | 0 | 0 | 0 | 1 | 0 |"
    assert "| fitcheck 0.3.1 | 0 | 0 | 0 | 1 | 0 | 0 | 0 | 1 |" in others  # not asked of these
    assert "| accelerate, its formula | 0 | 0 | 1 | 0 | 0 | 0 | 1 | 0 |" in others  # 16 bytes a parameter
    names = {row["peer"] for row in verdicts.read_csv(verdicts.PEERS)}
    assert names == {"fitcheck", "canifinetune", "vramcalc"}
