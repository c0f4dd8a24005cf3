"""TRL's preference trainers: run by their own code on an emulated GPU, recorded, and refused where they are not run."""

import sys
from pathlib import Path
from typing import Any

import pytest
from emulated import require_emulation, require_predicted, swept
from factories import make_spec
from grids import exhaustive

from vramprobe import api
from vramprobe.architecture import architecture
from vramprobe.bounds.tensors import tensors
from vramprobe.catalog import find_gpu
from vramprobe.errors import MissingDependency, SpecError
from vramprobe.predict import recorded
from vramprobe.trainers import TRAINERS
from vramprobe.units import GIB

OF_TRL = [name for name, row in TRAINERS.items() if row.trl]
DPO: dict[str, Any] = {"model": "llama-3.2-1b", "trainer": "dpo", "device": "cuda"}
#: Two layers of a small model with a large vocabulary.
SWEEP = """
name: trainers
defaults: {model: qwen2.5-0.5b, num_layers: 2, batch_size: 2, seq_len: 512, timing_steps: 0}
cells:
  - {trainer: TRAINER, method: full, recipe: mixed}
  - {trainer: TRAINER, method: qlora, gradient_checkpointing: true}
"""
RANKS = """
name: ranks
defaults: {model: qwen2.5-0.5b, num_layers: 2, batch_size: 2, seq_len: 256, timing_steps: 0, num_gpus: 2}
cells:
  - {trainer: dpo, method: full, recipe: mixed, sharding: [ddp, fsdp]}
  - {trainer: [kto, orpo], method: lora, sharding: fsdp}
  - {trainer: reward, method: full, sharding: ddp}
"""
PARAMS_OF_TWO_LAYERS = 128_256 * 2048 + 2048 + 2 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048)


@exhaustive
@pytest.mark.parametrize("trainer", OF_TRL)
def test_a_recording_is_what_trl_allocates_on_an_emulated_gpu(trainer: str, tmp_path: Path) -> None:
    records = swept(tmp_path, SWEEP.replace("TRAINER", trainer), cards="RTX-4090")
    assert [record.outcome.kind for record in records] == ["ok", "ok"]
    for record in records:
        require_predicted(record, "RTX-4090", allocated=0.002, reserved=0.02)


@exhaustive
def test_on_two_gpus_trl_divides_and_copies_the_models_as_counted(tmp_path: Path) -> None:
    """Each rank is run: a reference is whole beside DDP, and one unit under FSDP2; all have nearly the same."""
    records = swept(tmp_path, RANKS, cards="H100-SXM x2")
    assert [record.outcome.kind for record in records] == ["ok"] * 5
    for record in records:
        for rank in record.ranks:  # blocks that are not split differ with what each rank has loaded
            assert rank.peak.allocated_bytes == pytest.approx(record.peak.allocated_bytes, rel=0.001)
        require_predicted(record, "H100-SXM", allocated=0.002, reserved=0.05)


def test_a_second_model_is_not_offloaded() -> None:
    asked = {"num_gpus": 2, "sharding": "fsdp", "offload": "params", "method": "full"}
    with pytest.raises(SpecError, match=r"has a reference model, .* use method lora, whose reference is the model"):
        make_spec(**DPO | asked)
    make_spec(**DPO | asked | {"method": "lora"})


def test_a_batch_of_pairs_has_twice_the_rows() -> None:
    assert make_spec(method="lora", batch_size=3, seq_len=64, **DPO).num_tokens == 2 * 3 * 64


def test_a_reward_model_scores_rows_by_a_head_of_one_output_that_is_trained() -> None:
    """Each of its rows has one number; peft trains a copy of the head."""
    cell = make_spec(method="full", batch_size=2, seq_len=512, num_layers=2, **DPO | {"trainer": "reward"})
    arch = architecture(cell.architecture)
    assert arch.num_params == PARAMS_OF_TWO_LAYERS + 2048
    adapted = make_spec(method="lora", batch_size=2, seq_len=512, num_layers=2, **DPO | {"trainer": "reward"})
    copies = [tensor for tensor in tensors(adapted, arch) if tensor.trained and "lora_" not in tensor.name]
    assert [(copy.name, copy.numel) for copy in copies] == [("score.modules_to_save", 2048)]


@pytest.mark.parametrize("trainer", OF_TRL)
@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"trainer": "ppo"}, "trainer: 'ppo' given; allowed: 'sft'"),
        ({"loss": "chunked_nll"}, "has a head and loss of its own; leave loss out"),
        ({"method": "lora", "lora_dropout": 0.1}, "TRL switches every dropout off; leave lora_dropout out"),
        ({"device": "cpu"}, "is run on GPUs alone; it needs device cuda"),
        ({"fused_linear_cross_entropy": True}, "both replace the model's head and loss; use one of them"),
        ({"num_gpus": 2, "sharding": "tp"}, "is not run under tp; use sharding ddp, zero1, zero2, zero3, fsdp, "),
        ({"num_gpus": 4, "sharding": "fsdp", "cp_size": 2}, "is not run under cp_size 2; use sharding ddp, "),
    ],
    ids=["unknown", "loss", "dropout", "cpu", "liger", "tensor-parallel", "context-parallel"],
)
def test_what_cannot_be_is_refused_with_what_can(trainer: str, words: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        make_spec(**DPO | {"trainer": trainer} | words)


def test_without_trl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from vramprobe.workload.loss import load_trl

    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.setitem(sys.modules, "trl.trainer.utils", None)
    with pytest.raises(MissingDependency, match=r"trainer dpo is computed by trl 1\.16, .* Install vramprobe\[trl\]"):
        load_trl(make_spec(**DPO))


def test_a_cell_without_it_is_the_cell_that_it_was() -> None:
    cell = make_spec(model="llama-3.2-1b")
    assert cell.fingerprint == make_spec(model="llama-3.2-1b", trainer="sft").fingerprint
    assert make_spec(**DPO).cell_id.endswith("_dpo")


@exhaustive
@pytest.mark.parametrize(
    ("method", "gib"), [("lora", (15.93, 16.43, 16.76, 15.68)), ("full", (45.21, 45.71, 59.95, 59.93))]
)
def test_a_recorded_step_of_grpo_is_what_trl_had_beside_its_engine(method: str, gib: tuple[float, ...]) -> None:
    """Live GiB of benchmarks/rollouts/grpo.md where the engine sleeps: log_probs, forward, backward, optimizer_step."""
    require_emulation()
    words = {"autocast": "bf16", "gradient_checkpointing": True, "batch_size": 8, "seq_len": 16 + 256}
    one = api.cell(model="llama-3.1-8b", method=method, trainer="grpo", device="cuda", **words)
    phases = [phase for phase in recorded.replay_of(one, gpu=find_gpu("H100-SXM")).phases if phase.step == 2]
    assert [phase.name for phase in phases] == ["forward", "forward", "backward", "optimizer_step", "zero_grad"]
    for phase, seen in zip(phases, gib, strict=False):
        assert phase.allocated_peak_bytes / GIB == pytest.approx(seen, abs=0.05)
