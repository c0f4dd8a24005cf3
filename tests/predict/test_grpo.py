"""GRPO beside an engine by recorded steps: emulated runs, known parts, what fits, and what is refused."""

import json

import pytest
from emulated import require_emulation
from grids import exhaustive

from tests.command_line import vramprobe
from vramprobe.errors import SpecError
from vramprobe.predict.grpo import Grpo, grpo
from vramprobe.units import GIB

#: Recipes of these, and of full training with as many tokens as LONG has, ship.
CELL = {"gpu": "H100-SXM", "model": "llama-3.1-8b", "gradient_checkpointing": True}
RUN = CELL | {"max_prompt_length": 16, "max_completion_length": 256, "searches": False}
LONG = RUN | {"max_completion_length": 1024}


def _stages(found: Grpo) -> dict[str, tuple[int, int]]:
    return {one.name: (one.trainer_bytes, one.engine_bytes) for one in found.stages}


def _require_stages(found: Grpo, gib: dict[str, float], within: float) -> None:
    """Live GiB of benchmarks/rollouts/grpo.md; the cache there has no charge for what a driver takes outside torch."""
    for name, size in gib.items():
        assert sum(_stages(found)[name]) / GIB == pytest.approx(size, abs=within), name


def test_stages_are_those_of_an_emulated_run() -> None:
    lora = grpo(method="lora", sleep=True, gpu_memory_utilization=0.5, **RUN)
    alone = {"weight_sync": 30.96, "log_probs": 15.93, "forward": 16.43, "backward": 16.76, "optimizer_step": 15.68}
    _require_stages(lora, alone, within=0.05)
    _require_stages(lora, {"generation": 53.98}, within=0.25)
    assert (lora.peak_stage, lora.verdict) == ("load", "fits")  # vLLM's whole share beside the weights
    assert "a recipe that ships" in lora.notes[0]


def test_full_training_beside_its_reference_is_as_an_emulated_run_has_it() -> None:
    found = grpo(method="full", beta=0.04, **LONG | {"model": "qwen2.5-1.5b"})
    _require_stages(found, {"log_probs": 35.24, "forward": 35.86, "backward": 38.67, "optimizer_step": 37.61}, 0.15)


@exhaustive
def test_few_tokens_are_recorded_by_themselves() -> None:
    """With up to 3,072 tokens the gradient of a trained embedding is another kernel's: 1 GiB less here."""
    require_emulation()
    full = grpo(method="full", sleep=True, gpu_memory_utilization=0.3, **RUN)
    alone = {"weight_sync": 59.96, "log_probs": 45.21, "forward": 45.71, "backward": 59.95, "optimizer_step": 59.93}
    _require_stages(full, alone, within=0.05)
    assert (full.peak_stage, full.verdict) == ("generation", "fits")
    assert "ships" not in full.notes[0]
    assert grpo(method="full", gpu_memory_utilization=0.3, **RUN).verdict == "does not fit"


@exhaustive
def test_qlora_is_as_an_emulated_run_of_vllm_0_22_has_it() -> None:
    """Both in 4 bits, adapters in bf16, merged weights beside those before."""
    require_emulation()
    run = LONG | {"model": "qwen2.5-1.5b", "vllm_release": "0.19"}
    found = grpo(method="qlora", **run)
    emulated = {"weight_sync": 25.25, "generation": 24.55, "log_probs": 25.17, "forward": 25.78, "backward": 26.24}
    _require_stages(found, emulated, within=0.07)
    prepared = grpo(method="qlora", kbit_prep="peft", lora_dtype="fp32", **run)
    assert prepared.weights_bytes - found.weights_bytes > GIB // 3  # embeddings in fp32


@exhaustive
def test_a_mixture_that_has_no_shapes_in_one_branch_is_answered_for_its_own() -> None:
    require_emulation()
    found = grpo(method="lora", **CELL | {"model": "gpt-oss-20b", "max_prompt_length": 64})
    assert found.weights_bytes > 38 * GIB  # experts dequantized to bf16
    assert "the events are not those" in found.not_searched
    assert found.largest_completion_length is None


