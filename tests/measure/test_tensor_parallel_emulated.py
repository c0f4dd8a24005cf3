"""Tensor parallelism on emulated cards, beside from_pretrained(tp_plan="auto") and Trainer, unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import vramprobe
from emulated import counted, swept
from factories import TINY_LLAMA, TINY_LLAMA_PARAMS, TINY_LLAMA_PATH
from grids import exhaustive

from vramprobe.records.record import RunRecord

pytestmark = pytest.mark.timeout(900)  # whoever is first runs the cells of all

HEAD = """
name: parts
defaults: {{model: {plain}, batch_size: 2, seq_len: 32, num_gpus: 2, sharding: tp, device: cuda}}
cells:
"""
MORE = """
  - {{method: full, autocast: bf16, only_rank: 1}}
  - {{method: lora, lora_targets: q_v}}
  - {{method: lora, lora_targets: q_v, only_rank: 0}}
  - {{model: {tied}, method: full, autocast: bf16}}
"""
TIED = "full, with the embedding for a head"
#: As a user writes it; prints what tensors asked for at most in each step of rank 0.
SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

folder, method = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(
    folder, distributed_config=DistributedConfig(tp_plan="auto"), dtype=torch.bfloat16)
if method == "lora":
    from peft import LoraConfig, get_peft_model
    targets = ["q_proj", "v_proj"]
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"))
seen = []

class Peaks(TrainerCallback):
    def on_step_begin(self, *args, **words):
        torch.cuda.reset_peak_memory_stats()
    def on_step_end(self, *args, **words):
        seen.append(torch.cuda.memory_stats()["requested_bytes.all.peak"])

tokens = torch.arange(32)
settings = TrainingArguments(
    output_dir=os.path.join(folder, "out"), per_device_train_batch_size=2, max_steps=3, bf16=True, report_to=[],
    max_grad_norm=0.0, save_strategy="no", optim="adamw_torch_fused", disable_tqdm=True)
trainer = Trainer(
    model=model, args=settings, train_dataset=[{"input_ids": tokens, "labels": tokens}] * 64, callbacks=[Peaks()])
trainer.train()
if dist.get_rank() == 0:
    print("SEEN", json.dumps(seen))
"""
CHECKPOINT = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained(sys.argv[1])
AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(sys.argv[2])
"""
#: Of the tiny llama: what the plan leaves whole on every rank, five norms of 64, and its weights in bf16.
WHOLE, BUFFERS = 5 * 64, 2 * 8 * 4


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama, whose head is its embedding."""
    folder = tmp_path_factory.mktemp("tied")
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA | {"tie_word_embeddings": True}))
    return folder


@pytest.fixture(scope="module")
def records(few_of_each: list[RunRecord]) -> dict[tuple[str, bool], RunRecord]:
    """By what is trained, and whether one rank ran by itself."""
    return by_kind([record for record in few_of_each if record.spec.sharding == "tp"])


@pytest.fixture(scope="module")
def all_records(
    tmp_path_factory: pytest.TempPathFactory, tied: Path, records: dict[tuple[str, bool], RunRecord]
) -> dict[tuple[str, bool], RunRecord]:
    more = (HEAD + MORE).format(plain=TINY_LLAMA_PATH, tied=tied)
    return records | by_kind(swept(tmp_path_factory.mktemp("more"), more, cards="H100-SXM x2"))


def by_kind(found: list[RunRecord]) -> dict[tuple[str, bool], RunRecord]:
    return {
        (
            TIED if record.spec.architecture["tie_word_embeddings"] else record.spec.method,
            record.spec.only_rank is not None,
        ): record
        for record in found
    }


@exhaustive
def test_a_rank_alone_counts_the_bytes_of_that_rank_among_all(all_records: dict[tuple[str, bool], RunRecord]) -> None:
    assert_alone_as_among_all("full", all_records)


