"""The table of every architecture that ships: whole and fresh."""

from types import ModuleType

import pytest
from scripts import script

from vramprobe import catalog


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return script("truth.catalog")


def test_every_architecture_ran(benchmark) -> None:
    assert {row["outcome"] for row in benchmark.read_rows()} == {"ok"}


@pytest.mark.parametrize(
    ("slug", "depth"),
    [
        ("llama-3.1-8b", 2),
        ("qwen3.5-27b", 4),
        ("qwen3-next-80b-a3b", 4),
        ("deepseek-v3", 4),
        ("nemotron-h-56b", 8),
        ("granite-4.0-h-tiny", 6),
        ("gpt-oss-120b", 2),
    ],
)
def test_a_cut_has_a_layer_of_each_kind(benchmark, slug: str, depth: int) -> None:
    assert benchmark.depth_of_each_kind(catalog.find_model(slug).config) == depth
