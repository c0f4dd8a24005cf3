"""The cuda instrument on a real GPU: ``pytest -m gpu``. What cannot be checked without one is checked here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from factories import TINY_LLAMA_PARAMS, make_spec

from vramprobe.measure import isolation, nvml, runner
from vramprobe.record import RunRecord
from vramprobe.units import GIB, MIB

pytestmark = pytest.mark.gpu


def measured(tmp_path: Path, **options: Any) -> RunRecord:
    """One cell in its own process on the GPU."""
    return runner.measure(make_spec(device="cuda", timing_steps=1, **options), log=tmp_path / "log")


def test_one_gib_moves_every_tier_by_one_gib() -> None:
    """The machine's self-test (measuring.md): allocated, reserved, mem_get_info and NVML agree on 1 GiB."""
    import torch

    device = nvml.open_device(nvml.first_visible_gpu()[0])
    torch.zeros((), device="cuda")

    def tiers() -> tuple[int, int, int, int]:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free, device.used_bytes()

    before = tiers()
    block = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    allocated, reserved, driver, nvml_used = (after - first for after, first in zip(tiers(), before, strict=True))
    assert allocated == reserved == GIB
    assert abs(driver - GIB) <= 4 * MIB  # the driver may round to its own pages
    assert abs(nvml_used - GIB) <= 4 * MIB
    del block


def test_torch_and_nvml_mean_the_same_gpu() -> None:
    import torch

    uuid, name = nvml.first_visible_gpu()
    assert uuid.removeprefix("GPU-") == str(torch.cuda.get_device_properties(0).uuid)
    assert torch.cuda.get_device_properties(0).name in name


@pytest.mark.parametrize("options", [
    {"method": "full"},
    {"method": "full", "optim": "adamw_torch"},
    {"method": "full", "dtype": "fp32", "autocast": "bf16", "optim": "adamw_bnb_8bit"},
    {"method": "full", "optim": "paged_adamw_8bit"},
    {"method": "full", "optim": "paged_adamw_8bit", "model": "smollm2-135m", "num_layers": 2},  # large enough to page
    {"method": "lora", "gradient_checkpointing": True, "grad_accum": 2},
    {"method": "qlora"},
    {"method": "qlora", "quant": "int8", "kbit_prep": "none"},
], ids=str)  # fmt: skip
def test_a_cell_is_measured_in_three_tiers(options: dict[str, Any], tmp_path: Path) -> None:
    record = measured(tmp_path, **options)
    assert record.outcome.kind == "ok", record.outcome
    peak = record.peak
    assert peak.allocated_bytes <= peak.reserved_bytes <= peak.device_bytes
    assert 50 * MIB < record.context_bytes < 2 * GIB
    assert record.num_alloc_retries == 0
    assert record.environment.nvml_memory_info in ("v2", "v1")
    assert record.ledger.unaccounted_bytes < 128 * MIB  # cuBLAS workspaces and rounding to 512 bytes
    at_peak = record.ledger.at_peak
    assert at_peak is not None, "the allocator's history did not repeat the counters' peak"
    assert sum(at_peak.parts().values()) == at_peak.total_bytes
    assert min(at_peak.parts().values()) >= 0
    assert at_peak.weights_bytes == record.ledger.weights_bytes
    assert record.facts.attention_kernels
    assert record.timing.step_seconds


def test_replicates_are_equal_to_the_byte(tmp_path: Path) -> None:
    first, second = (measured(tmp_path, method="lora") for _ in range(2))
    assert first.peak.allocated_bytes == second.peak.allocated_bytes
    assert abs(first.peak.reserved_bytes - second.peak.reserved_bytes) <= 20 * MIB


def test_random_weights_do_not_pass_through_the_host(tmp_path: Path) -> None:
    """Two layers of an 8B model and its embeddings: 3 GiB on the device, not in the process."""
    record = measured(tmp_path, model="llama-3.1-8b", num_layers=2, method="lora", seq_len=128)
    plain = measured(tmp_path, method="lora")
    assert record.ledger.weights_bytes > 2.5 * GIB
    assert record.phases[0].rss_end_bytes < plain.phases[0].rss_end_bytes + GIB


def test_a_quantised_model_is_never_held_whole_in_16_bits(tmp_path: Path) -> None:
    record = measured(tmp_path, model="llama-3.1-8b", num_layers=8, method="qlora", kbit_prep="none", seq_len=64)
    in_16_bits = 2 * record.facts.num_params
    largest = 2 * 128256 * 4096
    assert record.peak.load_allocated_bytes < record.ledger.weights_bytes + 2 * largest < in_16_bits + largest


def test_out_of_memory_is_a_record_with_its_evidence(tmp_path: Path) -> None:
    record = measured(tmp_path, method="full", model="llama-3.1-405b", seq_len=64)
    assert record.outcome.kind == "oom", record.outcome
    assert record.outcome.phase == "load"
    assert record.outcome.requested_bytes > record.outcome.free_bytes
    assert 0 < record.outcome.allocated_bytes <= record.outcome.reserved_bytes


def test_the_device_goes_back_to_where_it_was(tmp_path: Path) -> None:
    device = nvml.open_device(nvml.first_visible_gpu()[0])
    before = device.used_bytes()
    assert measured(tmp_path, method="full").outcome.kind == "ok"
    assert abs(device.used_bytes() - before) <= isolation.CONTAMINATION_BYTES


def test_weights_on_the_gpu_are_the_same_bytes(tmp_path: Path) -> None:
    record = measured(tmp_path, method="full")
    assert record.facts.num_params == TINY_LLAMA_PARAMS
    assert record.ledger.gradients_bytes == 2 * TINY_LLAMA_PARAMS
