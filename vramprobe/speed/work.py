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
_LAST_OF_MLP = ("down_proj", "dense_4h_to_h", "fc2", "mlp.c_proj")
#: Per logit, forward and backward together: to fp32, log-softmax, its gradient, back to 16 bit. Fused: read, written
#: once each way.
_LOSS_BYTES, _FUSED_LOSS_BYTES = 32, 8
#: Per element: a scale, a sum into the base's output; the input is read for the product.
_ADAPTER_OUT_BYTES = 10
#: Kernels of a layer, forward, beside its products; an adapter's and a packed weight's are counted with them.
_EAGER_KERNELS, _FUSED_KERNELS = 34, 10
_ADAPTER_KERNELS, _PACKED_KERNELS, _CAST_KERNELS = 5, 2, 1
_BACKWARD = 2.0  # of elementwise bytes and of kernels, over the forward's
#: FlashAttention-2's backward recomputes the scores: five products for the forward's two.
_ATTENTION_BACKWARD = 2.5


class Product(NamedTuple):
    """Matrix products of [m, k] by [k, n]: bytes of an element, how many there are, and how often each is repeated."""

    m: float
    n: float
    k: float
    width: int
    copies: float
    repeats: int = 0

    @property
    def count(self) -> float:
        """How many times a micro-step does it."""
        return self.copies * (1 + self.repeats)

    @property
    def flops(self) -> float:
        """Operations of one."""
        return 2 * self.m * self.n * self.k

    @property
    def num_bytes(self) -> float:
        """What one reads and writes."""
        return self.width * (self.m * self.n + self.m * self.k + self.n * self.k)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one GPU does. Of a micro-step, but for ``optimizer_bytes``, which an optimizer step moves."""

    num_tokens: int
    products: tuple[Product, ...]
    attention_flops: float  # forward, with what checkpointing repeats
    attention_backward_flops: float
    attention_bytes: float
    length: int  # keys of a sequence
    head_size: int
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


def work_of(spec: CellSpec, *, fused: bool | None = None, is_reentrant: bool = False) -> Work:
    """The work of a cell's step on one GPU; ``fused``: norms, rotations, activations and loss in few kernels, as
    torch.compile makes them (None: as the cell says); ``is_reentrant``: checkpoints repeat a layer whole, as older
    transformers' do. Raises UnsupportedArchitecture without arithmetic for the model.
    """
    return _count(spec, spec.torch_compile if fused is None else fused, is_reentrant)


def _count(spec: CellSpec, fused: bool, is_reentrant: bool) -> Work:
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
        rows = tokens * _share_of_tokens(arch, linear.name)
        copies, is_adapted = linear.num_copies, linear.name in targets
        # torch's checkpoint stops once it has all that backward wants: not what the last layer of an MLP gives
        stops = linear.name.endswith(_LAST_OF_MLP) and not is_adapted and not is_reentrant
        repeats = again - (1 if stops and spec.gradient_checkpointing else 0)
        products += _uses(rows, linear.num_out, linear.num_in, dense, copies, repeats, trains=full)
        copies_of_products += copies
        if is_adapted:
            rank = spec.lora_r or 1
            width = 4 if spec.lora_dtype == "fp32" and spec.autocast == "none" else 2
            products += _uses(rows, rank, linear.num_in, width, copies, again, trains=True)
            products += _uses(rows, linear.num_out, rank, width, copies, again, trains=True)
            elements = rows * (_ADAPTER_OUT_BYTES * linear.num_out + (6 * linear.num_in if width == 4 else 0))
            if spec.lora_dropout:
                elements += 5 * rows * linear.num_in
            adapter_stream += elements * copies
            adapter_kernels += _ADAPTER_KERNELS * copies
    for stack in (p for p in arch.parameters if p.role == "experts"):
        share = (arch.experts.per_token / arch.experts.num) if arch.experts else 1.0
        num_in, num_out = stack.shape[-2:]
        copies = arch.num_copies(stack) * stack.numel / (num_in * num_out)
        products += _uses(tokens * share, num_out, num_in, dense, copies, again, trains=full)
    head_repeats = 1 if spec.fuses_head else 0  # whose tiles are made again in backward
    head_repeats += TRAINERS[spec.trainer].num_forwards - 1
    products += _uses(tokens, arch.num_outputs, arch.head_width, dense, 1, head_repeats, trains=full)
    model_flops = sum(product.flops * product.copies for product in products)

    attention = sum(_attention_flops(arch, spec.num_rows, length, layer) for layer in range(arch.num_layers))
    queries = arch.num_heads * arch.head_size
    keys = arch.num_kv_heads * arch.head_size
    attention_bytes = 2.0 * tokens * (2 * queries + 2 * keys) * arch.num_layers * (1 + again + _BACKWARD)
    if spec.attn == "eager":  # scores, mask, softmax in fp32, cast, product
        attention_bytes += 20.0 * spec.num_rows * arch.num_heads * length * length * arch.num_layers * (1 + again + 2)

    layer_bytes, layer_kernels = _elementwise(arch, tokens, wide, fused)
    passes = 1 + again + _BACKWARD
    fused_loss = fused or spec.fused_linear_cross_entropy or spec.fuses_head
    loss = (_FUSED_LOSS_BYTES if fused_loss else _LOSS_BYTES) * float(tokens) * arch.num_outputs
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
    return Work(
        num_tokens=tokens,
        products=tuple(products),
        attention_flops=attention * (1 + again),
        attention_backward_flops=attention * _ATTENTION_BACKWARD,
        attention_bytes=attention_bytes,
        length=length,
        head_size=arch.head_size,
        stream_bytes=stream,
        dequantised_bytes=2.5 * quantised * (2 + again),
        cast_bytes=6.0 * frozen_wide * (1 + again),
        num_kernels=per_layer * (1 + again + _BACKWARD) + 40,
        optimizer_bytes=_optimizer_bytes(spec, trained),
        gathered_bytes=_gathered_bytes(spec, stored),
        gradient_bytes=float(sum(t.numel * t.num_copies * _gradient_width(spec, t) for t in trained)),
        num_layers=arch.num_layers,
        model_flops=model_flops + attention * (1 + _ATTENTION_BACKWARD),
    )


def _further_forwards(spec: CellSpec) -> int:
    """Forwards of the layers beside the first: recomputed ones, and those without a graph."""
    return (1 if spec.gradient_checkpointing else 0) + TRAINERS[spec.trainer].num_forwards - 1


def _uses(
    rows: float, num_out: float, num_in: float, width: int, copies: float, repeats: int, *, trains: bool
) -> list[Product]:
    """Of so many linear layers: forward, the gradient of their input, and that of their weight where it trains."""
    found = [
        Product(rows, num_out, num_in, width, copies, repeats),
        Product(rows, num_in, num_out, width, copies),
    ]
    return [*found, Product(num_out, num_in, rows, width, copies)] if trains else found


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
    return next((linear.num_in for linear in arch.linears if linear.name.endswith(_LAST_OF_MLP)), 4 * arch.head_width)


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
