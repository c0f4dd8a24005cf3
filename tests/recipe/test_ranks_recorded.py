"""Ranks that were emulated before: recorded anew, allocated and reserved memory to the byte."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from emulated import require_emulation
from grids import exhaustive

from tests.oracles import oracles
from vramprobe import api, catalog
from vramprobe.predict import recorded
from vramprobe.recipe import recording
from vramprobe.recipe.book import recorded_as
from vramprobe.recipe.recipe import CannotRecord
from vramprobe.recipe.recording import Recording, Request

#: Among them what happens between two phases (no_sync of FSDP1), and what is extended.
CELLS = (
    "smollm2-135m_lora-r16-all_bf16+bf16_adamw-fused_b2s512_ddp-x4_rank0",
    "smollm2-135m_lora-r16-all_bf16+bf16_adamw-fused_b2s512_ckpt_fsdp-x4_rank0",
    "smollm2-135m_full_fp32+bf16_adamw-fused_b2s512_fsdp1-x4_rank0",
    "smollm2-135m_full_fp32+bf16_adamw-fused_b1s128_ga3_ckpt_fsdp1-shard-grad-op-x16_rank0",
)


@exhaustive
@pytest.mark.parametrize("name", CELLS)
def test_a_rank_takes_what_it_took(name: str) -> None:
    require_emulation()
    oracle = next(one for one in oracles.cells() if one.spec.cell_id == name and one.run is not None)
    found = recorded.predict(oracle.spec, gpu=catalog.find_gpu(oracle.gpu))
    assert found.peak_allocated_bytes.value == oracle.run.allocated_bytes
    assert found.reserved_bytes.value == oracle.run.reserved_bytes


class _Deaf(Recording):
    """Notes the depth of the first run, None for the whole model, and ends there."""

    def _run(self, spec: Any, depth: int | None) -> Any:
        raise CannotRecord(str(depth))


@pytest.mark.parametrize(
    ("options", "depth"),
    [
        ({}, 3),
        ({"sharding": "fsdp", "num_gpus": 2}, 5),
        ({"sharding": "fsdp1-hybrid", "num_gpus": 16}, 5),
        ({"sharding": "tp", "num_gpus": 3}, 5),
        ({"sharding": "ddp", "num_gpus": 2}, None),
        ({"sharding": "zero3", "num_gpus": 2}, None),
    ],
)
def test_what_fills_buckets_is_recorded_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], depth: int | None
) -> None:
    """One GPU needs two layers, ranks with layers gathered ahead four, and the first run has one more, as
    those of other shapes; others' buckets hold any number."""
    monkeypatch.setattr(recording, "require_packages", lambda specs: None)
    launcher = SimpleNamespace(start=lambda: None)
    deaf = _Deaf(tmp_path, SimpleNamespace(launcher_of=lambda spec: launcher))
    one = api.cell(model="smollm2-135m", method="full", device="cuda", batch_size=1, seq_len=64, **options)
    with pytest.raises(CannotRecord, match=f"^{depth}$"):
        deaf.recipe(Request(recorded_as(one), tmp_path / "recipe"), lambda words: None)
