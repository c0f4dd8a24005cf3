"""A cell's requests by arithmetic through the allocator; remainders."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest

from vramprobe.allocator.allocator import CachingAllocator
from vramprobe.bounds import tensors as parameters
from vramprobe.catalog import find_gpu
from vramprobe.spec import CellSpec, resolve
from vramprobe.terms.cell.remainders import remainder
from vramprobe.terms.replayed import Replayed, replayed
from vramprobe.terms.step.requests import Run
from vramprobe.units import MIB

CELLS: list[dict[str, Any]] = [
    {"model": "llama-3.2-1b", "method": "full", "seq_len": 2048, "gradient_checkpointing": True},
    {"model": "qwen2.5-0.5b", "method": "lora", "seq_len": 512},
    {"model": "qwen3-0.6b", "method": "qlora", "seq_len": 512, "gradient_checkpointing": True},
    {"model": "pythia-160m", "method": "full", "seq_len": 1024, "grad_accum": 2, "optim": "adamw_torch"},
]


def cell(words: dict[str, Any]) -> CellSpec:
    return resolve(**({"device": "cuda", "batch_size": 1, "num_layers": 2} | words))


class Account:
    """An allocator that only counts."""

    def __init__(self) -> None:
        self.standing: dict[Hashable, int] = {}
        self.most = self.total = 0

    def allocate(self, name: Hashable, size_bytes: int) -> None:
        assert name not in self.standing
        self.standing[name] = size_bytes
        self.total += size_bytes
        self.most = max(self.most, self.total)

    def free(self, name: Hashable) -> None:
        self.total -= self.standing.pop(name)

    def empty_cache(self) -> None:
        pass

    play = CachingAllocator.play


@pytest.mark.parametrize("words", CELLS, ids=lambda words: f"{words['model']} {words['method']}")
def test_a_step_leaves_what_it_found(words: dict[str, Any]) -> None:
    """Weights, buffers and bitsandbytes' code book after the load; after each step these, batch, state and workspaces,
    and nothing of the step.
    """
    spec, account = cell(words), Account()
    run = Run(spec, account, workspace_bytes=32 * MIB)
    run.load()
    weights = parameters.weights_bytes(parameters.tensors(spec, run.arch), spec.quant)
    weights += parameters.buffers_bytes(run.arch, spec.dtype) + (1024 if spec.quant == "nf4" else 0)
    assert account.total == weights + 2 * 8 * spec.num_tokens
    totals = []
    for _ in range(3):
        run.step()
        totals.append(account.total)
    assert totals[0] == totals[1] == totals[2]
    kept = [size for name, size in account.standing.items() if isinstance(name, tuple) and name[0] == "workspace"]
    assert kept == [32 * MIB, 32 * MIB]  # of the forward's thread, and of the backward's


def test_the_card_decides() -> None:
    """cuBLAS's workspaces, and without flash attention the scores; the answer is kept for each by itself."""
    spec = cell({"model": "llama-3.2-1b", "method": "lora", "seq_len": 2048})
    hopper, ampere, turing = (replayed(spec, find_gpu(name)) for name in ("H100-SXM", "RTX-3090", "T4"))
    assert hopper.allocated_bytes - ampere.allocated_bytes == pytest.approx(2 * (32 - 8.125) * MIB, rel=0.05)
    assert turing.allocated_bytes > hopper.allocated_bytes
    assert replayed(spec, find_gpu("H200")) == hopper
    assert replayed(spec) == ampere == Replayed(*ampere)


@pytest.mark.parametrize(
    "size_bytes",
    [1, 512, 513, 10 * MIB, 10 * MIB + 1, 11 * MIB, 11 * MIB - 1, 129 * MIB + MIB // 2, 128 * MIB + 3 * MIB // 4],
)
def test_a_remainder_is_the_allocators(size_bytes: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate("block", size_bytes)
    assert remainder(size_bytes) == allocator.ledger.allocated - size_bytes
