"""Requests by arithmetic through the allocator's rules, against emulated runs: the same memory in reserve, to the byte.

The runs are those of results/emulated/. Each stands for what its name says, which the arithmetic once asked for in
another order, with another size or not at all.
"""

from __future__ import annotations

import lzma
from functools import cache
from pathlib import Path

import pytest

from vramprobe import catalog
from vramprobe.records.record import RunRecord
from vramprobe.terms.replayed import replayed

RECORDS = Path(__file__).parents[2] / "results" / "emulated" / "records.jsonl.xz"
CELLS = {
    "sums over rows, flash's splits": ("L40S", "smollm2-135m_full_bf16_adamw-fused_b1s1024_ckpt"),
    "a norm's rows": ("L40S", "llama-3.2-1b_full_bf16_lion_8bit_b1s2048_ckpt"),
    "autocast's order, biases": ("L4", "qwen2.5-0.5b_full_fp32+bf16_adamw-fused_b1s1024_ckpt"),
    "the math attention": ("L40S", "qwen2.5-0.5b_full_fp32_adamw-fused_b1s1024_ckpt"),
    "the memory-efficient attention": ("T4", "pythia-160m_full_fp32_adamw-fused_b1s1024_ckpt"),
    "GPT-2's variables": ("T4", "gpt2_full_fp32_adamw-fused_b1s1024_ckpt"),
    "OPT's": ("RTX-4090", "opt-125m_full_bf16_adamw-fused_b1s1024"),
    "OPT's reshapes": ("L40S", "opt-125m_full_bf16_adamw-fused_b1s1024_ckpt"),
    "adapters in a tied head's place": ("L40S", "qwen2.5-1.5b_lora-r64-all_bf16+bf16_adamw-fused_b1s1024_ckpt"),
    "raised weights": ("RTX-5090", "gemma-3-4b_qlora-nf4-peft-r16-all_bf16+bf16_adamw-fused_b1s512_ckpt"),
    "norms of queries, clones": ("RTX-5090", "qwen3-14b_qlora-nf4-peft-r16-all_bf16+bf16_adamw-fused_b1s512_ckpt"),
    "Phi-3's slices, a mask": ("B200", "phi-3-mini_qlora-nf4-peft-r16-all_bf16+bf16_adamw-fused_b1s2048"),
    "8-bit products": ("RTX-4090", "llama-3.2-3b_qlora-int8-peft-r16-all_bf16+bf16_adamw-fused_b1s1024_ckpt"),
    "a third step": ("H100-SXM", "qwen2.5-1.5b_full_fp32+bf16_adamw-fused_b1s2048_ckpt"),
    "OLMo's rotation": ("H100-SXM", "olmo-2-7b_lora-r16-all_bf16+bf16_adamw-fused_b1s4096_ckpt"),
    "an eager mask": ("B200", "gemma-2-27b_full_bf16_paged_adamw_8bit_b1s2048_ckpt_eager"),
}


@cache
def runs() -> dict[tuple[str, str], RunRecord]:
    wanted = {cell for _, cell in CELLS.values()}
    found = {}
    with lzma.open(RECORDS, "rt") as lines:
        for line in lines:
            if any(f'"{cell}"' in line for cell in wanted):
                record = RunRecord.model_validate_json(line)
                gpu = catalog.gpu_seen(record.environment.device_name)
                assert gpu is not None
                found[gpu.short_name, record.cell_id] = record
    return found


@pytest.mark.parametrize("name", CELLS)
def test_reserved_to_the_byte(name: str) -> None:
    record = runs()[CELLS[name]]
    assert record.peak is not None
    found = replayed(record.spec, catalog.gpu_seen(record.environment.device_name))
    assert found.reserved_bytes == record.peak.reserved_bytes
    assert found.allocated_bytes == pytest.approx(record.peak.allocated_bytes, rel=2e-3)
