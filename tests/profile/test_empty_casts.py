"""Weights that are cast on the host as they are loaded: empty ones take no memory, real ones are cast."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")


@pytest.fixture
def materialize():
    import torch

    from vramprobe.profile.empty import casts

    def plain(tensor, device=None, dtype=None):
        return tensor[...].to(device=device, dtype=dtype) + 1  # so that a test sees who has made it

    module = SimpleNamespace(_materialize_copy=plain)
    casts.serve(module)
    return torch, module._materialize_copy


LARGE = 9 << 20  # elements: 36 MiB as float32


def test_an_empty_weight_that_is_cast_is_fresh_memory(materialize) -> None:
    torch, cast = materialize
    made = cast(torch.zeros(LARGE, dtype=torch.bfloat16), dtype=torch.float32)
    assert (made.dtype, made.numel(), int(made.count_nonzero())) == (torch.float32, LARGE, 0)


@pytest.mark.parametrize("kind", ["real", "small", "as it is", "meta"])
def test_other_weights_are_loaded_as_ever(materialize, kind: str) -> None:
    torch, cast = materialize
    weight = torch.zeros(1024 if kind == "small" else LARGE, dtype=torch.bfloat16)
    if kind == "real":
        weight += 0.5
    device = "meta" if kind == "meta" else None
    made = cast(weight, device=device, dtype=torch.bfloat16 if kind == "as it is" else torch.float32)
    assert made.is_meta if kind == "meta" else float(made[0]) == (1.5 if kind == "real" else 1.0)


def test_an_older_loader_is_left_alone() -> None:
    from vramprobe.profile.empty import casts

    module = SimpleNamespace()
    casts.serve(module)
    assert vars(module) == {}
