"""Other versions of transformers than the one that the arithmetic reads like: a cell under them, and what to know then.

In: a spec; a release's name. Out: the spec as that release builds it, bytes, and lines for whoever asks. Runs under
older versions are in benchmarks/versions/versions.md.
"""

from __future__ import annotations

from vramprobe.architecture import architecture
from vramprobe.architecture.releases import FIFTH, QUANTISER_KEY, READ, RELEASE_KEY, release_of
from vramprobe.catalog.libraries import pinned_libraries
from vramprobe.spec import CellSpec
from vramprobe.terms.cell.parameters import quantised_bytes, tensors
from vramprobe.terms.step.moments import moments
from vramprobe.units import format_bytes

#: Numbers of experts that shares of tokens are counted for, tokens being left open in bits (sizes.py).
_POWERS_OF_TWO = (2, 4, 8, 16, 32, 64, 128, 256)
#: What a quantised mixture is predicted with to say what the other half of its users see.
_FOURTH, _FIFTH = "4.57", "5.23"


def under(spec: CellSpec, versions: dict[str, str]) -> CellSpec:
    """The cell under these versions: package → version, of transformers and bitsandbytes."""
    keys = {"transformers": RELEASE_KEY, "bitsandbytes": QUANTISER_KEY}
    named = {keys[package]: version for package, version in versions.items()}
    return spec.model_copy(update={"architecture": spec.architecture | named})


def is_fourth(spec: CellSpec) -> bool:
    """Whether the cell is one of a release before 5."""
    version = spec.architecture.get(RELEASE_KEY)
    return version is not None and release_of(version) < FIFTH


def libraries_of(spec: CellSpec) -> dict[str, str]:
    """Package → version: what a number of this cell holds for."""
    found, version = dict(pinned_libraries()), spec.architecture.get(RELEASE_KEY)
    if version is not None:
        found = {"transformers": version, "bitsandbytes": found["bitsandbytes"]}
    quantiser = spec.architecture.get(QUANTISER_KEY)
    return found if quantiser is None else found | {"bitsandbytes": quantiser}


def taken_notes(spec: CellSpec) -> list[str]:
    """What is said of a cell under another release of transformers 5."""
    version = spec.architecture.get(RELEASE_KEY)
    if version is None or is_fourth(spec):
        return []
    return [
        f"transformers {version} is taken for {pinned_libraries()['transformers']}: emulated runs of a Qwen 2.5 and a "
        "Llama 3 under 5.2, 5.12 and 5.23 were the same within 0.1 %; other families were not run "
        "(benchmarks/versions/versions.md)"
    ]


def version_notes(spec: CellSpec) -> list[str]:
    """What is said of a cell that takes another size under transformers 4, or 5; empty for most. Raises
    UnsupportedArchitecture where nothing is counted."""
    if is_fourth(spec):
        found = _beside_older_libraries(spec)
        if spec.quant != "none" and architecture(spec.architecture).experts is not None:
            found.append(
                "so under transformers 4, whose experts are linear layers, which are quantized; transformers 5 leaves "
                f"them in 16 bit or raises them to 32: {_peak_under(spec, _FIFTH)} there (--stack transformers-5)"
            )
        return found
    less = less_as_linears_bytes(spec)
    if not less:
        return []
    said = "so under transformers 5; transformers 4 has these experts as linear layers, which are quantized: "
    if spec.model_type in READ and not why_not_fourth(spec):
        return [said + f"{_peak_under(spec, _FOURTH)} there (--stack transformers-{_FOURTH})"]
    return [said + f"{format_bytes(less)} less of weights there (docs/versions.md)"]


def why_not_fourth(spec: CellSpec) -> list[str]:
    """What of a cell there is no arithmetic for under transformers 4, where what is otherwise was not read."""
    arch = architecture(spec.architecture)
    window = arch.sliding_window
    reasons = [
        (spec.device != "cuda", f"device {spec.device}"),
        (spec.attn == "eager", "attn eager"),
        (spec.fused_linear_cross_entropy, "fused_linear_cross_entropy"),
        (spec.other_head != "", spec.other_head),
        (spec.dora, "dora"),
        (spec.quant == "int8", "quant int8"),
        (spec.num_gpus > 1, f"num_gpus {spec.num_gpus}"),
        (
            spec.attn == "sdpa" and window is not None and spec.seq_len >= window,  # flash attention needs no mask
            f"seq_len {spec.seq_len:,} beyond the sliding window under attn sdpa",
        ),
    ]
    experts = arch.experts
    if experts is not None:
        per_token = experts.per_token * (spec.lora_r or experts.num)
        is_even = per_token % experts.num == 0 and experts.num in _POWERS_OF_TWO
        said = f"{experts.num} experts with {experts.per_token} to a token and lora_r {spec.lora_r}"
        reasons.append((not is_even, said))
    return [words for broken, words in reasons if broken]


def _peak_under(spec: CellSpec, version: str) -> str:
    """The highest moment, by arithmetic."""
    found = moments(under(spec, {"transformers": version}))
    return f"about {format_bytes(max(moment.total_bytes for moment in found))}"


def _beside_older_libraries(spec: CellSpec) -> list[str]:
    """What the libraries of that time do otherwise that is no doing of transformers."""
    found = []
    if spec.quant != "none" and spec.architecture.get(QUANTISER_KEY) is None:
        found.append(
            "with today's bitsandbytes; before 0.47 its 4-bit layers computed in their input's dtype, and 0.43.1 kept "
            "the inputs: name it, too (--stack transformers-4.48,bitsandbytes-0.45)"
        )
    if spec.quant == "none" and spec.lora_dtype == "fp32" and spec.dtype != "fp32":
        found.append("with adapters in fp32, as peft makes them from 0.12 on; before, give --lora-dtype bf16")
    return found


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