def test_a_release_has_its_own_formulas() -> None:
    new, old = (grpo(method="lora", vllm_release=release, **RUN) for release in ("0.32", "0.19"))
    assert old.kv_cache_bytes - new.kv_cache_bytes > GIB // 2  # of 0.32's first start
    with pytest.raises(SpecError, match=r"one of 0\.19, 0\.32"):
        grpo(method="lora", vllm_release="0.25", **RUN)


@pytest.mark.parametrize(
    ("method", "utilization", "verdict"),
    [("lora", 0.5, "fits"), ("lora", 0.8, "does not fit"), ("full", 0.3, "does not fit")],
)
def test_verdicts_without_sleep_are_those_of_emulated_runs(method, utilization, verdict) -> None:
    run = LONG if method == "full" else RUN  # which had 256 tokens, too
    assert grpo(method=method, gpu_memory_utilization=utilization, **run).verdict == verdict


def test_what_sleep_a_reference_model_and_a_merge_change() -> None:
    awake, asleep = (_stages(grpo(method="full", sleep=sleep, **LONG)) for sleep in (False, True))
    engine = awake["generation"][1]
    assert dict.fromkeys(asleep, engine) | {"load": awake["load"][1]} == {n: e for n, (_, e) in awake.items()}
    assert [asleep[name][1] for name in ("log_probs", "forward", "backward", "optimizer_step")] == [0] * 4
    assert asleep["generation"][1] == engine
    plain, kept = grpo(method="full", **LONG), grpo(method="full", beta=0.04, **LONG)
    assert kept.reference_bytes == plain.weights_bytes
    assert {a.trainer_bytes - b.trainer_bytes for a, b in zip(kept.stages, plain.stages, strict=True)} == {
        plain.weights_bytes
    }
    lora = grpo(method="lora", beta=0.04, **LONG)
    assert lora.reference_bytes == 0  # adapters off
    stages = _stages(lora)
    assert stages["weight_sync"][0] - stages["generation"][0] == 8 * 14336 * 4096  # down_proj's delta and sum, fp32


def test_the_largest_of_each_fit_and_one_more_does_not() -> None:
    words = CELL | {"method": "lora", "gpu_memory_utilization": 0.4}
    found = grpo(**words)

    def fits(**change) -> bool:
        return grpo(searches=False, **words | change).verdict != "does not fit"

    length, group = found.largest_completion_length, found.largest_num_generations
    share = found.largest_gpu_memory_utilization
    assert fits(max_completion_length=length)
    assert not fits(max_completion_length=length + 1)
    assert fits(num_generations=group)
    assert not fits(num_generations=group + 1)
    assert fits(gpu_memory_utilization=share)
    assert not fits(gpu_memory_utilization=share + 0.01)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_generations": 1}, "num_generations 1"),
        ({"beta": -1.0}, "beta -1.0"),
        ({"batch_size": 4}, "drop batch_size"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization 1.5"),
        ({"method": "qlora"}, "choose vllm_release 0.19"),
        ({"trainer": "dpo"}, "drop trainer"),
        ({"device": "cpu"}, "it needs device cuda"),
    ],
)
def test_what_is_refused(given, said) -> None:
    with pytest.raises(SpecError, match=said):
        grpo(**CELL | {"method": "lora", "searches": False} | given)


def test_an_engine_without_a_cache_does_not_fit() -> None:
    found = grpo(method="lora", gpu_memory_utilization=0.1, **RUN)
    assert found.verdict == "does not fit"
    assert "refuses to start" in found.reason


def test_grpos_command_line() -> None:
    words = ("grpo", "--model", "llama-3.1-8b", "--method", "lora", "--gradient-checkpointing", "--gpu", "H100-SXM")
    done = vramprobe(*words, "--gpu-memory-utilization", "0.4", "--vllm-release", "0.19", "--json")
    found = json.loads(done.stdout)
    assert found["gpu_memory_utilization"] == 0.4
    assert "0.19" in found["notes"][1]
    wrong = vramprobe(*words, "--lora-r", "0")
    assert (wrong.returncode, "lora_r" in wrong.stderr) == (1, True)
    former = vramprobe("predict", *words[1:], "--trainer", "grpo", "--batch-size", "1", "--seq-len", "64")
    assert (former.returncode, "`vramprobe grpo`" in former.stderr) == (2, True)
