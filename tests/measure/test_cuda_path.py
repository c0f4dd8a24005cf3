"""The code that runs only on a GPU, run without one: whole cells on a stand-in for what lies beneath torch and pynvml.

What a real one does with its memory is in test_cuda.py; here no name, argument or key of the path to it may be wrong.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import bitsandbytes  # noqa: F401 — before there seems to be a GPU: it looks for one as it loads
import peft  # noqa: F401
import torch
from factories import make_spec
from fake_cuda import CONTEXT_BYTES, UUID, fake_cuda

from vramprobe.measure import forkserver, machine, nvml, selftest
from vramprobe.measure.worker import outcome_of, run_cell
from vramprobe.records.record import RunRecord
from vramprobe.units import GIB, MIB
from vramprobe.workload import stepper, training

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of the libraries, at each other


def measured(**options: Any) -> RunRecord:
    words = {"device": "cuda", "timing_steps": 1, "autocast": "none"} | options
    return run_cell(make_spec(**words), isolation="spawn")


@pytest.mark.parametrize(
    "options",
    [
        {"method": "full"},
        {"method": "full", "optim": "adamw_torch", "gradient_checkpointing": True},
        {"method": "full", "dtype": "fp32", "autocast": "bf16"},
        {"method": "lora", "lora_dtype": "bf16", "grad_accum": 2},
        {"method": "qlora", "kbit_prep": "none", "lora_dtype": "bf16"},
    ],
    ids=str,
)
def test_a_whole_cell(options: dict[str, Any]) -> None:
    with fake_cuda():
        record = measured(**options)
    assert record.outcome.kind == "ok", record.outcome
    assert record.warnings == []
    peak = record.peak
    assert 0 < peak.allocated_bytes <= peak.reserved_bytes < peak.device_bytes
    assert record.context_bytes == CONTEXT_BYTES
    assert peak.device_bytes <= peak.reserved_bytes + CONTEXT_BYTES
    assert record.num_alloc_retries == 0
    machine = record.environment
    assert (machine.device_name, machine.device_uuid) == ("NVIDIA H200", f"GPU-{UUID}")
    assert (machine.nvml_memory_info, machine.driver_version, machine.cuda_version) == ("v2", "580.159.04", "13.0")
    at_peak = record.ledger.at_peak
    assert at_peak is not None, "the history did not repeat the counters' peak"
    assert at_peak.weights_bytes == record.ledger.weights_bytes
    assert sum(at_peak.parts().values()) == at_peak.total_bytes
    assert {phase.step for phase in record.phases} == {None, 1, 2, 3}  # the step with the history is not among them


def test_version_1_of_nvmls_answer_is_asked_where_there_is_no_other() -> None:
    with fake_cuda(has_v2=False):
        record = measured(method="full")
    assert record.environment.nvml_memory_info == "v1"
    assert record.context_bytes == CONTEXT_BYTES


def test_out_of_memory_tells_what_was_asked_for_and_what_there_was() -> None:
    with fake_cuda(others_bytes=143_771 * MIB - CONTEXT_BYTES - 40 * MIB):
        record = measured(method="full", batch_size=16, seq_len=512)
    oom = record.outcome
    assert oom.kind == "oom", oom
    assert oom.phase in ("forward", "backward", "optimizer_step")
    assert oom.step == 1
    assert oom.requested_bytes > oom.free_bytes
    assert 0 < oom.allocated_bytes <= oom.reserved_bytes <= 40 * MIB
    assert "Tried to allocate" in oom.message
    assert [phase.name for phase in record.phases][:3] == ["load", "prepare", "batch"]
    assert record.context_bytes == CONTEXT_BYTES


@pytest.mark.parametrize(
    "text",
    [
        "NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp",
        "NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp",
    ],
)
def test_a_full_card_whose_other_users_nvml_does_not_tell_is_out_of_memory(text: str) -> None:
    """The allocator asks NVML who else is on the card before it calls its observers; in a container it may fail."""
    assert outcome_of(RuntimeError(text), None).kind == "oom"


def test_a_card_is_limited_around_the_cell() -> None:
    with fake_cuda() as card:
        plain = measured(method="full")
        assert card.held_bytes == 0
    with fake_cuda() as card:
        record = measured(method="full", limit_vram="4GiB")
        assert card.total_bytes - card.others_bytes - card.held_bytes == pytest.approx(4 * GIB, abs=2 * MIB)
    assert record.outcome.kind == "ok", record.outcome
    assert record.warnings[0].startswith("limited to 4.00 GiB: ")
    assert record.peak == plain.peak
    assert record.context_bytes == plain.context_bytes == CONTEXT_BYTES
    with fake_cuda(others_bytes=139 * GIB):
        refused = measured(method="full", limit_vram="24GiB")
    assert (refused.outcome.kind, refused.outcome.error_type) == ("error", "VramprobeError")
    assert "allow at most" in refused.outcome.message


def test_garbage_that_goes_between_phases_costs_no_composition(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a collection of cycles may have it; what is allocated there would mean that two clocks disagree."""
    forward, gradients = training._forward, stepper.gradient_storages
    kept: list[torch.Tensor] = []

    def littering(work: Any, batch: Any) -> torch.Tensor:
        kept.append(torch.empty(1000, device="cuda"))
        return forward(work, batch)

    def collecting(model: Any) -> Any:
        kept.clear()
        return gradients(model)

    def allocating(model: Any) -> Any:
        kept[:] = [torch.empty(1000, device="cuda")]
        return gradients(model)

    monkeypatch.setattr(training, "_forward", littering)
    for between, is_known in ((collecting, True), (allocating, False)):
        monkeypatch.setattr(stepper, "gradient_storages", between)
        with fake_cuda():
            record = measured(method="full")
        assert record.outcome.kind == "ok", record.outcome
        assert (record.ledger.at_peak is not None) is is_known
        kept.clear()


