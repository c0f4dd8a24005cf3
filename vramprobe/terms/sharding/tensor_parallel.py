"""Tensor parallelism: one rank of transformers' ``tp_plan="auto"``.

In: a spec of one GPU's, among how many ranks each layer is divided. Out: a Card, whose Moments are as ``terms`` has
them. The walk is a single GPU's with this rank's heads and widths, and what DTensors allocate beside them, none of it
in place (transformers/distributed/tensor_parallel.py; torch/distributed/tensor/placement_types.py):

* The output of a row-wise layer (``o_proj``, ``down_proj``) and of the divided embedding is all-reduced into a copy; so
  is the gradient of a hidden state at each column-wise layer and at the head.
* The logits are all-gathered and laid out by tokens in a copy, and their gradient's part is a copy, too.
* The embedding's gradient is the whole table's. It stays whole until the optimizer copies this rank's part of it; of a
  tied table, that part is added to the head's in a copy.

Counted is the first rank, which has most where a vocabulary or width does not divide evenly. Not counted: the masks of
an embedding's ids. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vramprobe.architecture import LLAMA_LIKE, Architecture, architecture
from vramprobe.choices import TENSOR_PARALLEL
from vramprobe.kernels.chip import A100, Chip
from vramprobe.optimizers import OPTIMIZERS
from vramprobe.rules.sharding import ROW_WISE
from vramprobe.spec import CellSpec
from vramprobe.terms import course_of
from vramprobe.terms.cell import optimizer, parameters, remainders
from vramprobe.terms.cell.parameters import Tensor
from vramprobe.terms.cell.setup import Setup, setup_of
from vramprobe.terms.models import operators as op
from vramprobe.terms.models.modules import Model
from vramprobe.terms.sharding.device_map import Card, require_none_of
from vramprobe.terms.step.walk import Walk, micro_step, one_of_each_kind
from vramprobe.terms.tape.account import Account
from vramprobe.terms.tape.graph import Leaf, Value
from vramprobe.terms.tape.tape import Covers, Tape

#: Layers divided by their outputs in LLAMA_LIKE's plans (transformers, ``base_model_tp_plan``).
COLUMN_WISE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def part_of(spec: CellSpec, num_ranks: int, chip: Chip = A100) -> Card:
    """A step of the first rank, kept for the next cell that differs only in batch size and length.

    Raises UnsupportedArchitecture for what there is no arithmetic for.
    """
    arch = architecture(spec.architecture)
    _require_known(spec, arch)
    kept = course_of(spec, chip).ranks
    key = ("tp", num_ranks)
    if key not in kept:
        kept[key] = _part(spec, arch, num_ranks, chip)
    found: Card = kept[key]
    return found


def _require_known(spec: CellSpec, arch: Architecture) -> None:
    known = ", ".join(LLAMA_LIKE)
    unknown = [
        (arch.model_type not in LLAMA_LIKE, f"of a {arch.model_type}, but of {known}"),
        (arch.habits.rotary_positions > 0 or arch.habits.reenters, "with a release of transformers before 5"),
        (spec.fused_linear_cross_entropy, "with a fused loss"),
        (spec.dora, "with dora"),
        (
            any(parameter.role == "bias" and parameter.module in ROW_WISE for parameter in arch.parameters),
            f"of {spec.model}, whose {' and '.join(ROW_WISE[:2])} have biases",
        ),
    ]
    require_none_of(unknown, TENSOR_PARALLEL)


def _part(spec: CellSpec, arch: Architecture, num_ranks: int, chip: Chip) -> Card:
    setup = part_setup(spec, arch, num_ranks, chip)
    own, walk = setup.tensors, part_walk(setup)
    trained = [tensor for tensor in own if tensor.trained]
    idle = {
        "weights": parameters.weights_bytes(own, spec.quant) + parameters.buffers_bytes(arch, spec.dtype),
        "optimizer_state": optimizer.allocated_state_bytes(spec, trained),
        "block_remainders": remainders.of_what_stands(spec, own),
    }
    gradients = [_gradient_of(tensor, arch) for tensor in trained]
    at_step = {
        "gradients": sum(tensor.num_bytes * tensor.num_copies for tensor in gradients),
        "optimizer_temporaries": _stepping_bytes(spec, arch, trained),
    }
    return Card(walk, idle, at_step, remainders.of_gradients(gradients), has_batch=True)


def part_setup(spec: CellSpec, arch: Architecture, num_ranks: int, chip: Chip = A100) -> Setup:
    """The Setup of the first rank, with its heads and its parts of the tensors."""
    own = tuple([divided(tensor, num_ranks) for tensor in parameters.tensors(spec, arch)])
    heads = replace(arch, num_heads=arch.num_heads // num_ranks, num_kv_heads=arch.num_kv_heads // num_ranks)
    return setup_of(spec, heads, own, chip)


def divided(tensor: Tensor, num_ranks: int) -> Tensor:
    """The first rank's part of a tensor, or the tensor itself if it is not divided."""
    if not is_divided(tensor):
        return tensor
    first, *rest = tensor.shape
    if _is_row_wise(tensor.name):
        return tensor._replace(shape=(first, -(-rest[0] // num_ranks)))
    return tensor._replace(shape=(-(-first // num_ranks), *rest))


def is_divided(tensor: Tensor) -> bool:
    """Whether each rank has a part of it, as a DTensor."""
    return tensor.role in ("embedding", "head") or _is_column_wise(tensor.name) or _is_row_wise(tensor.name)


def _is_column_wise(name: str) -> bool:
    """Of a layer's weight, bias or adapter; of an adapter, B."""
    module, _, kind = name.rpartition(".")
    return module.rpartition(".")[2] in COLUMN_WISE and kind != "lora_A"


def _is_row_wise(name: str) -> bool:
    return name.rpartition(".")[0].rpartition(".")[2] in ROW_WISE


def _stays_whole(tensor: Tensor, arch: Architecture) -> bool:
    """Whether its gradient is the whole tensor's until the optimizer's step."""
    return tensor.role == "embedding" and not arch.tied


def _gradient_of(tensor: Tensor, arch: Architecture) -> Tensor:
    return tensor._replace(shape=(arch.vocab_size, *tensor.shape[1:])) if _stays_whole(tensor, arch) else tensor


def _stepping_bytes(spec: CellSpec, arch: Architecture, trained: Sequence[Tensor]) -> int:
    """The optimizer's temporaries: the larger of DTensors' and of those of tensors that are whole on every rank.

    Each operator of the optimizer copies this rank's part of the embedding's gradient again. Adagrad's numerators have
    the whole gradient.
    """
    parts = [tensor for tensor in trained if is_divided(tensor)]
    lists, others = (
        optimizer.temporaries_bytes(spec, some) for some in (parts, [one for one in trained if one not in parts])
    )
    copied = sum(tensor.num_bytes for tensor in parts if _stays_whole(tensor, arch))
    row = OPTIMIZERS[spec.optim]
    if row.drops_gradients:
        lists = max(lists, copied)
    elif "numerators" in row.foreach_lists:
        lists += sum(_gradient_of(tensor, arch).num_bytes for tensor in parts if _stays_whole(tensor, arch))
    else:
        lists += copied
    return max(lists, others)


def part_walk(setup: Setup) -> Walk:
    """The Walk of a rank."""
    tape = PartTape(setup.sizes.covers)
    saved, peaks = micro_step(PartModel(tape, setup, one_of_each_kind(setup.arch)), Account(tape))
    return Walk(setup.sizes, saved, peaks)


class PartTape(Tape):
    """A Tape on which the gradient of a divided table is whole."""

    def __init__(self, covers: Covers) -> None:
        super().__init__(covers)
        self.kept_whole: dict[Leaf, int] = {}  # elements of the gradients that stay whole

    def make_gradient(self, leaf: Value) -> None:
        numel = self.kept_whole.get(leaf.node, leaf.numel)
        leaf.node.gradient = self.new(numel, leaf.dtype, "gradients")

    def _sum(self, old: Value | None, new: Value, to_leaf: bool) -> Value:
        """Of a tied table: the head's gradient is a part, the embedding's is whole."""
        if old is None or new.numel == old.numel:
            return super()._sum(old, new, to_leaf)
        part = self.new_like(old)
        total = self.new_like(old)
        del part
        self._recause(total.storage, "gradients")
        return total


class PartModel(Model):
    """A Model whose layers are divided, with the plan's all-reduces and copies."""

    def __init__(self, tape: PartTape, setup: Setup, layers: Sequence[int]) -> None:
        super().__init__(tape, setup, layers)
        for name, tensor in self.tensors.items():
            if tensor.trained and _stays_whole(tensor, self.arch):
                tape.kept_whole[self.weight(name).node] = _gradient_of(tensor, self.arch).numel

    def matmul(self, value: Value, weight_name: str, bias: Value | None, num_out: int) -> Value:
        if weight_name == self.head or _is_column_wise(weight_name):
            value = _summed_in_backward(value)
        out = super().matmul(value, weight_name, bias, num_out)
        return _summed(out) if _is_row_wise(weight_name) else out

    def embed(self, name: str, num_ids: int, ids: Value | None = None) -> Value:
        """The rows of a divided table, zeros for other ranks', all-reduced; its gradient is the whole table's."""
        tensor, part = self.tensors[name], self.weight(name)
        vocab, width = self.arch.vocab_size, tensor.shape[1]
        table = self.tape.constant(vocab * width, tensor.dtype)
        table.edge = part.edge
        num_sorted = {"none": 0, "tokens": num_ids, "words": vocab}[self.setup.sorted_ids]
        out = _summed(op.embedding(num_ids, table, width, ids, num_sorted))
        if self.setup.gradient_checkpointing and not tensor.trained:
            self.tape.require_grad(out)
            self._inputs.append(out)
        return out

    def logits(self, hidden: Value) -> Value:
        """The logits of all words, all-gathered."""
        tape, num_words = self.tape, self.tensors[self.head].shape[0]
        own = self.matmul(hidden, self.head, None, num_words)
        num_gathered = -(-self.arch.vocab_size // num_words) * own.numel
        gathered = tape.new(num_gathered, own.dtype)
        by_tokens = tape.new(num_gathered, own.dtype)
        del gathered
        numel = own.numel
        out = tape.view(by_tokens, numel // num_words * self.arch.vocab_size)
        tape.record([own], [out], [], lambda grads: [tape.new(numel, grads[0].dtype)])
        return out


def _summed(value: Value) -> Value:
    """All-reduced into a copy; backward passes the gradient on."""
    out = value.tape.new_like(value)
    value.tape.record([value], [out], [], lambda grads: [grads[0].tape.view(grads[0])])
    return out


def _summed_in_backward(value: Value) -> Value:
    """A value that is the same on all ranks, whose gradient is all-reduced into a copy."""
    out = value.tape.view(value)
    value.tape.record([value], [out], [], lambda grads: [op.value_like(grads[0])])
    return out
