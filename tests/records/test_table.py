"""Rows: every value of a record has its column, nothing is invented, and what differs in kind is not mixed."""

import pytest
from factories import TINY_LLAMA_PARAMS, make_environment, make_record, make_spec

from vramprobe.errors import IncomparableRecords
from vramprobe.records import outcomes, phase_memory
from vramprobe.records import record as rec
from vramprobe.records.table import describe_outcome, require_comparable, to_row
from vramprobe.spec import CellSpec


def test_a_row_says_what_was_run_and_what_came_out() -> None:
    record = make_record(make_spec(method="lora", lora_targets="q_proj,v_proj", gradient_checkpointing=True))
    row = to_row(record)
    assert (row["model_label"], row["method"], row["optim"]) == ("tiny-llama", "lora", "adamw_torch_fused")
    assert (row["batch_size"], row["seq_len"], row["num_tokens"]) == (2, 16, 32)
    assert row["lora_targets"] == "q_proj,v_proj"
    assert row["gradient_checkpointing"] is True
    assert row["outcome"] == "ok"
    assert row["num_params"] == TINY_LLAMA_PARAMS
    assert row["peak_phase"] == "backward"
    assert row["peak_allocated_bytes"] == record.peak.allocated_bytes == row["at_peak_total_bytes"]
    assert row["peak_device_bytes"] is None  # not known, and so not 0
    assert row["weights_bytes"] == TINY_LLAMA_PARAMS * 2
    assert row["step_seconds"] == pytest.approx(0.0205)  # the median of 0.02 and 0.021
    assert row["version_torch"] == "2.13.0+cpu"


def test_every_field_of_a_cell_and_of_its_results_has_a_column() -> None:
    row = to_row(make_record())
    assert set(CellSpec.model_fields) - set(row) == {"architecture"}
    assert set(rec.ModelFacts.model_fields) <= set(row)
    assert set(phase_memory.MemoryLedger.model_fields) - set(row) == {"at_peak"}
    assert {f"at_peak_{name}" for name in phase_memory.Composition.model_fields} <= set(row)


def test_a_failed_record_has_the_same_columns_and_no_made_up_numbers() -> None:
    failed = to_row(make_record(outcome=outcomes.Timeout(limit_seconds=9)))
    assert list(failed) == list(to_row(make_record()))
    measured = [name for name in failed if name.startswith(("peak_", "at_peak_", "weights_", "step_"))]
    assert len(measured) > 10
    assert {failed[name] for name in measured} == {None}
    assert failed["outcome_detail"] == "no end after 9 s"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"instrument": "emulated"}, ["instrument", "'cpu'", "'emulated'"]),
        ({"environment": make_environment(device_name="Other CPU")}, ["device_name", "'Test CPU", "'Other CPU'"]),
        ({"environment": make_environment(versions={"torch": "2.12.9"})}, ["torch", "'2.13'", "'2.12'"]),
        ({"environment": make_environment(versions={})}, ["torch", "'2.13'", "None"]),
    ],
)
def test_mixed_records_are_refused_by_key_and_both_values(change: dict[str, object], named: list[str]) -> None:
    records = [make_record(), make_record(), make_record(make_spec(seq_len=8), **change)]
    with pytest.raises(IncomparableRecords) as caught:
        require_comparable(records)
    for text in [*named, records[0].cell_id, records[2].cell_id]:
        assert text in str(caught.value)


def test_a_patch_release_or_another_cell_is_comparable() -> None:
    patched = make_environment(versions={"torch": "2.13.1", "transformers": "5.99"}, dirty=True)
    require_comparable([make_record(), make_record(make_spec(seq_len=8), environment=patched)])
    require_comparable([])


OOM = outcomes.Oom(phase="backward", step=2, requested_bytes=2**30, allocated_bytes=5 * 2**29, message="CUDA…")
CONTAMINATED = outcomes.Contaminated(baseline_before_bytes=2**20, baseline_after_bytes=2**30 + 2**20)


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (outcomes.Ok(), ""),
        (OOM, "in backward of step 2: 1.00 GiB requested, 2.50 GiB allocated"),
        (outcomes.Oom(phase="load", message="no amounts"), "in load: no amounts"),
        (outcomes.OomHost(phase="load", message="killed by signal 9"), "in load: killed by signal 9"),
        (outcomes.Error(error_type="ValueError", message="boom"), "ValueError: boom"),
        (outcomes.Timeout(limit_seconds=60), "no end after 60 s"),
        (outcomes.Interrupted(message="SIGTERM"), "SIGTERM"),
        (outcomes.Skipped(why="dominated", evidence="a smaller cell ran out"), "a smaller cell ran out"),
        (outcomes.Invalid(reasons=["step 3 differs", "the ledger is open"]), "step 3 differs; the ledger is open"),
        (CONTAMINATED, "someone else's memory moved by 1.00 GiB"),
    ],
)
def test_outcomes_in_one_line(outcome: outcomes.Outcome, text: str) -> None:
    assert describe_outcome(outcome) == text
