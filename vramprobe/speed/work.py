"""Work: what one GPU computes in a micro-step and in an optimizer step, by arithmetic on the architecture's shapes.

In: a CellSpec (the batch of one GPU). Out: Work: matrix products one by one, attention's operations, bytes that the
other kernels read and write, weights that are dequantised or cast, kernels that are launched. Never sees a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vramprobe.architecture import Architecture, architecture
from vramprobe.bounds.tensors import Tensor, lora_targets, tensors
from vramprobe.optimizers import OPTIMIZERS
from vramprobe.spec import CellSpec
from vramprobe.speed.elementwise import (
    BESIDE_ATTENTION,
    FIRST_OF_LAYER,
    LAST_OF_ATTENTION,
    LAST_OF_MLP,
    Fusion,
    elementwise,
    loss_bytes,
)

#: Per element: a scale, a sum into the base's output; the input is read for the product.
_ADAPTER_OUT_BYTES = 10
#: Of a linear layer's input in fp32 that is multiplied in 16 bit: each layer casts it for itself.
_CAST_BYTES = 6
#: Kernels of an adapter, of a packed weight, of a weight that is cast.
_ADAPTER_KERNELS, _PACKED_KERNELS, _CAST_KERNELS = 5, 2, 1
_BACKWARD = 2.0  # of elementwise bytes and of kernels, over the forward's
#: FlashAttention-2's backward recomputes the scores: five products for the forward's two.
_ATTENTION_BACKWARD = 2.5
#: Of a packed weight, each time: read, and written in 16 bit.
PACKED_BYTES = 2.5
#: Per score in memory, forward, beside its two products: scaled, masked, softmax to fp32, cast.
_SCORE_BYTES = 20.0


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
        """Number of times that a micro-step does it."""
        return self.copies * (1 + self.repeats)

    @property
    def flops(self) -> float:
        """Operations of one."""
        return 2 * self.m * self.n * self.k

    @property
    def num_bytes(self) -> float:
        """Bytes that one product reads and writes."""
        return self.width * (self.m * self.n + self.m * self.k + self.n * self.k)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of one GPU in a micro-step, except ``optimizer_bytes``, which an optimizer step moves."""

    num_tokens: int
    products: tuple[Product, ...]
    attention_flops: float  # forward, with what checkpointing repeats; eager attention is among the products
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


def work_of(spec: CellSpec, *, fused: Fusion | None = None, is_reentrant: bool = False) -> Work:
    """The work of a cell's step on one GPU; ``fused``: None as the cell says; ``is_reentrant``: checkpoints repeat a
    layer whole, as older transformers' do. Of the language model and one forward with its loss alone: of what is
    recorded (rules/arithmetic.py) that may not be all. Raises UnsupportedArchitecture without arithmetic for the model.
    """
    return _count(spec, fused or ("all" if spec.torch_compile else "none"), is_reentrant)