@exhaustive
def test_so_does_one_with_adapters(all_records: dict[tuple[str, bool], RunRecord]) -> None:
    assert_alone_as_among_all("lora", all_records)


def assert_alone_as_among_all(method: str, records: dict[tuple[str, bool], RunRecord]) -> None:
    (alone,) = records[method, True].ranks
    same = records[method, False].ranks[alone.rank]
    assert counted(alone) == counted(same)
    assert (alone.ledger, alone.traffic) == (same.ledger, same.traffic)


def test_each_rank_has_its_part_of_every_layer_and_norms_are_whole(
    records: dict[tuple[str, bool], RunRecord],
) -> None:
    record = records["full", False]
    assert record.facts.num_params == record.facts.num_trainable_params == TINY_LLAMA_PARAMS
    part = 2 * ((TINY_LLAMA_PARAMS - WHOLE) // 2 + WHOLE)
    embedding = 2 * 256 * 64  # of which DTensor's backward makes the whole gradient on every rank
    for rank in record.ranks:
        assert rank.ledger.weights_bytes == part + BUFFERS
        assert rank.ledger.gradients_bytes == part + embedding // 2
        assert rank.ledger.at_peak is not None


def test_what_a_step_moves(records: dict[tuple[str, bool], RunRecord]) -> None:
    """In forward a sum after the embedding, and after attention and MLP of both layers; the logits of all tokens are
    brought together. In backward a sum before each of these and before the head, and each norm's gradient."""
    for rank in records["full", False].ranks:
        moved = {(one.phase, one.kind): (one.num_calls, one.payload_bytes) for one in rank.traffic}
        assert moved["forward", "all_reduce"][0] == 5
        assert moved["forward", "all_gather"] == (1, 2 * 32 * 256 * 2)
        assert moved["backward", "all_reduce"][0] >= 5 + 5
        assert set(moved) == {("forward", "all_reduce"), ("forward", "all_gather"), ("backward", "all_reduce")}


@exhaustive
def test_a_tied_head_is_the_embedding_s_part(all_records: dict[tuple[str, bool], RunRecord]) -> None:
    head = 2 * 256 * 64 // 2
    for plain, tied in zip(all_records["full", False].ranks, all_records[TIED, False].ranks, strict=True):
        assert tied.ledger.weights_bytes == plain.ledger.weights_bytes - head
        assert tied.ledger.gradients_bytes == tied.ledger.weights_bytes - BUFFERS  # where its gradient ends as a part


@exhaustive
@pytest.mark.parametrize("kind", ["full", "lora", TIED])
def test_as_from_pretrained_divides_it_and_as_trainer_trains_it(
    kind: str, all_records: dict[tuple[str, bool], RunRecord], tied: Path, tmp_path: Path
) -> None:
    """The second and third step, which repeat. Trainer has a count of tokens beside the batch."""
    (tmp_path / "make.py").write_text(CHECKPOINT)
    (tmp_path / "train.py").write_text(SCRIPT)
    method, config = ("full", tied) if kind == TIED else (kind, TINY_LLAMA_PATH)
    words = ["python", "make.py", str(config), "model"]
    done = vramprobe("profile", "--emulate", "H100-SXM", "--", *words, cwd=tmp_path)
    assert (tmp_path / "model" / "config.json").exists(), done.stdout + done.stderr
    words = ["torchrun", "--nproc-per-node", "2", "train.py", "model", method]
    done = vramprobe("profile", "--emulate", "H100-SXM x2", "--", *words, cwd=tmp_path)
    said = next((line for line in done.stdout.splitlines() if line.startswith("SEEN")), None)
    assert said is not None, done.stdout + done.stderr
    phases = all_records[kind, False].ranks[0].phases
    ours = max(phase.requested_peak_bytes for phase in phases if phase.step == 3)
    for theirs in json.loads(said.removeprefix("SEEN"))[1:]:
        assert 0 <= theirs - ours <= 32
