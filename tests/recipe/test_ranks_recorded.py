"""Ranks that were emulated before: recorded anew, allocated and reserved memory to the byte."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulated import require_emulation
from grids import exhaustive

from tests.oracles import oracles
from vramprobe import catalog
from vramprobe.predict import recorded
from vramprobe.recipe.book import close_recorders

#: Among them what happens between two phases (no_sync of FSDP1), and what is extended.
CELLS = (
    "smollm2-135m_lora-r16-all_bf16+bf16_adamw-fused_b2s512_ddp-x4_rank0",
    "smollm2-135m_lora-r16-all_bf16+bf16_adamw-fused_b2s512_ckpt_fsdp-x4_rank0",
    "smollm2-135m_full_fp32+bf16_adamw-fused_b2s512_fsdp1-x4_rank0",
    "smollm2-135m_full_fp32+bf16_adamw-fused_b1s128_ga3_ckpt_fsdp1-shard-grad-op-x16_rank0",
)


@pytest.fixture(autouse=True, scope="module")
def ended() -> Iterator[None]:
    """No recording process stays behind."""
    yield
    close_recorders()


@exhaustive
@pytest.mark.parametrize("name", CELLS)
def test_a_rank_takes_what_it_took(name: str) -> None:
    require_emulation()
    oracle = next(one for one in oracles.cells() if one.spec.cell_id == name and one.run is not None)
    found = recorded.predict(oracle.spec, gpu=catalog.find_gpu(oracle.gpu))
    assert found.peak_allocated_bytes.value == oracle.run.allocated_bytes
    assert found.reserved_bytes.value == oracle.run.reserved_bytes