def _count(spec: CellSpec, fused: Fusion, is_reentrant: bool) -> Work:
    arch = architecture(spec.architecture)
    stored = tensors(spec, arch)
    tokens, length = spec.num_tokens, spec.row_tokens
    again = 1 if spec.gradient_checkpointing else 0
    targets = lora_targets(spec, arch)
    full = spec.method == "full"
    dense = 2 if spec.autocast != "none" or spec.dtype != "fp32" else 4  # bytes of what is multiplied
    wide = 4 if spec.dtype == "fp32" or spec.kbit_prep != "none" else 2  # of the residual stream

    products: list[Product] = []
    linear_stream, adapter_kernels = 0.0, 0.0
    copies_of_products = 0.0
    has_norm_behind = any("post_feedforward_layernorm" in one.name for one in arch.parameters)
    takes_first = FIRST_OF_LAYER + (BESIDE_ATTENTION if arch.model_type in ("gpt_neox", "falcon") else ())
    for linear in arch.linears:
        rows = tokens * _share_of_tokens(arch, linear.name)
        copies, is_adapted = linear.num_copies, linear.name in targets
        # torch's checkpoint stops once it has all that backward wants: not what the last layer of an MLP gives
        stops = linear.name.endswith(LAST_OF_MLP) and not (is_adapted or is_reentrant or has_norm_behind)
        repeats = again - (1 if stops and spec.gradient_checkpointing else 0)
        # before the first adapter nothing trains: no gradient of what the first layer takes, but for a checkpoint
        hands_on = full or spec.gradient_checkpointing or not linear.name.endswith(takes_first)
        backward = copies * (1.0 if hands_on else 1.0 - 1.0 / arch.num_layers)
        products += _uses(rows, linear.num_out, linear.num_in, dense, copies, repeats, trains=full, backward=backward)
        copies_of_products += copies
        if wide > dense and (spec.kbit_prep != "none" or not linear.name.endswith(LAST_OF_MLP + LAST_OF_ATTENTION)):
            linear_stream += _CAST_BYTES * rows * linear.num_in * copies
        if is_adapted:
            rank = spec.lora_r or 1
            width = 4 if spec.lora_dtype == "fp32" and spec.autocast == "none" else 2
            products += _uses(rows, rank, linear.num_in, width, copies, again, trains=True, backward=backward)
            products += _uses(rows, linear.num_out, rank, width, copies, again, trains=True)
            elements = rows * (_ADAPTER_OUT_BYTES * linear.num_out + (6 * linear.num_in if width == 4 else 0))
            if spec.lora_dropout:
                elements += 5 * rows * linear.num_in
            linear_stream += elements * copies
            adapter_kernels += _ADAPTER_KERNELS * copies
    for stack in (p for p in arch.parameters if p.role == "experts"):
        share = (arch.experts.per_token / arch.experts.num) if arch.experts else 1.0
        num_in, num_out = stack.shape[-2:]
        copies = arch.num_copies(stack) * stack.numel / (num_in * num_out)
        products += _uses(tokens * share, num_out, num_in, dense, copies, again, trains=full)
    head_repeats = 1 if spec.fuses_head else 0  # whose tiles are made again in backward
    products += _uses(tokens, arch.num_outputs, arch.head_width, dense, 1, head_repeats, trains=full)
    model_flops = sum(product.flops * product.copies for product in products)

    passes = 1 + again + _BACKWARD
    attention = sum(_attention_flops(arch, spec.num_rows, length, layer) for layer in range(arch.num_layers))
    queries = arch.num_heads * arch.head_size
    keys = arch.num_kv_heads * arch.head_size
    attention_bytes = 2.0 * tokens * (2 * queries + 2 * keys) * arch.num_layers * (1 + again + _BACKWARD)
    if eager := spec.attn == "eager":
        products += _scores(arch, spec.num_rows, length, dense, again)
        attention_bytes = _SCORE_BYTES * spec.num_rows * arch.num_heads * length**2 * arch.num_layers * passes

    layer, layer_kernels = elementwise(arch, tokens, (wide, wide if spec.kbit_prep != "none" else dense), fused)
    fused_loss = fused != "none" or spec.fused_linear_cross_entropy or spec.fuses_head
    loss = loss_bytes(fused_loss) * float(tokens) * arch.num_outputs
    stream = (layer.forward * (1 + again) + layer.backward) * arch.num_layers + loss + linear_stream * passes
    stream += 4.0 * tokens * arch.head_width * wide / 2
    attended = 0.0 if eager else attention * (1 + again)
    attended_back = 0.0 if eager else _ATTENTION_BACKWARD * attention

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
    per_layer += (_CAST_KERNELS * copies_of_products) if spec.autocast != "none" and fused != "all" else 0
    trained = [t for t in stored if t.trained]
    return Work(
        num_tokens=tokens,
        products=tuple(products),
        attention_flops=attended,
        attention_backward_flops=attended_back,
        attention_bytes=attention_bytes,
        length=length,
        head_size=arch.head_size,
        stream_bytes=stream,
        dequantised_bytes=PACKED_BYTES * quantised * (2 + again),
        cast_bytes=6.0 * frozen_wide * (1 + again),
        num_kernels=per_layer * (1 + again + _BACKWARD) + 40,
        optimizer_bytes=_optimizer_bytes(spec, trained),
        gathered_bytes=_gathered_bytes(spec, stored),
        gradient_bytes=float(sum(t.numel * t.num_copies * _gradient_width(spec, t) for t in trained)),
        num_layers=arch.num_layers,
        model_flops=model_flops + attention * (1 + _ATTENTION_BACKWARD),
    )


def _uses(
    rows: float,
    num_out: float,
    num_in: float,
    width: int,
    copies: float,
    repeats: int,
    *,
    trains: bool,
    backward: float | None = None,
) -> list[Product]:
    """Return the products of so many linear layers: forward, the gradient of their input (for ``backward`` of them,
    None: for all), and that of their weight where it trains.
    """
    found = [
        Product(rows, num_out, num_in, width, copies, repeats),
        Product(rows, num_in, num_out, width, copies if backward is None else backward),
    ]
    return [*found, Product(num_out, num_in, rows, width, copies)] if trains else found


def _share_of_tokens(arch: Architecture, name: str) -> float:
    """Share of tokens that reach a linear layer, where it is one of several experts; 1 for any other."""
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


def _scores(arch: Architecture, rows: int, length: int, width: int, repeats: int) -> list[Product]:
    """Eager attention: whole squares of scores, then their product with the values; as many again for each gradient."""
    m, layers = rows * arch.num_heads * length, arch.num_layers
    found = []
    for n, k in ((length, arch.head_size), (arch.value_size or arch.head_size, length)):
        found += [Product(m, n, k, width, layers, repeats), Product(m, n, k, width, 2 * layers)]
    return found


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
