"""The committed table of training frameworks on an emulated GPU: as its CSV says, and what is promised of it."""

import csv
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "frameworks" / "frameworks.py"


def test_ten_frameworks_run_and_the_hook_changes_no_byte():
    """Each row that works was stopped after three steps or a few more, with the bytes that it has without the hook."""
    with BENCHMARK.with_suffix(".csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    working = [row for row in found if not row["missing"]]
    assert len(working) >= 10
    for row in working:
        assert (int(row["steps"]) >= 3, row["stopped"]) == (True, "yes"), row["name"]
        assert row["equal"] in ("yes", "whole"), row["name"]
        phases = {"load", "forward", "backward"}
        if "within the backward" not in row["remark"]:
            phases.add("optimizer_step")
        assert phases <= set(row["phases"].split()), row["name"]
        assert int(row["ranks"]) == (2 if row["card"].endswith("x2") else 1)


NUM_PARAMETERS = 134_105_856  # of phases/train.py's model


@pytest.fixture(scope="module")
def by_phase():
    """The table of phases: bytes by run and phase, without those that it does not have."""
    with BENCHMARK.with_name("run_phases.csv").open(newline="") as file:
        return {
            row["name"]: {key.removesuffix("_bytes"): int(row[key]) for key in row if "_bytes" in key and row[key]}
            | {"notes": row["notes"]}
            for row in csv.DictReader(file)
        }


def test_each_run_goes_through_its_phases(by_phase):
    whole = {name: found for name, found in by_phase.items() if not found["notes"]}  # a note says what ended the others
    assert len(whole) > len(by_phase) / 2
    for name, found in whole.items():
        phases = ["training", "evaluation", "save", *(["load_best"] if name.startswith("Trainer") else [])]
        if name.startswith("torchtune"):
            phases.remove("evaluation")  # its recipes have none
        if "export" in name or "merge-lora" in name:
            phases = []
        phases += ["resume"] * ("resumed" in name) + ["merge"] * any(one in name for one in ("merge", "export"))
        assert all(found[phase] > 0 for phase in phases), name


def test_each_rank_loads_on_the_host(by_phase):
    """In float32; Axolotl's FSDP2 on rank 0 alone."""
    for name, found in by_phase.items():
        is_divided = {"ZeRO-3", "LoRA"} & set(name.split(", "))
        if name.startswith(("Trainer", "TRL SFT, FSDP2", "accelerate", "Axolotl SFT")) and not is_divided:
            num_loading = 1 if "one GPU" in name or name.startswith("Axolotl") else 2
            assert found["host"] >= num_loading * 4 * NUM_PARAMETERS, name


def test_a_resume_holds_weights_and_moments_and_an_average_is_a_copy(by_phase):
    alone, resumed = by_phase["Trainer, one GPU"], by_phase["Trainer, one GPU, resumed"]
    assert resumed["resume"] == pytest.approx(3 * 4 * NUM_PARAMETERS, rel=0.005)
    for name, found in by_phase.items():
        if name.startswith("Trainer, FSDP2") and "resumed" in name:
            assert found["resume"] >= 3 * 4 * NUM_PARAMETERS / 2, name
    average = by_phase["Trainer, one GPU, EMA"]["training"] - alone["training"]
    assert average == pytest.approx(4 * NUM_PARAMETERS, rel=0.02)
