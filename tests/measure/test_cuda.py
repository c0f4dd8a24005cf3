"""The cuda instrument on a real GPU: ``pytest -m gpu``. What cannot be checked without one is checked here."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from factories import TINY_LLAMA_PARAMS, make_spec
from processes import children

from vramprobe.allocator.config import parse_alloc_conf
from vramprobe.catalog import gpu_seen
from vramprobe.explain.snapshot import load_plain, states_of
from vramprobe.log.file import read_log
from vramprobe.log.reserved import reserve
from vramprobe.measure import doctor, nvml, selftest
from vramprobe.measure.isolation import new_ticket, run_isolated
from vramprobe.measure.launcher import Server, Spawner, worker_environment
from vramprobe.records.record import RunRecord
from vramprobe.sweep import runner
from vramprobe.units import GIB, MIB

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Starts cells from a fork server, or anew where it does not prove itself: minutes on a GPU are dear."""
    server = Server("cuda", None, worker_environment(), ["llama"], tmp_path_factory.mktemp("server") / "forkserver.log")
    server.start()
    yield server
    server.close()


def measured(server: Server, tmp_path: Path, **options: Any) -> RunRecord:
    """One cell in its own process on the GPU."""
    spec = make_spec(device="cuda", timing_steps=1, **options)
    return run_isolated(spec, server, new_ticket(tmp_path), tmp_path / "log", 300)


def spawned(tmp_path: Path, **options: Any) -> RunRecord:
    """Measure one cell in a new interpreter."""
    return runner.measure(make_spec(device="cuda", timing_steps=1, **options), log=tmp_path / "log")


def in_this_process(**options: Any) -> RunRecord:
    """Run one cell in this process, where what the workload does can be changed."""
    from vramprobe.measure.run_cell import run_cell

    return run_cell(make_spec(device="cuda", timing_steps=1, **options), isolation="spawn")


def test_one_gib_moves_every_tier_by_one_gib() -> None:
    """The machine's self-test, as the doctor makes it: the driver may round to its own pages."""
    moved = selftest.one_gib_on_cuda()
    assert moved["allocated"] == moved["reserved"] == GIB
    assert abs(moved["mem_get_info"] - GIB) <= 4 * MIB
    assert abs(moved["NVML"] - GIB) <= 4 * MIB


def test_the_doctor_finds_this_machine_ready(tmp_path: Path) -> None:
    diagnosis = doctor.doctor(device="cuda", results=tmp_path)
    assert diagnosis.ready, diagnosis.verdict
    found = {finding.name: finding for finding in diagnosis.findings}
    assert found["torch build"].status == found["self-test"].status == "ok"
    assert found["fork server"].status == "ok", found["fork server"].detail


def test_torch_and_nvml_mean_the_same_gpu() -> None:
    import torch

    uuid, name = nvml.first_visible_gpu()
    assert uuid.removeprefix("GPU-") == str(torch.cuda.get_device_properties(0).uuid)
    assert torch.cuda.get_device_properties(0).name in name


#: Large enough to page.
PAGED = {"method": "full", "optim": "paged_adamw_8bit", "model": "smollm2-135m", "num_layers": 2}


@pytest.mark.parametrize(
    "options",
    [
        {"method": "full"},
        {"method": "full", "optim": "adamw_torch"},
        {"method": "full", "dtype": "fp32", "autocast": "bf16", "optim": "adamw_bnb_8bit"},
        {"method": "full", "optim": "paged_adamw_8bit"},
        PAGED,
        {"method": "lora", "gradient_checkpointing": True, "grad_accum": 2},
        {"method": "qlora"},
        {"method": "qlora", "quant": "int8", "kbit_prep": "none"},
    ],
    ids=str,
)
def test_a_cell_is_measured_in_three_tiers(server: Server, options: dict[str, Any], tmp_path: Path) -> None:
    record = measured(server, tmp_path, **options)
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
    name = record.environment.device_name
    card = gpu_seen(name)  # before Ampere no fused kernel takes bf16, or heads that share keys
    assert record.facts.attention_kernels or not (card is None or (card.capability or (8, 0)) >= (8, 0))
    assert record.timing.step_seconds or record.instrument == "emulated"  # where no kernel runs, none has a speed
    assert {phase.step for phase in record.phases} == {None, 1, 2, 3}  # the step with the history is not among them


