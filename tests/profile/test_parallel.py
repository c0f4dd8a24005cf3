"""Sharing of a model by ranks, by the program's own groups; whose tokens are whose, and what a pipeline waits for."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from profile_factory import COUNT, ROW, analysed, training
from rich.console import Console

from vramprobe.cli.display_step_time import print_step_time
from vramprobe.profile.hook.parallel import missing_kernels, parallel_sizes
from vramprobe.records.step_time import StepTime


def step_time(folder: Path, *, sizes: dict[str, int], num_ranks: int = 1, num_micro_steps: int = 1) -> StepTime:
    """Return the step time of ranks where the first alone has an embedding."""
    folder.mkdir()
    for rank in range(num_ranks):
        script = training(pid=100 + rank, rank=rank, device_name="NVIDIA H200", capability=[9, 0])
        next(one for one in script.lines if one.get("step") == 2 and one["micro_step"])["micro_step"] = num_micro_steps
        script.say("parallel", sizes=sizes)
        script.say("count", **COUNT | {"rows": COUNT["rows"] if rank == 0 else [ROW, ROW, ROW]})
        script.write(folder)
    found = analysed(folder).step_time
    assert found is not None
    return found


def test_tokens_of_a_gpu_are_its_share_of_those_that_several_work_on(tmp_path: Path) -> None:
    alone = step_time(tmp_path / "alone", sizes={})
    assert (alone.tokens, alone.samples) == (8192, 4)
    shared = step_time(tmp_path / "shared", sizes={"tensor": 2, "context": 8})  # each rank of a context has its own
    assert (shared.tokens, shared.samples) == (4096, 2)
    assert shared.tokens_per_second == pytest.approx(alone.tokens_per_second / 2)


def test_a_pipeline_has_the_tokens_of_its_first_stage_and_the_time_of_the_slowest(tmp_path: Path) -> None:
    found = step_time(tmp_path / "run", sizes={"tensor": 2, "pipeline": 2}, num_ranks=2)
    assert (found.rank, found.tokens) == (1, 2048)
    assert found.tokens_per_second == pytest.approx(2048 / found.seconds)


def test_a_pipelines_waiting_is_in_the_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """(4 − 1) / 6 of the micro-batches' time; interleaved by two, half of it, and two backwards for each of the six."""
    alone = step_time(tmp_path / "alone", sizes={}, num_micro_steps=6)
    once = alone.by_class["rest"] + alone.by_class.get("optimizer", 0.0)
    for virtual, share, schedule in (
        (1, 0.5, "1F1B adds 50%"),
        (2, 0.25, "interleaved 1F1B (2 chunks a stage) adds 25%"),
    ):
        sizes = {"pipeline": 4, "virtual": virtual}
        found = step_time(tmp_path / str(virtual), sizes=sizes, num_micro_steps=6 * virtual)
        assert found.bubble_share == share
        print_step_time(Console(width=300), found)
        said = capsys.readouterr().out
        assert found.seconds == pytest.approx(alone.seconds + share * (alone.seconds - once))
        assert found.by_class["waiting"] == pytest.approx(found.seconds - alone.seconds)
        assert found.low_seconds / found.seconds == pytest.approx(alone.low_seconds / alone.seconds)
        assert found.tokens_per_second == pytest.approx(found.tokens / found.seconds)
        assert f"of it is waiting for other stages: with 4 equal stages and 6 micro-batches {schedule}" in said
        assert "8,192 tokens a step on 4 GPUs that share a model (pipeline 4)" in said
    assert step_time(tmp_path / "none", sizes={"tensor": 2}).bubble_share is None


def test_groups_are_those_of_megatron_of_meshes_and_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    class DeviceMesh:
        mesh_dim_names = ("dp_shard", "tp", "cp")

        def size(self, at: int) -> int:
            return (8, 2, 4)[at]

    mesh = DeviceMesh()
    monkeypatch.setitem(sys.modules, "torch.distributed.device_mesh", SimpleNamespace(DeviceMesh=DeviceMesh))
    assert parallel_sizes([]) == {"tensor": 2, "context": 4}
    schedule = type("Schedule", (), {"_stages": [SimpleNamespace(group_size=3)] * 2})
    monkeypatch.setitem(
        sys.modules, "torch.distributed.pipelining.schedules", SimpleNamespace(_PipelineSchedule=schedule)
    )
    pipeline = schedule()
    assert parallel_sizes([]) == {"tensor": 2, "context": 4, "pipeline": 3, "virtual": 2}
    del pipeline
    sizes = {"tensor_model": 4, "context": 1, "pipeline_model": 2, "virtual_pipeline_model": None}
    state = {f"get_{name}_parallel_world_size": (lambda size=size: size) for name, size in sizes.items()}
    state["model_parallel_is_initialized"] = lambda: True
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", SimpleNamespace(**state))
    assert parallel_sizes([SimpleNamespace(tp_size=8)]) == {"tensor": 8, "context": 4, "pipeline": 2}
    assert mesh is not None


def test_megatron_without_its_libraries_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_kernels() is None
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace())
    assert "without Transformer Engine and Apex:" in (missing_kernels() or "")
    monkeypatch.setitem(sys.modules, "apex", SimpleNamespace())
    assert "without Transformer Engine:" in (missing_kernels() or "")
    monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace())
    assert missing_kernels() is None
