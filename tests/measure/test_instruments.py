"""Observation of a cell: the trace, the cpu instrument against known allocations, and the reasons to disbelieve."""

import gc

import pytest
import torch
from factories import make_record, make_spec

from vramprobe.measure import environment
from vramprobe.measure.cpu import CpuInstrument
from vramprobe.measure.observation import Observation, ledger_of, peak_of, reasons_not_to_believe, remarks_on
from vramprobe.measure.run_cell import outcome_of, run_cell
from vramprobe.predict.questions import cell
from vramprobe.records.phase_memory import PhaseMemory
from vramprobe.spec import CellSpec
from vramprobe.workload.storages import storages_of


def test_cpu_instrument_sees_every_allocation_to_the_byte() -> None:
    gc.collect()
    instrument = CpuInstrument()
    instrument.start()
    with instrument.phase("load"):
        kept = torch.empty(1000, dtype=torch.float32)
    with instrument.phase("prepare"):
        pass
    with instrument.phase("batch"):
        batch = torch.empty(10, dtype=torch.int64)
    instrument.holds("batch", storages_of([batch]))
    with instrument.phase("forward", 1, 1):
        passing = torch.empty(500, dtype=torch.uint8)
        del passing
        saved = torch.empty(123, dtype=torch.uint8)
    with instrument.phase("backward", 1, 1):
        gradient = torch.empty(77, dtype=torch.uint8)
        temporary = torch.empty(10_000, dtype=torch.uint8)
        del temporary, saved
    instrument.holds("gradients", storages_of([gradient]), 1)
    with instrument.phase("optimizer_step", 1):
        pass
    instrument.holds("weights", storages_of([kept]), 1)
    with instrument.phase("zero_grad", 1):
        del gradient
    observation = instrument.finish()
    seen = [(p.name, p.allocated_end_bytes, p.allocated_peak_bytes) for p in observation.phases]
    assert seen == [
        ("load", 4000, 4000),
        ("prepare", 4000, 4000),
        ("batch", 4080, 4080),
        ("forward", 4203, 4580),
        ("backward", 4157, 14280),
        ("optimizer_step", 4157, 4157),
        ("zero_grad", 4080, 4157),
    ]
    assert observation.inconsistencies == []
    assert observation.held_bytes == {"batch": 80, "gradients": 77, "weights": 4000}
    assert observation.at_peak.parts() == {
        "weights_bytes": 4000,
        "gradients_bytes": 77,
        "optimizer_state_bytes": 0,
        "batch_bytes": 80,
        "saved_activations_bytes": 123,
        "temporaries_bytes": 10_000,
        "other_bytes": 0,
    }
    assert peak_of(observation).phase == "backward"
    ledger = ledger_of(observation)
    assert (ledger.saved_activations_bytes, ledger.unaccounted_bytes) == (123, 0)
    assert reasons_not_to_believe(observation, ledger) == []


def test_cpu_instrument_keeps_what_it_saw_of_a_run_that_raised() -> None:
    instrument = CpuInstrument()
    instrument.start()
    with instrument.phase("load"):
        kept = torch.empty(1000, dtype=torch.uint8)
    with pytest.raises(RuntimeError), instrument.phase("forward", 1, 1):
        raise RuntimeError
    observation = instrument.finish()
    assert [phase.name for phase in observation.phases] == ["load", "forward"]
    assert instrument.last_phase() == ("forward", 1)
    assert observation.at_peak is None
    assert instrument.finish() is observation
    del kept


def phase(name: str, step: int | None, end: int, peak: int, **tiers: int) -> PhaseMemory:
    return PhaseMemory(name=name, step=step, allocated_end_bytes=end, allocated_peak_bytes=peak, **tiers)


def believable(**changes: PhaseMemory) -> Observation:
    phases = {"load": phase("load", None, 100, 120)}
    for step in (1, 2, 3):
        phases |= {
            f"forward{step}": phase("forward", step, 160, 170),
            f"backward{step}": phase("backward", step, 150, 180),
            f"zero{step}": phase("zero_grad", step, 104, 150),
        }
    return Observation(list((phases | changes).values()), {"weights": 100, "batch": 4, "gradients": 50})


def doubts(observation: Observation) -> list[str]:
    return reasons_not_to_believe(observation, ledger_of(observation))