def test_a_compiled_cell_repeats_its_steps(server: Server, tmp_path: Path) -> None:
    record = measured(server, tmp_path, method="lora", torch_compile=True)
    assert record.outcome.kind == "ok", record.outcome
    assert record.instrument == "emulated" or record.timing.first_step_seconds > record.timing.step_seconds[0]


def test_replicates_are_equal_to_the_byte(server: Server, tmp_path: Path) -> None:
    first, second = (measured(server, tmp_path, method="lora") for _ in range(2))
    assert first.peak.allocated_bytes == second.peak.allocated_bytes
    assert abs(first.peak.reserved_bytes - second.peak.reserved_bytes) <= 20 * MIB


def test_garbage_that_goes_between_phases_costs_no_composition(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a collection of cycles may have it; what is allocated there would mean that two clocks disagree."""
    import torch

    from vramprobe.workload import stepper, training

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
        record = in_this_process(method="full")
        assert record.outcome.kind == "ok", record.outcome
        assert (record.ledger.at_peak is not None) is is_known
        kept.clear()


def test_random_weights_do_not_pass_through_the_host(server: Server, tmp_path: Path) -> None:
    """Two layers of an 8B model and its embeddings: 3 GiB on the device, not in the process."""
    record = measured(server, tmp_path, model="llama-3.1-8b", num_layers=2, method="lora", seq_len=128)
    plain = measured(server, tmp_path, method="lora")
    assert record.ledger.weights_bytes > 2.5 * GIB
    assert record.phases[0].rss_end_bytes < plain.phases[0].rss_end_bytes + GIB


def test_a_quantised_model_is_never_held_whole_in_16_bits(server: Server, tmp_path: Path) -> None:
    record = measured(
        server, tmp_path, model="llama-3.1-8b", num_layers=8, method="qlora", kbit_prep="none", seq_len=64
    )
    in_16_bits = 2 * record.facts.num_params
    largest = 2 * 128256 * 4096
    assert record.peak.load_allocated_bytes < record.ledger.weights_bytes + 2 * largest < in_16_bits + largest


def test_out_of_memory_is_a_record_with_its_evidence(server: Server, tmp_path: Path) -> None:
    record = measured(server, tmp_path, method="full", model="llama-3.1-405b", seq_len=64)
    assert record.outcome.kind == "oom", record.outcome
    assert record.outcome.phase == "load"
    assert record.outcome.requested_bytes > record.outcome.free_bytes
    assert 0 < record.outcome.allocated_bytes <= record.outcome.reserved_bytes


def test_the_device_goes_back_to_where_it_was(server: Server, tmp_path: Path) -> None:
    device = nvml.open_device(nvml.first_visible_gpu()[0])
    before = device.used_bytes()
    assert measured(server, tmp_path, method="full").outcome.kind == "ok"
    assert abs(device.used_bytes() - before) <= nvml.CONTAMINATION_BYTES


def test_weights_on_the_gpu_are_the_same_bytes(server: Server, tmp_path: Path) -> None:
    record = measured(server, tmp_path, method="full")
    assert record.facts.num_params == TINY_LLAMA_PARAMS
    assert record.ledger.gradients_bytes == 2 * TINY_LLAMA_PARAMS


# --- cells forked from a server that has the libraries loaded ---


def forked(server: Server, tmp_path: Path, **options: Any) -> RunRecord:
    """One cell in a child of the server."""
    record = measured(server, tmp_path, **options)
    assert record.environment.isolation == "forkserver", record.environment.isolation_reason
    return record


def test_the_proof_passes(server: Server) -> None:
    """So cells of ``measured`` are forked, and NVML answers in them."""
    assert (server.isolation, server.isolation_reason) == ("forkserver", None), _log_of(server)


def _log_of(server: Server) -> str:
    return server._settings[-1].read_text()


def test_the_server_has_bitsandbytes_for_cuda_and_no_context(server: Server, tmp_path: Path) -> None:
    """After it has served, too: no cell may leave something behind in it."""
    assert forked(server, tmp_path, method="qlora").outcome.kind == "ok"
    (process,) = children("vramprobe.measure.forkserver")
    assert "libbitsandbytes_cuda" in Path(f"/proc/{process.pid}/maps").read_text()
    opened = {link.readlink() for link in Path(f"/proc/{process.pid}/fd").iterdir()}
    assert Path("/dev/nvidia-uvm") not in opened


@pytest.mark.parametrize(
    "options",
    [
        {"method": "lora"},
        {"method": "qlora"},
        {"method": "qlora", "quant": "int8", "kbit_prep": "none"},
        {"method": "full", "optim": "adamw_bnb_8bit"},
    ],
    ids=str,
)
def test_forked_and_spawned_cells_measure_the_same_bytes(
    server: Server, options: dict[str, Any], tmp_path: Path
) -> None:
    one, other = forked(server, tmp_path, **options), spawned(tmp_path, **options)
    assert (one.outcome.kind, other.outcome.kind) == ("ok", "ok")
    assert other.environment.isolation == "spawn"
    assert one.peak.allocated_bytes == other.peak.allocated_bytes
    by_phase = [[phase.allocated_peak_bytes for phase in record.phases] for record in (one, other)]
    assert by_phase[0] == by_phase[1]
    assert one.ledger == other.ledger


def test_the_allocators_setting_reaches_the_child(server: Server, tmp_path: Path) -> None:
    """Sizes rounded up to halves between powers of two: the same tensors, in larger blocks (22,528 B become 24,576)."""
    setting = "roundup_power2_divisions:2"
    other = Server("cuda", setting, worker_environment(), ["llama"], tmp_path / "forkserver.log")
    try:
        other.start()
        rounded = forked(other, tmp_path, method="full", alloc_conf=setting)
    finally:
        other.close()
    plain = forked(server, tmp_path, method="full")
    assert rounded.environment.alloc_conf == setting
    assert rounded.phases[0].requested_end_bytes == plain.phases[0].requested_end_bytes
    assert rounded.phases[0].allocated_end_bytes > plain.phases[0].allocated_end_bytes


def test_a_forked_cell_costs_less_than_two_seconds_beside_its_own_work(server: Server, tmp_path: Path) -> None:
    began = time.monotonic()
    record = forked(server, tmp_path, method="lora")
    seconds = time.monotonic() - began
    timing = record.timing
    assert seconds - timing.load_seconds - timing.traced_seconds - sum(timing.step_seconds) < 2


# --- a card whose memory is limited ---

#: 1.5 billion parameters: 2.8 GiB of weights, as much of gradients, twice of optimizer state.
LARGE = {"method": "full", "model": "llama-3.1-8b", "num_layers": 2, "seq_len": 64, "batch_size": 1}


def test_a_cell_runs_out_of_memory_on_a_limited_card_only(server: Server, tmp_path: Path) -> None:
    whole, small = measured(server, tmp_path, **LARGE), measured(server, tmp_path, **LARGE, limit_vram="6GiB")
    assert whole.outcome.kind == "ok", whole.outcome
    assert small.outcome.kind == "oom", small.outcome
    assert small.outcome.phase in ("backward", "optimizer_step")
    assert small.outcome.free_bytes < small.outcome.requested_bytes
    assert small.outcome.reserved_bytes < 6 * GIB
    assert small.outcome.reserved_bytes + small.outcome.free_bytes < 6 * GIB < whole.peak.reserved_bytes
    assert small.environment.device_total_bytes == whole.environment.device_total_bytes  # the real card's
    assert small.environment.nvml_total_bytes == whole.environment.nvml_total_bytes
    (words,) = small.warnings
    assert words.startswith("limited to 6.00 GiB: ")
    assert whole.warnings == []


@pytest.mark.parametrize("options", [{"method": "lora"}, {"method": "qlora"}], ids=str)
def test_the_ballast_moves_no_number_of_the_cell(server: Server, options: dict[str, Any], tmp_path: Path) -> None:
    plain, limited = measured(server, tmp_path, **options), measured(server, tmp_path, **options, limit_vram="4GiB")
    assert limited.outcome.kind == "ok", limited.outcome
    assert limited.peak.allocated_bytes == plain.peak.allocated_bytes
    assert limited.ledger == plain.ledger
    assert abs(limited.peak.device_bytes - plain.peak.device_bytes) <= nvml.CONTAMINATION_BYTES
    assert abs(limited.context_bytes - plain.context_bytes) <= nvml.CONTAMINATION_BYTES


def test_a_forked_cell_is_limited_too_and_gives_everything_back(server: Server, tmp_path: Path) -> None:
    """A hundred gigabytes are freed when it ends; the runner waits for them, and finds no contamination."""
    device = nvml.open_first_visible()
    before = device.used_bytes()
    record = forked(server, tmp_path, method="lora", limit_vram="4GiB")
    assert record.outcome.kind == "ok", record.outcome
    assert device.use_that_stayed(before) is None


def test_a_limit_above_this_card_is_refused() -> None:
    record = in_this_process(method="lora", limit_vram="1000GiB")
    assert (record.outcome.kind, record.outcome.error_type) == ("error", "VramprobeError")
    assert "allow at most" in record.outcome.message


# -- the replay, held against the truth --------------------------------------------------------------------------------


@pytest.mark.parametrize("alloc_conf", [None, "expandable_segments:True", "max_split_size_mb:64"])
def test_the_log_of_a_cell_replays_to_the_reserved_memory_of_the_gpu(alloc_conf: str | None, tmp_path: Path) -> None:
    spec = make_spec(device="cuda", timing_steps=1, method="lora", alloc_conf=alloc_conf)
    launcher = Spawner(worker_environment(), tmp_path / "log")
    ticket = new_ticket(tmp_path, recording=tmp_path / "log.npz")
    record = run_isolated(spec, launcher, ticket, tmp_path / "log", 300)
    launcher.close()
    assert record.outcome.kind == "ok", record.outcome
    replayed = reserve(record.phases, read_log(tmp_path / "log.npz"), parse_alloc_conf(alloc_conf or ""))
    for one, seen in zip(replayed, record.phases, strict=True):
        assert (one.name, one.allocated_peak_bytes) == (seen.name, seen.allocated_peak_bytes)
        assert one.reserved_peak_bytes == pytest.approx(seen.reserved_peak_bytes, rel=0.01), seen.name


def test_a_snapshot_is_of_one_steady_step_and_moves_no_number(tmp_path: Path) -> None:
    """A snapshot for memory_viz has this model's code in the stacks, and no more memory than the counters saw."""
    spec = make_spec(device="cuda", timing_steps=1)
    plain = runner.measure(spec, log=tmp_path / "log")
    record = runner.measure(spec, log=tmp_path / "log", snapshot=tmp_path / "step.pickle")
    assert record.warnings == plain.warnings
    assert (record.peak.allocated_bytes, record.ledger) == (plain.peak.allocated_bytes, plain.ledger)
    with (tmp_path / "step.pickle").open("rb") as file:
        written = load_plain(file)
    frames = {frame["filename"] for entry in written["device_traces"][0] for frame in entry["frames"]}
    assert any("modeling_llama" in name for name in frames)
    [state] = states_of(written)
    assert 0 < state.peak.requested <= record.peak.allocated_bytes
