"""Every tensor of a prepared model: its dtype, whether it is trained, how it is quantised, and its bytes.

In: a spec and its Architecture. Out: frozen Tensors, base parameters and adapters alike, and sums over them. The rules
are those of peft (``prepare_model_for_kbit_training``), trl (``peft_module_casting_to_bf16``) and bitsandbytes
(``Params4bit``, ``Int8Params``). Never imports torch or the workload.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from vramprobe.architecture import (
    SCORE,
    Architecture,
    Parameter,
    RunFails,
    UnsupportedArchitecture,
    Wrapped,
    architecture,
)
from vramprobe.errors import SpecError
from vramprobe.rules.cell import lora_target_names
from vramprobe.spec import CellSpec
from vramprobe.units import ITEMSIZE_BYTES

NF4_BLOCK = 64  # elements per absmax; bitsandbytes' default for 4 bit
DOUBLE_QUANTISED = ("nf4",)  # the cells whose absmax is quantised again
NESTED_BLOCK = 256  # absmax values per second-level block
CODE_4BIT_BYTES = 16 * 4  # one fp32 code book per tensor
CODE_8BIT_BYTES = 256 * 4  # the second-level code book
_BEHIND_A_PRODUCT = ("o_proj", "out_proj", "dense", "c_proj", "down_proj", "dense_4h_to_h", "fc2")
#: What peft calls the copy of a module that it trains beside adapters.
TRAINED_COPY = "modules_to_save"
#: The linear layer with a result that no adapter can be added to.
_ROUTER = "feed_forward.router"
_TRL_BF16_NAMES = ("lm_head", "embed_tokens", "wte", "wpe")


class Tensor(NamedTuple):
    """One parameter of the prepared model; ``num_copies`` counts the layers that have it."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # of its elements; for a quantised weight the dtype it is dequantised to
    trained: bool
    quantised: bool
    role: str  # of the base parameter, or "adapter"
    per_layer: bool
    num_copies: int

    @property
    def numel(self) -> int:
        """Number of elements of one copy."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of one copy as plain elements."""
        return self.numel * ITEMSIZE_BYTES[self.dtype]


def tensors(spec: CellSpec, arch: Architecture) -> tuple[Tensor, ...]:
    """All parameters after preparation, adapters last.

    Raises SpecError where a LoRA target names no linear layer.
    """
    full = spec.method == "full"
    base = []
    for p in arch.parameters:
        quantised = spec.quant != "none" and p.role == "linear" and not arch.own_linears
        # bitsandbytes stores out × in; GPT-2's Conv1D is turned round when it is quantised.
        shape = p.shape[::-1] if quantised and arch.model_type == "gpt2" else p.shape
        dtype = spec.dtype if full else _base_dtype(spec, p, own_linear=arch.own_linears)
        if arch.model_type == "gpt_oss" and spec.dtype == "fp16" and p.role == "norm":
            dtype = "fp32"  # transformers loads them so (_keep_in_fp32_modules)
        trained = full and not (spec.freeze_vision and _is_vision(p.name))
        base.append(Tensor(p.name, shape, dtype, trained, quantised, p.role, p.per_layer, arch.num_copies(p)))
    return tuple(base if full else base + _adapters(spec, arch))


def _is_vision(name: str) -> bool:
    """Return True if a parameter is a vision tower's or its projector's."""
    return name.startswith("visual.")


def _base_dtype(spec: CellSpec, parameter: Parameter, *, own_linear: bool) -> str:
    name, role = parameter.name, parameter.role
    is_quantised = spec.quant != "none" and not own_linear  # its linear layers
    if role == "linear" and is_quantised:
        return spec.dtype  # the compute dtype
    if role == "bias" and is_quantised:
        # bitsandbytes casts a layer's bias for good in the first forward: Linear4bit to its compute dtype, Linear8bitLt
        # to its input's, which under autocast is 16 bit behind another product.
        if spec.quant != "int8":
            return spec.dtype
        if spec.autocast != "none" and parameter.module in _BEHIND_A_PRODUCT:
            return spec.autocast
    match spec.kbit_prep:
        case "peft":
            return "fp32"
        case "trl" if role == "norm":
            return "fp32"
        case "trl" if any(part in name for part in _TRL_BF16_NAMES):
            return "bf16" if spec.dtype == "fp32" else spec.dtype
    return spec.dtype


