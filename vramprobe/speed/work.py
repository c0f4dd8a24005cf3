"""Work: what one GPU computes in a micro-step and in an optimizer step, by arithmetic on the architecture's shapes.

In: a CellSpec (the batch of one GPU). Out: Work: matrix products one by one, attention's operations, bytes that the
other kernels read and write, weights that are dequantised or cast, kernels that are launched. Never sees a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vramprobe.architecture import Architecture, architecture
from vramprobe.optimizers import OPTIMIZERS
from vramprobe.spec import CellSpec
from vramprobe.terms.cell.parameters import Tensor, lora_targets, tensors
from vramprobe.trainers import TRAINERS

#: Bytes that eager kernels read and write per element, forward; the backward does twice as much. An RMS norm of
#: transformers is six kernels through fp32: 2→4, 4→4, 4→, 4→4, 4→2, 2→2. A layer norm is one kernel of torch's.
_RMS_NORM_BYTES, _FUSED_NORM_BYTES = 36, 4
#: x·cos + rotate(x)·sin: a negation and a concatenation of halves, two products, a sum.
_ROTARY_BYTES, _FUSED_ROTARY_BYTES = 20, 4
#: silu, then a product: 2→2, 2+2→2. Fused: one kernel. An MLP without a gate has its one activation.
_GATED_BYTES, _FUSED_GATED_BYTES, _ACTIVATION_BYTES = 10, 6, 4
_RESIDUAL_BYTES = 6
#: Per logit, forward and backward together: to fp32, log-softmax, its gradient, back to 16 bit. Fused: read, written
#: once each way.
_LOSS_BYTES, _FUSED_LOSS_BYTES = 32, 8
#: Per element: a scale, a sum into the base's output; the input is read for the product.
_ADAPTER_OUT_BYTES = 10
#: Kernels of a layer, forward, beside its products; an adapter's and a packed weight's are counted with them.
_EAGER_KERNELS, _FUSED_KERNELS = 34, 10
_ADAPTER_KERNELS, _PACKED_KERNELS, _CAST_KERNELS = 5, 2, 1
_BACKWARD = 2.0  # of elementwise bytes, over the forward's
#: FlashAttention-2's backward recomputes the scores: five products for the forward's two.
_ATTENTION_BACKWARD = 2.5


class Product(NamedTuple):
    """Matrix products of one shape: operations and bytes of one, and how many times a micro-step does it."""

    flops: float
    num_bytes: float
    count: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one GPU does. Of a micro-step, but for ``optimizer_bytes``, which an optimizer step moves."""

    num_tokens: int
    products: tuple[Product, ...]
    attention_flops: float
    attention_bytes: float
    stream_bytes: float  # norms, rotations, activations, residuals, loss, adapters' sums
    dequantised_bytes: float  # read packed and written in 16 bit
    cast_bytes: float  # of weights, to autocast's dtype
    num_kernels: float
    optimizer_bytes: float
    gathered_bytes: float  # all weights as they are sent, for sharding
    gradient_bytes: float  # all gradients
    num_layers: int
    model_flops: float  # of forward and backward without recomputation: what MFU counts

    @property
    def product_flops(self) -> float:
        """Operations of all matrix products, recomputation included."""
        return sum(product.flops * product.count for product in self.products)


def work_of(spec: CellSpec, *, fused: bool | None = None) -> Work:
    """The work of a cell's step on one GPU; ``fused``: norms, rotations, activations and loss in few kernels, as
    torch.compile makes them (None: as the cell says). Raises UnsupportedArchitecture without arithmetic for the model.
    """
    return _count(spec, spec.torch_compile if fused is None else fused)


