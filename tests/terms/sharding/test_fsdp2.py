"""A rank's walk with its shares left open: to the byte the walk of the shares themselves, and one for many ranks."""

from __future__ import annotations

import pytest

from vramprobe.architecture import architecture
from vramprobe.spec import CellSpec, resolve
from vramprobe.terms.cell.setup import Setup, setup_of
from vramprobe.terms.models.families import layer_place
from vramprobe.terms.sharding.fsdp import Units
from vramprobe.terms.sharding.fsdp2 import Fsdp2Tape, _open_walk, unit_walk, units_of
from vramprobe.terms.sharding.rank import Division, computed_tensors, stored_tensors
from vramprobe.terms.sharding.ranks import rank_moments
from vramprobe.terms.step.walk import Walk, one_of_each_kind, walk_layers


def cell(model: str, method: str, **options: object) -> CellSpec:
    usual = {"device": "cuda", "batch_size": 2, "seq_len": 512}
    return resolve(model=model, method=method, **{**usual, **options})


def asked(spec: CellSpec, num_gpus: int, apart: bool) -> tuple[Setup, Units]:
    """What unit_walk is asked with."""
    arch, stored = architecture(spec.architecture), stored_tensors(spec)
    units = units_of(spec, Division("fsdp", num_gpus, all_buffers=not apart))
    return setup_of(spec, arch, computed_tensors(spec, stored)), units


def of_known_shares(setup: Setup, units: Units) -> Walk:
    layers = one_of_each_kind(setup.arch)
    places = [layer_place(setup.arch, layer) for layer in layers]
    return walk_layers(setup, layers, Fsdp2Tape(setup.sizes.covers, units, places), units.micro_steps)


@pytest.mark.parametrize(
    ("model", "method", "options"),
    [
        ("llama-3-8b", "full", {"autocast": "bf16", "dtype": "fp32"}),
        ("llama-3-8b", "qlora", {"grad_accum": 4}),
        ("gpt2", "full", {"gradient_checkpointing": True}),
        ("gemma-2-9b", "lora", {"batch_size": 1}),
        ("llama-3.2-1b", "full", {"autocast": "bf16", "dtype": "fp32", "trainer": "dpo"}),
    ],
)
@pytest.mark.parametrize("num_gpus", [3, 8])
def test_a_walk_with_open_shares_is_the_walk_of_the_shares(
    model: str, method: str, options: dict[str, object], num_gpus: int
) -> None:
    for apart in (True, False):
        setup, units = asked(cell(model, method, **options), num_gpus, apart)
        found, wanted = unit_walk(setup, units), of_known_shares(setup, units)
        for batch, length in ((2, 2), (3, 700), (64, 4096)):
            size = 1 if setup.sizes.batch_size == 1 else batch
            assert found.highest(size, length) == wanted.highest(size, length)
            assert found.saved_bytes(size, length) == wanted.saved_bytes(size, length)


def test_ranks_that_divide_without_a_rest_share_a_walk() -> None:
    _open_walk.cache_clear()
    for num_gpus in (2, 4, 8):
        unit_walk(*asked(cell("llama-3-8b", "full"), num_gpus, True))
    assert _open_walk.cache_info().misses == 1


def test_the_embeddings_gradient_stands_until_its_shard_is_made() -> None:
    """``foreach_reduce`` has the last gradient of a unit in a variable (tests/oracles has such a rank)."""
    spec = cell("tinyllama-1.1b", "full", num_layers=2, dtype="fp32", autocast="bf16", batch_size=1, seq_len=64)
    found = {(one.phase, one.label): one for one in rank_moments(spec, 2, "fsdp", all_buffers=False)}
    embedding, layer, norm = 32_000 * 2048, 2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 5632 + 2 * 2048, 2048
    whole = embedding * 2  # in bf16
    shards = 4 * (2 * embedding + 2 * layer + norm) // 2
    assert found["backward", "embedding"].terms["gradients"] == whole + whole // 2 + shards