def test_a_snapshot_holds_one_step(tmp_path: Path) -> None:
    with fake_cuda() as card:
        spec = make_spec(device="cuda", timing_steps=0, method="full")
        record = run_cell(spec, isolation="spawn", snapshot=tmp_path / "step.pickle")
    assert record.outcome.kind == "ok", record.outcome
    assert record.warnings == []
    written = pickle.loads((tmp_path / "step.pickle").read_bytes())
    assert {entry["action"] for entry in written["device_traces"][0]} >= {"alloc", "free_completed"}
    asked = [(enabled, context, cleared) for enabled, context, _, _, cleared in card.recorded]
    assert asked == [("all", None, False), (None, "all", False), ("all", "all", True), (None, "all", False)]


def test_the_self_tests_and_what_nvml_says_of_the_machine() -> None:
    with fake_cuda():
        assert selftest.torch_build() == {
            "version": torch.__version__,
            "cuda": "13.0",
            "available": True,
            "uuid": f"GPU-{UUID}",
            "name": "NVIDIA H200",
            "capability": "9.0",
        }
        assert selftest.one_gib_on_cuda() == dict.fromkeys(("allocated", "reserved", "mem_get_info", "NVML"), GIB)
        assert nvml.compute_capability() == (9, 0)
        (state,) = nvml.gpu_states()
        assert (state.name, state.memory_info, state.mig, state.persistence) == ("NVIDIA H200", "v2", False, None)
        assert nvml.why_unavailable() is None
        case = machine.DoctorState("cuda", Path("x"), Path("x"))
        found = {finding.name: finding for check in machine.CHECKS for finding in check(case)}
    assert found["GPU 0"].status == "warning"  # others hold a gibibyte of it
    assert "serves CUDA up to 13.0" in found["driver"].detail


def test_the_canary_sees_what_it_allocates() -> None:
    with fake_cuda():
        assert forkserver._canary("cuda") == 0


def test_nvml_tells_the_uuid_where_torch_does_not() -> None:
    """torch before 2.4."""
    with fake_cuda():
        assert nvml.uuid_of(SimpleNamespace(), 0) == nvml.uuid_of(SimpleNamespace(uuid=UUID), 0) == f"GPU-{UUID}"
