"""A step of reinforcement learning beside an engine: its stages, what sleeps, and how vLLM's calls reach a profile."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import pytest
from profile_factory import Script, analysed

from vramprobe.profile.hook import engine as hook

MIB = 2**20
WEIGHTS, ENGINE, CACHE, SEGMENT, ACTIVATION = 0x1000000, 0x2000000, 0x10000000, 0x1F000000, 0x20000000


def rollout(*, asleep: bool) -> Script:
    """A trainer of 4 MiB beside an engine of 4 MiB and a cache of 64, which sleep while it trains."""
    script = Script()
    with script.phase("load"):
        script.alloc(WEIGHTS, 4 * MIB)
        script.alloc(ENGINE, 4 * MIB)
        script.alloc(CACHE, 64 * MIB)
        script.holds("engine_weights", ENGINE)
        script.holds("kv_cache", CACHE)
    with script.phase("forward", 1, 1):
        script.holds("weights", WEIGHTS, ENGINE)  # vLLM's model runs forwards, too
    with script.phase("generation", 2):
        script.alloc(ACTIVATION, MIB)
        script.free(ACTIVATION)
    with script.phase("sleep", 2):
        if asleep:
            script.now_ns += 1_000_000
            ranges = [[ENGINE, 4 * MIB], [CACHE - MIB, 66 * MIB]]  # a segment is larger than what lies in it
            script.say("asleep", time_ns=script.now_ns, ranges=ranges)
            script.now_ns += 1_000_000
    with script.phase("forward", 2, 1):
        script.alloc(ACTIVATION, 2 * MIB)
    with script.phase("weight_sync", 2):
        script.free(ACTIVATION)
        if asleep:
            script.now_ns += 1_000_000
            script.say("asleep", time_ns=script.now_ns, ranges=[[CACHE - MIB, 66 * MIB]])
            script.now_ns += 1_000_000
    script.say("step", step=2)
    script.say("end", why="exit", num_alloc_retries=0, num_ooms=0)
    return script


@pytest.mark.parametrize("asleep", [True, False])
def test_each_stage_has_what_is_mapped_then(tmp_path: Path, asleep: bool) -> None:
    record = analysed(tmp_path, rollout(asleep=asleep))
    stages = {one.name: one for one in record.ranks[0].rollout}
    assert list(stages) == ["generation", "forward", "weight_sync"]
    held = {
        name: [one.live.weights_bytes // MIB, one.live.engine_weights_bytes // MIB, one.live.kv_cache_bytes // MIB]
        for name, one in stages.items()
    }
    assert held["generation"] == [4, 4, 64]
    assert held["forward"] == ([4, 0, 0] if asleep else [4, 4, 64])
    # its fullest moment is once the engine's weights are back; the activation that it frees is there before
    assert held["weight_sync"] == ([4, 4, 0] if asleep else [4, 4, 64])
    assert stages["forward"].asleep_bytes == (68 * MIB if asleep else 0)
    assert stages["forward"].live.saved_activations_bytes == 2 * MIB
    assert any("sleep mode" in one for one in record.warnings) == asleep


def test_another_gpu_is_not_judged_by_a_cache_that_was_sized_for_this_one(tmp_path: Path) -> None:
    own, other = analysed(tmp_path, rollout(asleep=False), gpus=["RTX-4090", "H100-SXM"]).cards
    assert (own.verdict, other.verdict) == ("fits", "unknown")
    assert "KV cache" in other.why


def test_a_process_without_an_engine_has_no_rollout(tmp_path: Path) -> None:
    script = Script()
    with script.phase("generation", 2):
        script.alloc(WEIGHTS, MIB)
    script.say("end", why="exit")
    assert analysed(tmp_path, script).ranks[0].rollout == []


VLLM = {"worker": "vllm.v1.worker.gpu_worker", "verifier": "vllm.v1.worker.gpu.spec_decode.rejection_sampler"}


class Watched:
    """Watch that keeps what the hook tells it."""

    def __init__(self) -> None:
        self.is_emulated, self.warnings = False, list[str]()
        self.held: list[tuple[str, list[str]]] = []
        self.asleep: list[list[tuple[int, int]]] = []
        self.listeners: list[Watched] = []
        self.ooms: list[tuple[int, ...]] = []
        self.marks: list[str] = []
        self.phases = SimpleNamespace(mark=self.marks.append)

    def hold_engine(self, cause: str, tensors) -> None:
        self.held.append((cause, [tensor for _, tensor in tensors]))

    def note_oom(self, *said: int) -> None:
        self.ooms.append(said)

    def line(self, kind: str, *, time_ns: int = 1, ranges: Any = (), message: str = "") -> None:
        if kind == "warning":
            self.warnings.append(message)
            return
        assert (kind, time_ns > 0) == ("asleep", True)
        self.asleep.append(ranges)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Watched]:
    """Installs the hook into modules with these classes."""

    def installed(**modules: SimpleNamespace) -> Watched:
        for name, made in modules.items():
            monkeypatch.setitem(sys.modules, VLLM[name], made)
        watch = Watched()
        hook.install([watch], watch.listeners.append)
        return watch

    return installed


def test_an_engines_weights_and_cache_are_held_once_they_are_there(engine, monkeypatch) -> None:
    class Worker:
        model_runner = SimpleNamespace(
            model=SimpleNamespace(
                named_parameters=lambda: [("up", "weight")], named_buffers=lambda: [("cos", "table")]
            ),
            kv_caches=["one", ["two", "three"]],
        )

        def load_model(self) -> str:
            return "loaded"

        def initialize_from_config(self, config: int) -> int:
            return config

        def execute_model(self) -> str:
            return "tokens"

        def sleep(self, level: int) -> None: ...

    watch = engine(worker=SimpleNamespace(Worker=Worker))
    assert Worker().load_model() == "loaded"
    assert Worker().initialize_from_config(3) == 3
    assert Worker().execute_model() == "tokens"
    Worker().sleep(level=1)
    assert watch.marks == ["serving", "asleep"]
    assert watch.listeners == [watch]  # a trainer elsewhere may end it
    assert watch.held == [("engine_weights", ["weight", "table"]), ("kv_cache", ["one", "two", "three"])]


@pytest.mark.parametrize("is_emulated", [True, False])
def test_without_computed_values_each_request_gets_one_token_whatever_was_drafted(is_emulated: bool, engine) -> None:
    torch, numpy = pytest.importorskip("torch"), pytest.importorskip("numpy")

    class RejectionSampler:
        def __call__(self, logits: str, input_batch: SimpleNamespace) -> SimpleNamespace:
            return SimpleNamespace(num_sampled=torch.tensor([5, 5, 5]), num_rejected=torch.tensor([7, 7, 7]))

    watch = engine(verifier=SimpleNamespace(RejectionSampler=RejectionSampler))
    watch.is_emulated = is_emulated
    batch = SimpleNamespace(  # one that decodes, one whose prompt ends in this step, one in the middle of its prompt
        num_computed_tokens_np=numpy.array([40, 0, 8]), num_scheduled_tokens=numpy.array([5, 20, 8]),
        prefill_len_np=numpy.array([32, 20, 32]), cu_num_logits_np=numpy.array([0, 5, 6, 7]),
    )  # fmt: skip
    for _ in range(2):
        found = RejectionSampler()("logits", batch)
    expected = ([1, 1, 0], [4, 0, 0]) if is_emulated else ([5, 5, 5], [7, 7, 7])
    assert (found.num_sampled.tolist(), found.num_rejected.tolist()) == expected
    assert [("none is" in said) for said in watch.warnings] == [True] * is_emulated


def test_what_the_allocator_unmaps_is_told_by_tag(engine, monkeypatch) -> None:
    class CuMemAllocator:
        def __init__(self) -> None:
            self.pointer_to_data = {
                address: SimpleNamespace(handle=(0, size, address, 0), tag=tag)
                for address, size, tag in ((256, 10, "weights"), (512, 20, "kv_cache"))
            }

        def sleep(self, offload_tags=None) -> None: ...

        def wake_up(self, tags=None) -> None: ...

    module = ModuleType("vllm.device_allocator.cumem")
    module.CuMemAllocator = CuMemAllocator
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", module)
    watch, allocator = engine(), CuMemAllocator()
    allocator.sleep(offload_tags=("weights",))
    allocator.wake_up(["weights"])
    allocator.wake_up(tags=["kv_cache"])
    allocator.sleep()
    del allocator.pointer_to_data[256]  # freed while it sleeps
    allocator.wake_up(tags=["weights"])
    allocator.wake_up()
    everything = [(256, 10), (512, 20)]
    assert watch.asleep == [everything, [(512, 20)], [], everything, [(512, 20)], []]


def test_an_engine_that_cannot_wake_up_has_run_out(engine, monkeypatch) -> None:
    class CuMemAllocator:
        pointer_to_data = MappingProxyType(
            {
                address: SimpleNamespace(handle=(0, size, address, 0), tag=tag)
                for address, size, tag in ((256, 10, "weights"), (512, 20, "kv_cache"), (768, 30, "kv_cache"))
            }
        )
        why = "CUDA Error: out of memory at cumem_allocator.cpp:62"

        def sleep(self, offload_tags=None) -> None: ...

        def wake_up(self, tags=None) -> None:
            raise RuntimeError(self.why)

    module = ModuleType("vllm.device_allocator.cumem")
    module.CuMemAllocator = CuMemAllocator
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", module)
    cuda = SimpleNamespace(mem_get_info=lambda: (7, 80), current_device=lambda: 1)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    watch, allocator = engine(), CuMemAllocator()
    with pytest.raises(RuntimeError, match="out of memory"):
        allocator.wake_up(tags=["kv_cache"])
    assert watch.ooms == [(1, 50, 80, 7)]
    allocator.why = "CUDA Error: invalid argument"
    with pytest.raises(RuntimeError, match="invalid argument"):
        allocator.wake_up()
    assert len(watch.ooms) == 1


def test_processes_of_one_gpu_are_added_up_stage_by_stage(tmp_path: Path) -> None:
    """A trainer, and an engine in a process of its own that sleeps while it trains; another GPU has its own."""
    for card in (0, 1):
        trainer, engine = (
            Script(100 + card, device_uuid=str(card), rank=card),
            Script(200 + card, device_uuid="0", device_uuids=["0", "1"]),
        )
        engine.device = card  # chosen after its first use of CUDA, as vLLM's second worker does
        extra = card * MIB
        cycle(trainer, engine, extra)
        trainer.write(tmp_path)
        engine.write(tmp_path)
    by_pid = {one.pid: {stage.name: stage for stage in one.rollout} for one in analysed(tmp_path).ranks}
    assert (by_pid[200], by_pid[201]) == ({}, {})
    for card in (0, 1):
        stages = by_pid[100 + card]
        assert list(stages) == ["weight_sync", "generation", "forward", "optimizer_step"]
        held = {
            name: [one.live.weights_bytes, one.live.engine_weights_bytes, one.live.kv_cache_bytes, one.asleep_bytes]
            for name, one in stages.items()
        }
        weights = 4 * MIB + card * MIB
        assert held["weight_sync"] == [weights, 4 * MIB, 0, 64 * MIB]
        assert held["generation"] == [weights, 4 * MIB, 64 * MIB, 0]  # the second: the optimizer has its state by then
        assert stages["generation"].live.total_bytes == 72 * MIB + card * MIB + 8 * MIB + MIB
        assert held["forward"] == [weights, 0, 0, 68 * MIB]
        assert stages["generation"].device_bytes == 480 * MIB + 70 * MIB  # the engine's segments, as its driver says


def cycle(trainer: Script, engine: Script, extra: int) -> None:
    """Two steps: weight sync, generation, forward, the optimizer; the clocks of both go on together."""

    def both() -> None:
        trainer.now_ns = engine.now_ns = max(trainer.now_ns, engine.now_ns) + 1_000_000

    with trainer.phase("load"):
        trainer.alloc(WEIGHTS, 4 * MIB + extra)
    both()
    for name, address, size, cause in (("load", ENGINE, 4, "engine_weights"), ("kv_cache", CACHE, 64, "kv_cache")):
        with engine.phase(f"engine_{name}"):
            engine.alloc(address, size * MIB)
            engine.holds(cause, address)
    both()
    for step in (1, 2):
        asleep(engine, [[ENGINE, 4 * MIB], [CACHE, 64 * MIB]])
        both()
        with trainer.phase("weight_sync", step):
            both()
            asleep(engine, [[CACHE, 64 * MIB]])
            both()
        asleep(engine, [])
        with engine.phase("serving"):
            engine.alloc(ACTIVATION, MIB)
            engine.free(ACTIVATION)
        both()
        asleep(engine, [[ENGINE, 4 * MIB], [CACHE, 64 * MIB]])
        both()
        with trainer.phase("forward", step, 1):
            trainer.holds("weights", WEIGHTS)
            trainer.alloc(ACTIVATION, 2 * MIB)
        with trainer.phase("optimizer_step", step):
            trainer.free(ACTIVATION)
            if step == 1:
                trainer.alloc(SEGMENT, 8 * MIB)
                trainer.holds("optimizer_state", SEGMENT)
        both()
    for one in (trainer, engine):
        one.say("end", why="so far", num_alloc_retries=0, num_ooms=0)


def asleep(engine: Script, ranges: list[list[int]]) -> None:
    with engine.phase("wake_up"):
        engine.now_ns += 1_000_000
        engine.say("asleep", time_ns=engine.now_ns, ranges=ranges)
        engine.now_ns += 1_000_000