def _count(spec: CellSpec, fused: bool) -> Work:
    arch = architecture(spec.architecture)
    stored = tensors(spec, arch)
    tokens, length = spec.num_tokens, spec.seq_len
    again = _further_forwards(spec)
    targets = lora_targets(spec, arch)
    full = spec.method == "full"
    dense = 2 if spec.autocast != "none" or spec.dtype != "fp32" else 4  # bytes of what is multiplied
    wide = 4 if spec.dtype == "fp32" or spec.kbit_prep != "none" else 2  # of the residual stream

    products: list[Product] = []
    adapter_stream, adapter_kernels = 0.0, 0.0
    copies_of_products = 0.0
    for linear in arch.linears:
        share = _share_of_tokens(arch, linear.name)
        rows = tokens * share
        size = float(linear.num_in * linear.num_out)
        moved = dense * (rows * (linear.num_in + linear.num_out) + size)
        uses = 1 + again + 1 + (1 if full else 0)
        products.append(Product(2 * rows * size, moved, uses * linear.num_copies))
        copies_of_products += linear.num_copies
        if linear.name in targets:
            rank = spec.lora_r or 1
            width = 4 if spec.lora_dtype == "fp32" and spec.autocast == "none" else 2
            for one in (linear.num_in, linear.num_out):
                products.append(
                    Product(
                        2 * rows * one * rank,
                        width * (rows * (one + rank) + one * rank),
                        (3 + again) * linear.num_copies,
                    )
                )
            elements = rows * (_ADAPTER_OUT_BYTES * linear.num_out + (6 * linear.num_in if width == 4 else 0))
            if spec.lora_dropout:
                elements += 5 * rows * linear.num_in
            adapter_stream += elements * linear.num_copies
            adapter_kernels += _ADAPTER_KERNELS * linear.num_copies
    for stack in (p for p in arch.parameters if p.role == "experts"):
        share = (arch.experts.per_token / arch.experts.num) if arch.experts else 1.0
        rows = tokens * share
        moved = dense * (rows * sum(stack.shape[-2:]) * stack.shape[0] + stack.numel)
        uses = 2 + again + (1 if full else 0)
        products.append(Product(2 * rows * stack.numel, moved, uses * arch.num_copies(stack)))
    head = float(arch.vocab_size * arch.head_width)
    head_bytes = dense * (tokens * (arch.vocab_size + arch.head_width) + head)
    head_uses = 2 + (1 if full else 0) + (1 if spec.uses_trl else 0)  # whose tiles are made again in backward
    head_uses += 1 if TRAINERS[spec.trainer].has_reference else 0
    products.append(Product(2 * tokens * head, head_bytes, head_uses))

    attention = sum(_attention_flops(arch, spec.num_rows, length, layer) for layer in range(arch.num_layers))
    queries = arch.num_heads * arch.head_size
    keys = arch.num_kv_heads * arch.head_size
    attention_bytes = 2.0 * tokens * (2 * queries + 2 * keys) * arch.num_layers * (1 + again + _BACKWARD)
    if spec.attn == "eager":  # scores, mask, softmax in fp32, cast, product
        attention_bytes += 20.0 * spec.num_rows * arch.num_heads * length * length * arch.num_layers * (1 + again + 2)

    layer_bytes, layer_kernels = _elementwise(arch, tokens, wide, fused)
    passes = 1 + again + _BACKWARD
    fused_loss = fused or spec.fused_linear_cross_entropy or spec.uses_trl
    loss = (_FUSED_LOSS_BYTES if fused_loss else _LOSS_BYTES) * float(tokens) * arch.vocab_size
    stream = layer_bytes * arch.num_layers * passes + loss + adapter_stream * passes
    stream += 4.0 * tokens * arch.head_width * wide / 2

    quantised = sum(float(t.numel) * t.num_copies for t in stored if t.quantised)
    frozen_wide = sum(
        float(t.numel) * t.num_copies
        for t in stored
        if not t.quantised
        and t.role != "adapter"
        and t.dtype == "fp32"
        and spec.autocast != "none"
        and len(t.shape) > 1
        and t.role != "embedding"
    )
    per_layer = layer_kernels * arch.num_layers + copies_of_products + adapter_kernels
    per_layer += (_PACKED_KERNELS * copies_of_products) if spec.quant != "none" else 0
    per_layer += (_CAST_KERNELS * copies_of_products) if spec.autocast != "none" and not fused else 0
    trained = [t for t in stored if t.trained]
    model_flops = sum(_of_one_forward(p, spec, full) for p in products[:-1])
    return Work(
        num_tokens=tokens,
        products=tuple(products),
        attention_flops=attention * (1 + again + _ATTENTION_BACKWARD),
        attention_bytes=attention_bytes,
        stream_bytes=stream,
        dequantised_bytes=2.5 * quantised * (2 + again),
        cast_bytes=6.0 * frozen_wide * (1 + again),
        num_kernels=per_layer * (2 + again) + 40,
        optimizer_bytes=_optimizer_bytes(spec, trained),
        gathered_bytes=_gathered_bytes(spec, stored),
        gradient_bytes=float(sum(t.numel * t.num_copies * _gradient_width(spec, t) for t in trained)),
        num_layers=arch.num_layers,
        model_flops=model_flops + 2 * tokens * head * head_uses + attention * (1 + _ATTENTION_BACKWARD),
    )


