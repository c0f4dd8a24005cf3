"""The table of optimizers, against the names that transformers has."""

import pytest
from transformers.training_args import OptimizerNames

from vramprobe.architecture import architecture
from vramprobe.bounds.states import allocated_state_bytes
from vramprobe.bounds.tensors import tensors
from vramprobe.optimizers import OPTIMIZER_NAMES, OPTIMIZERS
from vramprobe.resolve import resolve


def test_names_are_transformers_own() -> None:
    """But for AdamW of bitsandbytes with 32 bits, which it has no name for, and an older name of the paged one."""
    known = {name.value for name in OptimizerNames}
    assert set(OPTIMIZER_NAMES) - known == {"adamw_bnb_32bit", "paged_adamw"}


@pytest.mark.parametrize(("name", "copies"), [("adamw_bnb_32bit", [1, 1]), ("lion_32bit", [1]), ("ademamix", [2, 1])])
def test_state_tensors_of_bitsandbytes(name: str, copies: list[int]) -> None:
    """In fp32; AdEMAMix has its fast and its slow moment in one tensor (``_get_state_double_buffer``)."""
    spec = resolve(model="smollm2-135m", method="full", device="cuda", optim=name, batch_size=1, seq_len=8)
    weight = tensors(spec, architecture(spec.architecture))[0]
    assert OPTIMIZERS[name].needs_bitsandbytes
    assert allocated_state_bytes(spec, [weight]) == 4 * weight.numel * sum(copies)
