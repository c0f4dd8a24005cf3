"""Cut Cross-Entropy as a cell's loss: by its own code on an emulated GPU, counted, and refused where it is not run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from emulated import require_emulation, swept
from factories import make_spec
from grids import exhaustive

from vramprobe import api
from vramprobe.errors import MissingDependency, SpecError
from vramprobe.predict.shares import near
from vramprobe.terms import moments

CUT: dict[str, Any] = {"loss": "cut_cross_entropy", "device": "cuda"}
SWEEP = """
name: cut
defaults: {model: qwen2.5-0.5b, num_layers: 2, batch_size: 2, seq_len: 512, timing_steps: 0, loss: cut_cross_entropy}
cells:
  - {method: full}
  - {method: lora, gradient_checkpointing: true}
"""


@exhaustive
def test_arithmetic_is_what_it_allocates_on_an_emulated_gpu(tmp_path: Path) -> None:
    site = require_emulation().parents[1]
    if not list(site.glob("lib/python3*/site-packages/cut_cross_entropy/transformers")):
        pytest.skip("the emulated environment has no build of cut-cross-entropy with a patch for transformers")
    for record in swept(tmp_path, SWEEP, cards="RTX-4090"):
        assert record.outcome.kind == "ok"
        words = record.spec.model_dump(exclude={"architecture"}, exclude_none=True, exclude_defaults=True)
        found = api.predict(gpu="RTX-4090", **words)
        assert found.peak_allocated_bytes.value == pytest.approx(record.peak.allocated_bytes, rel=0.001)


def test_it_has_a_number_for_each_word_and_token_in_place_of_logits() -> None:
    """Of a short row: both gradients, what tokens keep, the words' average logits and their order."""
    cell = make_spec(model="llama-3.2-1b", method="full", batch_size=1, seq_len=8, num_layers=2, **CUT)
    found = {(one.phase, one.label): one.terms for one in moments(cell)}
    tokens, words, width = 8, 128_256, 2048
    gradients, averages, order = 2 * width * (words + tokens), 4 * words, 4 * words
    of_tokens, locks = (4 + 8 + 2 * width) * tokens + 3 * 4, 4 * (width // 64) * (words // 128)
    terms = found["backward", "loss"]
    assert terms["logits"] == gradients + averages + order + of_tokens + locks
    longer = cell.model_copy(update={"seq_len": 4096})
    assert all(one.terms.get("logits", 0) < 4096 * words for one in moments(longer))  # in no dtype all of them


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"recipe": "mixed"}, "its kernels take a head of 16 bits; load in bf16"),
        ({"method": "qlora"}, "kbit_prep peft raises the head to fp32, .* use kbit_prep none or trl"),
        ({"method": "lora", "lora_targets": ["lm_head"]}, "passes its adapter by; leave lm_head out"),
        ({"model": "pythia-160m"}, "its library has no patch for gpt_neox; leave it out"),
        ({"model": "t5-small"}, "of models that predict the next token; leave it out for t5"),
        ({"device": "cpu"}, "is run on GPUs alone; it needs device cuda"),
        ({"padding": True}, "leave padding out"),
        ({"torch_compile": True}, "not run compiled; leave torch_compile out"),
        ({"fused_linear_cross_entropy": True}, "both replace the model's head and loss; use one of them"),
        ({"trainer": "dpo"}, "trainer dpo has a head and loss of its own; leave loss out"),
        ({"num_gpus": 2, "sharding": "fsdp"}, "loss cut_cross_entropy reads the head's weight .* or use sharding ddp"),
    ],
    ids=["fp32", "peft", "lm_head", "family", "t5", "cpu", "padding", "compiled", "liger", "trainer", "fsdp"],
)
def test_what_cannot_be_is_refused_with_what_can(words: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        make_spec(**{"model": "llama-3.2-1b", "method": "full"} | CUT | words)


def test_a_rank_of_ddp_has_it() -> None:
    """Composed: recording it needs the library, which does not come from an index."""
    words = {"model": "llama-3.2-1b", "method": "full", "num_layers": 2, "batch_size": 1, "seq_len": 512}
    found, plain = (
        near(make_spec(**words, **loss, device="cuda").model_copy(update={"num_gpus": 2, "sharding": "ddp"}))
        for loss in ({"loss": "cut_cross_entropy"}, {})
    )
    assert found.peak_allocated_bytes.value < plain.peak_allocated_bytes.value


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from vramprobe.workload.loss import load_library

    monkeypatch.setitem(sys.modules, "cut_cross_entropy", None)
    monkeypatch.setitem(sys.modules, "cut_cross_entropy.transformers", None)
    with pytest.raises(MissingDependency, match=r"Install 'cut-cross-entropy\[transformers\] @ git\+https"):
        load_library(make_spec(model="llama-3.2-1b", **CUT))