def _of_one_forward(product: Product, spec: CellSpec, full: bool) -> float:
    again = _further_forwards(spec)
    return product.flops * (product.count / _uses(product, again, full)) * (_uses(product, again, full) - again)


def _further_forwards(spec: CellSpec) -> int:
    """Forwards of the layers beside the first: recomputed ones, and a reference model's."""
    return (1 if spec.gradient_checkpointing else 0) + (1 if TRAINERS[spec.trainer].has_reference else 0)


def _uses(product: Product, again: int, full: bool) -> int:
    return 2 + again + (1 if full else 0)


def _share_of_tokens(arch: Architecture, name: str) -> float:
    """Of a linear layer that is one of several experts, the share of tokens that comes to it."""
    if arch.experts is None or ".experts." not in name:
        return 1.0
    return arch.experts.per_token / arch.experts.num


def _attention_flops(arch: Architecture, batch: int, length: int, layer: int) -> float:
    """Two products over the scores below the diagonal, or those within the window."""
    window = arch.sliding_window if arch.sliding_window and arch.slides(layer) else length
    reach = min(window, length)
    scores = length * reach - reach * (reach - 1) / 2  # pairs of a query and a key before it, itself too
    width = arch.head_size + (arch.value_size or arch.head_size)
    return 2.0 * batch * arch.num_heads * width * scores


def _elementwise(arch: Architecture, tokens: int, wide: int, fused: bool) -> tuple[float, float]:
    """(bytes, kernels) of a layer's forward beside its products and attention."""
    hidden = arch.head_width
    queries, keys = arch.num_heads * arch.head_size, arch.num_kv_heads * arch.head_size
    is_rms = arch.model_type not in ("gpt2", "gpt_neox", "opt", "bloom", "falcon")
    norms = sum(p.role == "norm" and p.per_layer and p.name.endswith("weight") for p in arch.parameters)
    norm_bytes = _RMS_NORM_BYTES if is_rms and not fused else _FUSED_NORM_BYTES
    moved = norms * norm_bytes * hidden + 2 * _RESIDUAL_BYTES * hidden
    if arch.rotary_size:
        moved += (_FUSED_ROTARY_BYTES if fused else _ROTARY_BYTES) * (queries + keys)
    per_token = arch.experts.per_token if arch.experts else 1
    inner = arch.experts.width if arch.experts else _mlp_width(arch)
    gated = is_rms
    one = (_FUSED_GATED_BYTES if fused else _GATED_BYTES) if gated else _ACTIVATION_BYTES
    moved += one * inner * per_token
    return float(tokens) * moved * wide / 2, _FUSED_KERNELS if fused else _EAGER_KERNELS if is_rms else 16


def _mlp_width(arch: Architecture) -> int:
    """What the last linear layer of the MLP takes."""
    ends = ("down_proj", "dense_4h_to_h", "fc2", "mlp.c_proj")
    return next((linear.num_in for linear in arch.linears if linear.name.endswith(ends)), 4 * arch.head_width)


def _gradient_width(spec: CellSpec, tensor: Tensor) -> int:
    if tensor.dtype == "fp32" and (spec.autocast == "none" or spec.method != "full"):
        return 4
    return 2


def _gathered_bytes(spec: CellSpec, stored: tuple[Tensor, ...]) -> float:
    total = 0.0
    for tensor in stored:
        width = 0.5 if tensor.quantised else 2 if spec.autocast != "none" or tensor.dtype != "fp32" else 4
        total += tensor.numel * tensor.num_copies * width
    return total


def _optimizer_bytes(spec: CellSpec, trained: list[Tensor]) -> float:
    """Weight, gradient and state read, weight and state written; the gradient's norm is read once more, scaled and
    set to zero. torch's foreach is more passes than one fused kernel."""
    total, row = 0.0, OPTIMIZERS[spec.optim]
    for tensor in trained:
        width = 4 if tensor.dtype == "fp32" else 2
        state = 1 if row.state == "8bit" else 4 if row.state == "fp32" else width
        moved = 2 * width + 4 * width + 2 * 2 * state + row.foreach_passes * width
        total += float(tensor.numel) * tensor.num_copies * moved
    return total
