"""An engine's KV cache on other GPUs, and what would make a request fit, from its own log."""

import json
from pathlib import Path

import pytest
from profile_factory import Script, write_launcher

from vramprobe.emulate.cards import card_properties
from vramprobe.predict.serve import non_torch_charge
from vramprobe.profile.analyse import analyse
from vramprobe.records.profile import ProfileRecord
from vramprobe.units import GIB

STARTS = """Initial free memory: 78.68 GiB; Requested memory: 0.920000 (util), 72.85 GiB
Available KV cache memory: 70.32 GiB
GPU KV cache size: 658,320 tokens, Maximum concurrency for 8,192 tokens per request: 80.36x"""
REFUSES = """Initial free memory: 21.53 GiB; Requested memory: 0.800000 (util), 17.63 GiB
Available KV cache memory: 1.12 GiB
To serve at least one request with the model's max seq len (16384), (2.0 GiB KV cache is needed, which is larger than \
the available KV cache memory (1.12 GiB). Based on the available memory, the estimated maximum model length is 9168. """


def profiled(folder: Path, log: str, device_name: str, gpus: list[str] | None = None) -> ProfileRecord:
    script = Script(device_name=device_name, capability=[9, 0] if "H100" in device_name else [8, 9])
    with script.phase("engine_load"):
        script.alloc(1 << 36, GIB)
    script.write(folder)
    write_launcher(folder)
    lines = [json.dumps({"engine": "vllm", "pid": 1, "text": line}) for line in log.splitlines()]
    (folder / "engine").write_text("\n".join(lines) + "\n")
    return analyse(folder, gpus=gpus)


def test_the_gpu_that_it_ran_on_has_what_the_engine_logged(tmp_path: Path) -> None:
    served = profiled(tmp_path, STARTS, "NVIDIA H100 80GB HBM3").served
    assert (served.verdict, served.longest_request_tokens, served.kv_cache_gib) == ("fits", 658320, 70.32)


def test_another_gpu_has_its_own_share_less_what_is_no_cache(tmp_path: Path) -> None:
    record = profiled(tmp_path, STARTS, "NVIDIA H100 80GB HBM3", ["L4"])
    (card,) = record.cards
    cache = card_properties("L4").total_bytes / GIB * 0.92 - (72.85 - 70.32) - non_torch_charge() / GIB
    assert card.served.kv_cache_gib == pytest.approx(cache, abs=0.01)
    assert card.served.longest_request_tokens == pytest.approx(658320 * cache / 70.32, abs=16)
    assert (card.verdict, card.served.max_concurrency) == ("fits", pytest.approx(80.36 * cache / 70.32, abs=0.01))


def test_an_engine_that_refuses_to_start_is_told_what_would_fit(tmp_path: Path) -> None:
    served = profiled(tmp_path, REFUSES, "NVIDIA L4").served
    assert (served.verdict, served.length_tokens) == ("does not fit", 16384)
    total = card_properties("L4").total_bytes / GIB
    length, utilization, dtype = served.settings
    assert (length, dtype) == ("--max-model-len 9168", "--kv-cache-dtype fp8")
    more = float(utilization.removeprefix("--gpu-memory-utilization ")) - 0.8
    assert 0.88 <= more * total <= 0.88 + total / 100


def test_a_gpu_that_is_too_small_has_no_setting(tmp_path: Path) -> None:
    log = STARTS.replace("70.32", "12.00")  # 60 GiB are no cache
    (card,) = profiled(tmp_path, log, "NVIDIA H100 80GB HBM3", ["RTX-4090"]).cards
    assert card.verdict == "does not fit"
    assert card.served.settings == ()
    assert "weights and activations alone" in card.why


def test_a_log_that_says_too_little_is_not_judged(tmp_path: Path) -> None:
    record = profiled(tmp_path, STARTS.splitlines()[1], "NVIDIA H100 80GB HBM3", ["L4"])
    assert record.served is None
    assert record.cards[0].verdict == "unknown"
