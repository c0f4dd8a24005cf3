"""TRL's loss from tiles of the logits: run by its own code on an emulated GPU, counted, and refused where it is not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from emulated import swept
from factories import make_spec
from grids import exhaustive

from vramprobe import api
from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.errors import MissingDependency, SpecError
from vramprobe.predict.shares import near
from vramprobe.rules.not_sharded import cannot_step
from vramprobe.spec import resolve
from vramprobe.terms import moments
from vramprobe.terms.cell.setup import branch_of

MIB = 2**20
CHUNKED: dict[str, Any] = {"loss": "chunked_nll", "device": "cuda"}
#: Two layers of a small model with a large vocabulary, tied: the head's gradient and its tiles are most of its memory.
SWEEP = """
name: losses
defaults: {model: qwen2.5-0.5b, num_layers: 2, batch_size: 2, seq_len: 512, timing_steps: 0, loss: chunked_nll}
cells:
  - {method: full, recipe: mixed}
  - {method: lora, gradient_checkpointing: true}
"""


@exhaustive
def test_arithmetic_is_what_trl_allocates_on_an_emulated_gpu(tmp_path: Path) -> None:
    records = swept(tmp_path, SWEEP, cards="RTX-4090")
    assert [record.outcome.kind for record in records] == ["ok", "ok"]
    for record in records:
        assert record.environment.versions["trl"]
        words = record.spec.model_dump(exclude={"architecture"}, exclude_none=True, exclude_defaults=True)
        found = api.predict(gpu="RTX-4090", **words)
        assert found.peak_allocated_bytes.value == pytest.approx(record.peak.allocated_bytes, rel=0.002)
        assert found.reserved_bytes.value == pytest.approx(record.peak.reserved_bytes, rel=0.02)


def test_full_training_holds_the_heads_gradient_in_fp32_beside_a_copy_and_one_tile() -> None:
    """4 + 2 bytes of each element of the head; of each hidden state 4 + 2, and 2 that backward has saved; one tile."""
    cell = make_spec(model="llama-3.2-1b", num_layers=2, method="full", batch_size=2, seq_len=512, **CHUNKED)
    num_tokens, vocab_size, width = 1024, 128_256, 2048
    at_loss = next(m for m in moments(cell) if (m.phase, m.label) == ("backward", "loss"))
    each = 8 + 2 * 8 + 4 + 4 + 4  # a token's label, where it is, its log_z, its entropy, its gradient
    loss = 4
    expected = 6 * vocab_size * width + 8 * num_tokens * width + 2 * num_tokens * 32_768 + each * num_tokens + loss
    assert at_loss.terms["logits"] == expected


def test_a_tile_has_at_most_4096_labels_and_each_rows_last_token_has_none() -> None:
    cell = make_spec(model="llama-3.2-1b", batch_size=1, seq_len=4097, **CHUNKED)
    arch = architecture(cell.architecture)
    assert branch_of(cell, arch)[1] is None
    assert branch_of(cell.model_copy(update={"seq_len": 4098}), arch)[1] == 4096
    assert branch_of(cell.model_copy(update={"seq_len": 4098, "loss": "nll"}), arch)[1] is None


def test_no_more_memory_is_taken_for_the_logits_of_a_longer_sequence() -> None:
    def logits(seq_len: int) -> int:
        cell = make_spec(model="llama-3.2-1b", method="lora", batch_size=1, seq_len=seq_len, **CHUNKED)
        return max(m.terms.get("logits", 0) for m in moments(cell) if m.phase == "forward")

    width = 2048
    assert logits(16384) - logits(8192) < 8192 * (2 * width + 100)  # the copy of the hidden states, and statistics


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"loss": "huber"}, "loss: 'huber' given; allowed: 'nll', 'chunked_nll' or 'cut_cross_entropy'"),
        (CHUNKED | {"device": "cpu"}, "is run on GPUs alone; it needs device cuda"),
        (CHUNKED | {"fused_linear_cross_entropy": True}, "both replace the model's head and loss; use one of them"),
        (CHUNKED | {"method": "lora", "lora_targets": "lm_head"}, "passes its adapter by; leave lm_head out"),
        (CHUNKED | {"model": "t5-small"}, "of models that predict the next token; leave it out for t5"),
        (CHUNKED | {"torch_compile": True}, "not run compiled; leave torch_compile out"),
        (CHUNKED | {"padding": True}, "leave padding out"),
    ],
    ids=["unknown", "cpu", "liger", "lm_head", "t5", "compiled", "padding"],
)
def test_what_cannot_be_is_refused_with_what_can(words: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        make_spec(**{"model": "llama-3.2-1b"} | words)


def test_without_trl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from vramprobe.workload.loss import load_trl

    monkeypatch.setitem(sys.modules, "trl.trainer.utils", None)
    with pytest.raises(MissingDependency, match=r"is computed by trl 1.16, .* Install vramprobe\[trl\]"):
        load_trl(make_spec(model="llama-3.2-1b", **CHUNKED))


def test_a_cell_without_it_is_the_cell_that_it_was() -> None:
    cell = make_spec(model="llama-3.2-1b")
    assert cell.cell_id == make_spec(model="llama-3.2-1b", loss="nll").cell_id
    assert cell.fingerprint == make_spec(model="llama-3.2-1b", loss="nll").fingerprint
    assert make_spec(model="llama-3.2-1b", **CHUNKED).cell_id.endswith("_chunked-nll")


@pytest.mark.parametrize("sharding", ["tp", "device-map"])
def test_no_part_of_a_layer_or_process_with_several_gpus_is_predicted_with_it(sharding: str) -> None:
    words = CHUNKED | {"model": "llama-3.2-1b", "method": "full", "batch_size": 1, "seq_len": 512}
    with pytest.raises(SpecError, match=f"is not run under {sharding}; use sharding ddp, zero1, zero2, zero3, fsdp,"):
        api.predict(**words, num_gpus=2, sharding=sharding)


def test_ranks_that_share_a_sequence_are_recorded_with_it() -> None:
    """TRL scores labels that were shifted before the sequence was divided; arithmetic knows no such ring."""
    words = CHUNKED | {"model": "qwen3-0.6b", "method": "full", "batch_size": 1, "seq_len": 4096, "gpu": "H100-SXM"}
    words |= {"num_gpus": 8, "sharding": "fsdp", "cp_size": 8}
    asked = {name: value for name, value in words.items() if name != "gpu"}
    assert cannot_step(resolve(**asked)) is None
    with pytest.raises(UnsupportedArchitecture, match="cp_size 8: a rank is recorded"):
        near(resolve(**asked | {"device": "cuda"}))
    with pytest.raises(SpecError, match="dpo is not run under cp_size 8"):
        api.predict(**words | {"loss": "nll", "trainer": "dpo"})