def lora_targets(spec: CellSpec, arch: Architecture) -> frozenset[str]:
    """Name patterns of the linear layers and other weights that get an adapter.

    Raises SpecError where a target matches none, or not all of what peft needs for one (Wrapped), and RunFails for
    those that peft cannot train.
    """
    if spec.method == "full":
        return frozenset()
    wanted = lora_target_names(spec)
    if arch.model_type == "llama4_text" and (wanted is None or any(_matches(_ROUTER, name) for name in wanted)):
        targets = "all-linear" if wanted is None else ", ".join(wanted)
        raise RunFails(
            f"lora_targets {targets}: peft takes Llama 4's router for a linear layer, and its adapter fails "
            "on the two results of it; name the targets, such as q_proj,k_proj,v_proj,o_proj"
        )
    claimed = {target for wrapped in arch.wrapped for target in wrapped.targets}
    # peft takes these names for the experts' parameters, and leaves linear layers that are called so (a dense layer's,
    # the shared experts') alone.
    linears = [linear for linear in arch.linears if linear.name.rpartition(".")[2] not in claimed]
    if wanted is None:
        return frozenset(x.name for x in (*linears, *arch.wrapped))
    chosen = {
        name: [x.name for x in linears if _matches(x.name, name)]
        + [x.name for x in arch.wrapped if any(_matches(target, name.rpartition(".")[2]) for target in x.targets)]
        for name in wanted
    }
    if missing := [name for name, found in chosen.items() if not found]:
        known = sorted({x.name.rpartition(".")[2] for x in linears} | claimed)
        raise SpecError(f"lora_targets {', '.join(missing)}: no such linear layer; this model has {', '.join(known)}")
    for wrapped in arch.wrapped:
        given = [target for target in wrapped.targets if any(name.rpartition(".")[2] == target for name in wanted)]
        if given and len(given) < len(wrapped.targets):
            raise SpecError(
                f"lora_targets {', '.join(given)}: peft reaches the experts' {wrapped.name.rpartition('.')[2]} by "
                f"{' and '.join(wrapped.targets)} together; give all of them"
            )
    return frozenset(pattern for found in chosen.values() for pattern in found)


def require_adapters(spec: CellSpec) -> None:
    """Raise SpecError or RunFails for adapters that peft cannot make or train, where the model's parameters are
    counted.
    """
    try:
        arch = architecture(spec.architecture)
    except UnsupportedArchitecture:
        return
    tensors(spec, arch)


def _matches(name: str, target: str) -> bool:
    """peft's rule for a list of targets: the module's whole name, or its end after a dot."""
    return name == target or name.endswith(f".{target}")


def _adapters(spec: CellSpec, arch: Architecture) -> list[Tensor]:
    rank, dtype, targets = spec.lora_r or 0, spec.lora_dtype or "fp32", lora_targets(spec, arch)
    copies = {parameter.name: arch.num_copies(parameter) for parameter in arch.parameters}
    made = []
    for linear in arch.linears:
        if linear.name in targets and not (spec.freeze_vision and _is_vision(linear.name)):
            shapes = {"lora_A": (rank, linear.num_in), "lora_B": (linear.num_out, rank)}
            if spec.dora:
                shapes["lora_magnitude_vector"] = (linear.num_out,)
            made += [
                Tensor(
                    f"{linear.name}.{part}", shape, dtype, True, False, "adapter", linear.per_layer, linear.num_copies
                )
                for part, shape in shapes.items()
            ]
    for wrapped in arch.wrapped:
        if wrapped.name in targets:
            made += _wrapped_adapters(spec, wrapped, rank, dtype, copies[wrapped.name])
    if arch.scores_rows:
        copy, shape = f"{SCORE}.{TRAINED_COPY}", (1, arch.head_width)
        kept = "fp32" if spec.kbit_prep == "peft" else spec.dtype
        made.append(Tensor(copy, shape, kept, True, False, "adapter", False, 1))
    return made