def test_a_believable_run_raises_no_doubt() -> None:
    assert doubts(believable()) == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"backward3": phase("backward", 3, 150, 181)}, "step 3, backward"),
        ({"load": phase("load", None, 130, 120)}, "ends above its own peak"),
        ({"load": phase("load", None, 100, 120, reserved_end_bytes=90)}, "allocated 100 B > reserved 90 B"),
        ({f"zero{step}": phase("zero_grad", step, 90, 150) for step in (1, 2, 3)}, "14 B less"),
        (
            {"load": phase("load", None, 100, 120)}
            | {
                f"{name}{step}": phase({"zero": "zero_grad"}.get(name, name), step, end, end)
                for name, end in (("forward", 110), ("backward", 120), ("zero", 104))
                for step in (1, 2, 3)
            },
            "below the live tensors",
        ),
    ],
)
def test_a_run_that_contradicts_itself_is_doubted(changes: dict[str, PhaseMemory], word: str) -> None:
    reasons = doubts(believable(**changes))
    assert any(word in reason for reason in reasons), reasons


class Watched:
    def __init__(self, oom_seen: dict[str, int] | None = None) -> None:
        self.oom_seen = oom_seen

    def last_phase(self) -> tuple[str, int]:
        return "backward", 2


SEEN = {"requested_bytes": 5, "allocated_bytes": 6, "reserved_bytes": 7, "free_bytes": 8}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp"),
        RuntimeError(
            "NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp"
        ),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_a_device_out_of_memory_is_known_in_every_coat(error: Exception) -> None:
    outcome = outcome_of(error, Watched())
    assert (outcome.kind, outcome.phase, outcome.step, outcome.requested_bytes) == ("oom", "backward", 2, None)


def test_the_allocators_own_word_makes_any_error_an_oom() -> None:
    outcome = outcome_of(RuntimeError("cuDNN error: NOT_SUPPORTED"), Watched(SEEN))
    assert outcome.kind == "oom"
    assert outcome.model_dump(include=set(SEEN)) == SEEN


def test_host_memory_and_other_errors_are_told_apart() -> None:
    host = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
    assert outcome_of(RuntimeError(host), Watched()).kind == "oom_host"
    assert outcome_of(MemoryError(), Watched()).kind == "oom_host"
    other = outcome_of(ValueError("shape"), Watched())
    assert (other.kind, other.error_type, other.phase) == ("error", "ValueError", "backward")


def test_a_quantisation_that_hardly_reached_the_model_is_remarked() -> None:
    few = make_record().facts.model_copy(update={"num_params": 1000, "num_quantised_params": 499})
    nf4 = make_spec(method="qlora", quant="nf4", kbit_prep="peft", dtype="bf16")
    (remark,) = remarks_on(few, nf4)
    assert "nf4 reaches only 499 of 1,000 parameters" in remark
    assert "1.96 KiB in fp32, to which PEFT's preparation raises them" in remark
    assert "1002 B in bf16; Axolotl" in remarks_on(few, make_spec(method="qlora", quant="nf4", kbit_prep="trl"))[0]
    assert remarks_on(few, make_spec()) == remarks_on(None, nf4) == []
    assert remarks_on(few.model_copy(update={"num_quantised_params": 500}), nf4) == []


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_family_with_linear_layers_of_its_own_is_not_quantised_and_its_record_says_so() -> None:
    falcon = {"model_type": "falcon", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    falcon |= {"vocab_size": 256, "multi_query": True, "parallel_attn": True, "bias": False}
    spec = CellSpec(**(make_spec(method="qlora", quant="nf4", attn="eager").model_dump() | {"architecture": falcon}))
    record = run_cell(spec, isolation="spawn")
    assert record.outcome.kind == "ok", record.outcome
    assert record.facts.num_quantised_params == 0
    assert any("nf4 reaches only 0 of" in warning for warning in record.warnings)


@pytest.mark.parametrize(
    ("flags", "options", "is_slow"),
    [
        ("fpu avx2", {}, True),
        ("fpu avx2 avx512f avx512bw", {}, False),
        ("fpu avx2", {"recipe": "fp32"}, False),
        ("fpu avx2", {"device": "cuda"}, False),
        (None, {}, False),
    ],
)
def test_a_processor_without_vectors_for_bf16_is_named(
    flags: str | None, options: dict[str, str], is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``flags`` of /proc/cpuinfo; None where there is no such file."""
    monkeypatch.setattr(environment, "_cpuinfo", lambda key, default="": default if flags is None else flags)
    spec = cell(model="pythia-70m", method="lora", batch_size=1, seq_len=64, **{"device": "cpu"} | options)
    assert environment.is_slow_for(spec) == is_slow
