"""vLLM's own account of its memory: its lines in several releases, and how they reach a profile."""

import json
import logging
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from profile_factory import Script, write_launcher

from vramprobe.profile.analyse import analyse
from vramprobe.profile.engines import memory_of
from vramprobe.profile.hook import engine_log
from vramprobe.profile.raw import EngineLog
from vramprobe.profile.run_files import read_run

V1 = """Model loading took 14.99 GiB memory and 3.570639 seconds
Memory profiling takes 13.53 seconds. Total non KV cache memory: 17.13GiB; torch peak memory increase: 1.89GiB; \
non-torch forward increase memory: 0.25GiB; weights memory: 14.99GiB.
Estimated CUDA graph memory: 0.84 GiB total
Available KV cache memory: 58.11 GiB
GPU KV cache size: 476,016 tokens
Maximum concurrency for 8,192 tokens per request: 58.11x
Graph capturing finished in 21 secs, took 0.91 GiB"""
V1_OF_2026 = """Model loading took 1.12 GiB memory and 65.589526 seconds
Memory profiling takes 180.40 seconds. Total non KV cache memory: 2.16GiB; torch peak memory increase: 0.34GiB; \
total consumed (from mem_get_info): 1.85GiB; weights memory: 1.12GiB.
Available KV cache memory: 70.32 GiB
GPU KV cache size: 658,320 tokens, Maximum concurrency for 8,192 tokens per request: 80.36x
Graph capturing finished in 50 secs, took 0.19 GiB
CUDA graph pool memory: 0.19 GiB (actual), 0.38 GiB (estimated), difference: 0.19 GiB (104.2%).
Free memory on device (78.68/79.19 GiB) on startup. Desired GPU memory utilization is (0.92, 72.85 GiB). Actual usage \
is 1.85 GiB for consumed memory (weights + non-torch), 0.69 GiB for peak activation, and 0.19 GiB for CUDAGraph \
memory. Replace gpu_memory_utilization config with `--kv-cache-memory=75144938107` (69.98 GiB) to fit into requested"""
V0 = """Loading model weights took 2.8884 GB
the current vLLM instance can use total_gpu_memory (14.56GiB) x gpu_memory_utilization (0.50) = 7.28GiB
model weights take 2.89GiB; non_torch_memory takes 0.01GiB; PyTorch activation peak memory takes 2.02GiB; the rest of \
the memory reserved for KV Cache is 2.36GiB.
# CUDA blocks: 5517, # CPU blocks: 9362
Maximum concurrency for 32768 tokens per request: 2.69x"""
EARLY_V0 = """Memory profiling results: total_gpu_memory=7.92GiB initial_memory_usage=0.37GiB \
peak_torch_memory=0.71GiB memory_usage_post_profile=0.39GiB \
non_torch_memory=0.15GiB kv_cache_size=6.27GiB gpu_memory_utilization=0.90
# GPU blocks: 11422, # CPU blocks: 7281"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (V1, {"weights_gib": 14.99, "non_torch_gib": 0.25, "activation_peak_gib": 1.89, "graph_gib": 0.91,
              "graph_estimated_gib": 0.84, "kv_cache_gib": 58.11, "kv_cache_tokens": 476016, "length_tokens": 8192,
              "max_concurrency": 58.11}),
        (V1_OF_2026, {"weights_gib": 1.12, "consumed_gib": 1.85, "activation_peak_gib": 0.34, "graph_gib": 0.19,
                      "graph_estimated_gib": 0.38, "kv_cache_gib": 70.32, "kv_cache_tokens": 658320,
                      "length_tokens": 8192, "max_concurrency": 80.36}),
        (V0, {"utilization": 0.5, "requested_gib": 7.28, "weights_gib": 2.89, "non_torch_gib": 0.01,
              "activation_peak_gib": 2.02, "kv_cache_gib": 2.36, "kv_cache_blocks": 5517,
              "length_tokens": 32768, "max_concurrency": 2.69}),
        (EARLY_V0, {"non_torch_gib": 0.15, "kv_cache_gib": 6.27, "kv_cache_blocks": 11422}),
    ],
)  # fmt: skip
def test_releases_say_the_same_in_other_words(log: str, expected: dict[str, float]) -> None:
    found = memory_of(log.splitlines())
    assert found.model_dump(exclude_none=True) == {"engine": "vllm", **expected}


def test_the_fullest_of_several_workers_counts() -> None:
    found = memory_of([f"Available KV cache memory: {gib} GiB" for gib in (1.5, -0.2)])
    assert found.kv_cache_gib == -0.2
    assert memory_of(["Starting to load model"]) is None


WORKER = """Model loading took {0} GiB memory and 2.8 seconds
Initial free memory: 77.71 GiB; Requested memory: 0.950000 (util), 75.23 GiB
torch peak memory increase: {1}GiB; non-torch forward increase memory: 0.07GiB; weights memory: {0}GiB."""


def test_each_worker_has_its_own_account(tmp_path: Path) -> None:
    said = []
    for number, (weights, activations) in enumerate([(4.26, 1.1), (3.28, 1.05), (4.26, 2.01)]):
        script = Script(100 + number, started_ns=number)
        with script.phase("engine_load"):
            script.alloc(1 << 36, 1 << 20)
        script.write(tmp_path)
        lines = WORKER.format(weights, activations).splitlines() + ["Available KV cache memory: 69.8 GiB"] * (
            not number
        )
        said += [{"pid": 100 + number, "process": f"VllmWorker-{number}", "text": line} for line in lines]
    said.append({"pid": 9, "process": "EngineCore", "text": "GPU KV cache size: 2,257,264 tokens"})
    write_launcher(tmp_path)
    (tmp_path / "engine").write_text("".join(json.dumps(one) + "\n" for one in said))
    record = analyse(tmp_path)
    assert (record.engine.worker, record.engine.weights_gib, record.engine.activation_peak_gib) == (None, 4.26, 2.01)
    assert (record.engine.kv_cache_gib, record.engine.kv_cache_tokens) == (68.89, 2257264)  # the smallest worker's
    workers = [rank.engine for rank in record.ranks if rank.engine]
    assert [(one.worker, one.weights_gib, one.kv_cache_gib) for one in workers] == [
        (0, 4.26, 69.8), (1, 3.28, 70.83), (2, 4.26, 68.89)
    ]  # fmt: skip
    (tmp_path / "engine").write_text("".join(json.dumps(one) + "\n" for one in said if one["pid"] in (9, 100)))
    assert [rank.engine for rank in analyse(tmp_path).ranks] == [None] * 3  # of one worker the engine's is its own


def test_what_an_engine_logs_is_kept_whatever_its_own_handler_drops(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(engine_log.LOGGERS, "logging", ("an_engine", ("an_engine.worker",), "basicConfig"))
    engine = logging.getLogger("an_engine")
    monkeypatch.setattr(engine, "handlers", [printer := logging.StreamHandler()])
    printer.setLevel(logging.INFO)
    engine.setLevel(logging.INFO)
    engine_log.listen(str(tmp_path))  # "logging" has been imported: at once
    logging.getLogger("an_engine.worker").debug("torch peak memory increase: %.2fGiB", 1.89)
    engine.info("Available KV cache memory: 2.00 GiB")
    engine.info("Starting to load model")
    lines = [json.loads(line)["text"] for line in (tmp_path / engine_log.FILE).read_text().splitlines()]
    assert lines == ["torch peak memory increase: 1.89GiB", "Available KV cache memory: 2.00 GiB"]
    assert capsys.readouterr().err == "Available KV cache memory: 2.00 GiB\nStarting to load model\n"
    (tmp_path / "run.json").write_text("{}")
    assert read_run(tmp_path).engine_logs == {os.getpid(): EngineLog(process="MainProcess", lines=tuple(lines))}


def test_an_engine_that_sets_up_its_logging_anew_is_kept_once(tmp_path: Path, monkeypatch) -> None:
    engine, module = logging.getLogger("an_engine"), ModuleType("an_engine.logger")
    monkeypatch.setattr(engine, "handlers", [])
    module.configure_logging = lambda: engine.handlers.clear()  # as dictConfig does
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(engine_log, "LOGGERS", {module.__name__: ("an_engine", (), "configure_logging")})
    engine.setLevel(logging.INFO)
    engine_log.listen(str(tmp_path))
    module.configure_logging()
    module.configure_logging()
    engine.info("Available KV cache memory: 2.00 GiB")
    assert len((tmp_path / engine_log.FILE).read_text().splitlines()) == 1
