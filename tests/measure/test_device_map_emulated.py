"""Layers on several emulated cards, beside from_pretrained(device_map="auto") and Trainer, which know nothing of us."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import vramprobe
from emulated import require_emulation
from factories import TINY_LLAMA, TINY_LLAMA_PATH
from grids import exhaustive, grid

from vramprobe.records.record import RunRecord

pytestmark = pytest.mark.timeout(900)  # whoever is first runs the cells of all

METHODS = ("full", "lora", "qlora")
SIX_LAYERS = json.dumps(TINY_LLAMA | {"num_hidden_layers": 6})
#: As a user writes it; prints the map, and in each step what both cards' tensors asked for at most.
SCRIPT = """
import json, os, sys
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainerCallback, TrainingArguments

folder, method = sys.argv[1:]
words = {}
if method == "qlora":
    words["quantization_config"] = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(folder, device_map="auto", dtype=torch.bfloat16, **words)
seen = {"map": model.hf_device_map, "steps": []}
if method != "full":
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    if method == "qlora":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))

class Peaks(TrainerCallback):
    def on_step_begin(self, *args, **words):
        for card in range(2):
            torch.cuda.reset_peak_memory_stats(card)
    def on_step_end(self, *args, **words):
        stats = [torch.cuda.memory_stats(card) for card in range(2)]
        seen["steps"].append([one["requested_bytes.all.peak"] for one in stats])

tokens = torch.arange(32)
settings = TrainingArguments(
    output_dir=os.path.join(folder, "out"), per_device_train_batch_size=2, max_steps=3, bf16=True, report_to=[],
    max_grad_norm=0.0, save_strategy="no", optim="adamw_torch_fused", disable_tqdm=True)
trainer = Trainer(
    model=model, args=settings, train_dataset=[{"input_ids": tokens, "labels": tokens}] * 64, callbacks=[Peaks()])
trainer.train()
print("SEEN", json.dumps(seen))
"""
CHECKPOINT = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained(sys.argv[1])
AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(sys.argv[2])
"""


@pytest.fixture(scope="module")
def records(few_of_each: list[RunRecord]) -> dict[str, RunRecord]:
    return {record.spec.method: record for record in few_of_each if record.spec.sharding == "device-map"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_emulation()
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "make.py").write_text(CHECKPOINT)
    (folder / "config.json").write_text(SIX_LAYERS)
    words = ["python", "make.py", ".", "model"]
    done = vramprobe("profile", "--emulate", "H100-SXM", "--", *words, cwd=folder)
    assert (folder / "model" / "config.json").exists(), done.stdout + done.stderr
    return folder / "model"


def test_each_card_closes_and_the_highest_speaks_for_all(records: dict[str, RunRecord]) -> None:
    assert set(records) == set(METHODS)
    for record in records.values():
        assert record.outcome.kind == "ok", record.outcome
        assert [card.rank for card in record.ranks] == [0, 1]
        assert record.peak.allocated_bytes == max(card.peak.allocated_bytes for card in record.ranks)
        assert record.facts.num_trainable_params > 0
        for card in record.ranks:
            assert card.ledger.at_peak is not None
            assert min(card.ledger.weights_bytes, card.ledger.gradients_bytes, card.ledger.optimizer_state_bytes) > 0
        assert [card.ledger.batch_bytes for card in record.ranks] == [2 * 2 * 32 * 8, 0]  # ids and labels, on the first


def test_the_weights_are_divided_between_the_cards_and_not_copied(records: dict[str, RunRecord]) -> None:
    record = records["full"]
    buffers = 2 * 8 * 4  # the rotary frequencies, and their original; of 16 to a head, in fp32
    held = [card.ledger.weights_bytes for card in record.ranks]
    assert sum(held) == 2 * record.facts.num_params + buffers
    modules = [name for card in record.ranks for name in card.modules]
    layers = [f"model.layers.{index}" for index in range(6)]
    assert modules == ["model.embed_tokens", *layers, "model.norm", "model.rotary_emb", "lm_head"]


@pytest.mark.parametrize("method", grid(["full", "qlora"]))
def test_as_from_pretrained_places_it_and_as_trainer_trains_it(
    method: str, records: dict[str, RunRecord], checkpoint: Path
) -> None:
    """The second and third step, which repeat. Trainer has a count of tokens on the first card beside the batch."""
    (checkpoint.parent / "train.py").write_text(SCRIPT)
    words = ["python", "train.py", str(checkpoint), method]
    done = vramprobe("profile", "--emulate", "H100-SXM x2", "--", *words, cwd=checkpoint.parent)
    said = next((line for line in done.stdout.splitlines() if line.startswith("SEEN")), None)
    assert said is not None, done.stdout + done.stderr
    seen = json.loads(said.removeprefix("SEEN"))
    cards = records[method].ranks
    assert [[name for name, at in seen["map"].items() if at == card.rank] for card in cards] == [
        card.modules for card in cards
    ]
    ours = [max(phase.requested_peak_bytes for phase in card.phases if phase.step == 3) for card in cards]
    for steps in seen["steps"][1:]:
        assert 0 <= steps[0] - ours[0] <= 32
        assert steps[1] == ours[1]


@exhaustive
def test_one_that_does_not_fit_and_one_that_needs_no_second_card(tmp_path: Path) -> None:
    require_emulation()
    common = ["--batch-size", "1", "--seq-len", "32", "--num-gpus", "2", "--sharding", "device-map", "--json"]
    for words, said in (
        (["--model", "llama-3.1-70b", "--method", "lora"], "the weights do not fit on 2 cards"),
        (["--model", "qwen2.5-0.5b", "--num-layers", "4", "--method", "lora"], "puts the whole of this model on one"),
    ):
        done = vramprobe("measure", "--emulate", "RTX-4090", *words, *common, cwd=tmp_path)
        record = json.loads(done.stdout)
        assert (record["outcome"]["kind"], record["outcome"]["phase"]) == ("error", "load")
        assert said in record["outcome"]["message"]
        assert record["outcome"]["traceback"] is None


@exhaustive
def test_out_of_memory_of_a_card_is_the_cells(tmp_path: Path) -> None:
    require_emulation()
    words = ["--model", str(TINY_LLAMA_PATH), "--method", "full", "--batch-size", "256", "--seq-len", "1024", "--json"]
    words += ["--num-gpus", "2", "--sharding", "device-map", "--limit-vram", "1GiB"]
    done = vramprobe("measure", "--emulate", "RTX-4090", *words, cwd=tmp_path)
    record = json.loads(done.stdout)
    assert record["outcome"]["kind"] == "oom", record["outcome"]
    assert record["outcome"]["requested_bytes"] > 0
    assert len(record["ranks"]) == 2
