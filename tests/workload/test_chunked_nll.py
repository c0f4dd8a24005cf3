"""TRL's loss from tiles of the logits: run by its own code on an emulated GPU, and refused where it is not."""

import sys
from pathlib import Path
from typing import Any

import pytest
from emulated import require_predicted, swept
from factories import make_spec
from grids import exhaustive

from vramprobe import api
from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.errors import MissingDependency, SpecError
from vramprobe.predict.shares import near
from vramprobe.resolve import resolve
from vramprobe.rules.not_sharded import cannot_step

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
def test_what_is_recorded_is_what_trl_allocates_on_an_emulated_gpu(tmp_path: Path) -> None:
    records = swept(tmp_path, SWEEP, cards="RTX-4090")
    assert [record.outcome.kind for record in records] == ["ok", "ok"]
    for record in records:
        assert record.environment.versions["trl"]
        require_predicted(record, "RTX-4090", allocated=0.002, reserved=0.02)


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
    """TRL scores labels that were shifted before the sequence was divided: no sum of shares knows such a ring."""
    words = CHUNKED | {"model": "qwen3-0.6b", "method": "full", "batch_size": 1, "seq_len": 4096, "gpu": "H100-SXM"}
    words |= {"num_gpus": 8, "sharding": "fsdp", "cp_size": 8}
    asked = {name: value for name, value in words.items() if name != "gpu"}
    assert cannot_step(resolve(**asked)) is None
    with pytest.raises(UnsupportedArchitecture, match="cp_size 8: a rank is recorded"):
        near(resolve(**asked | {"device": "cuda"}))
    with pytest.raises(SpecError, match="dpo is not run under cp_size 8"):
        api.predict(**words | {"loss": "nll", "trainer": "dpo"})