def _wrapped_adapters(spec: CellSpec, wrapped: Wrapped, rank: int, dtype: str, num_copies: int) -> list[Tensor]:
    """Return the adapters of a weight that is no linear layer's."""
    if spec.dora:
        raise SpecError(
            "dora: peft has no DoRA on the adapter of a weight that is no linear layer's, such as experts; "
            "leave dora off, or use lora_targets without them"
        )
    if spec.lora_dropout:
        raise SpecError(
            f"lora_dropout {spec.lora_dropout}: peft has no dropout on the adapter of a weight that is no linear "
            "layer's, such as experts; use lora_dropout 0, or lora_targets without them"
        )
    ranks = rank * wrapped.num_experts * len(wrapped.targets)
    shapes = {"lora_A": (ranks, wrapped.num_in), "lora_B": (wrapped.num_out, ranks)}
    return [
        Tensor(f"{wrapped.name}.{part}", shape, dtype, True, False, "adapter", True, num_copies)
        for part, shape in shapes.items()
    ]


def weights_bytes(tensors: Sequence[Tensor], quant: str) -> int:
    """Bytes of parameters with their quantisation state."""
    return sum((quantised_bytes(t, quant) if t.quantised else t.num_bytes) * t.num_copies for t in tensors)


def buffers_bytes(arch: Architecture, dtype: str) -> int:
    """Bytes of the model's buffers."""
    return sum(buffer_parts(arch, dtype))


def buffer_parts(arch: Architecture, dtype: str) -> list[int]:
    """The rotary embedding's ``inv_freq`` and ``original_inv_freq``, fp32, once for the model or for each kind of
    layer; the number that scales embeddings, in the dtype the model is made in.
    """
    frequencies = [4 * (arch.rotary_size // 2)] * (2 * arch.num_rotary_tables)
    return frequencies + ([ITEMSIZE_BYTES[dtype]] if arch.scales_embedding else [])


def quantised_bytes(tensor: Tensor, quant: str) -> int:
    """Bytes of one quantised weight with its state, as bitsandbytes stores it (``QuantState``, ``Int8Params``)."""
    return sum(quantised_parts(tensor, quant))


def quantised_parts(tensor: Tensor, quant: str) -> list[int]:
    """Bytes of a quantised weight and of each tensor of its state."""
    if quant == "int8":
        return [tensor.numel, 4 * tensor.shape[0]]  # SCB: fp32 per output row
    blocks = -(-tensor.numel // NF4_BLOCK)
    packed = [-(-tensor.numel // 2), CODE_4BIT_BYTES]
    if quant not in DOUBLE_QUANTISED:
        return [*packed, 4 * blocks]
    # Each block's absmax in 8 bits; absmax of the absmax, its code, the offset.
    return [*packed, blocks, 4 * -(-blocks // NESTED_BLOCK), CODE_8BIT_BYTES, 4]


def less_as_linears_bytes(spec: CellSpec, arch: Architecture) -> int:
    """Bytes that a quantised mixture's weights would take less, were its experts and routers linear layers, as
    transformers 4 has them; 0 where they were one tensor then, too (gpt-oss)."""
    by_name = {tensor.name: tensor for tensor in tensors(spec, arch)}
    less = 0
    for wrapped in arch.wrapped:
        whole = by_name[wrapped.name]
        shape = wrapped.num_out // len(wrapped.targets), wrapped.num_in
        linear = whole._replace(shape=shape, quantised=True)
        num_linears = wrapped.num_experts * len(wrapped.targets)
        less += whole.num_copies * (whole.num_bytes - num_linears * quantised_bytes(linear, spec.quant))
    return less
