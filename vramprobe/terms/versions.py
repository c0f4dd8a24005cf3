"""What other versions of the libraries hold otherwise than those that the arithmetic reads like.

In: a spec. Out: bytes, and a line for whoever asks. Runs under older versions are in benchmarks/versions.md.
"""

from __future__ import annotations

from vramprobe.architecture import architecture
from vramprobe.spec import CellSpec
from vramprobe.terms.parameters import quantised_bytes, tensors
from vramprobe.units import format_bytes


def version_notes(spec: CellSpec) -> list[str]:
    """What is said of a cell that takes another size under transformers 4; empty for most. Raises
    UnsupportedArchitecture where nothing is counted."""
    less = less_as_linears_bytes(spec)
    if not less:
        return []
    return [
        "so under transformers 5; transformers 4 has these experts as linear layers, which are quantised: "
        f"{format_bytes(less)} less of weights there (docs/versions.md)"
    ]


def less_as_linears_bytes(spec: CellSpec) -> int:
    """What a quantised mixture's weights would take less were its experts and routers transformers 4's linear layers.

    0 where nothing is quantised, and where experts were one tensor then, too (gpt-oss).
    """
    arch = architecture(spec.architecture)
    if spec.quant == "none" or not arch.wrapped:
        return 0
    by_name = {tensor.name: tensor for tensor in tensors(spec, arch)}
    less = 0
    for wrapped in arch.wrapped:
        whole = by_name[wrapped.name]
        shape = wrapped.num_out // len(wrapped.targets), wrapped.num_in
        linear = whole._replace(shape=shape, quantised=True)
        num_linears = wrapped.num_experts * len(wrapped.targets)
        less += whole.num_copies * (whole.num_bytes - num_linears * quantised_bytes(linear, spec.quant))
    return less
