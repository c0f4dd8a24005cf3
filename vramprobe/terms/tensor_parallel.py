"""Tensor parallelism: one rank of transformers' ``tp_plan="auto"`` -> its moments, by arithmetic.

In: a spec of one GPU's, among how many ranks each layer is divided. Out: a Card, whose Moments are as ``terms`` has
them. The walk is that of a single GPU over this rank's heads and widths, with what DTensors allocate beside them
(transformers/distributed/tensor_parallel.py; torch/distributed/tensor/placement_types.py), none of it in place:

* what a layer divided by its inputs (``o_proj``, ``down_proj``) or the divided embedding returns is summed to a copy,
  and so is the gradient of a hidden state at each layer divided by its outputs, and at the head;
* the logits are brought together and laid out by tokens in a copy, and their gradient's part is one, too;
* the embedding's gradient is the whole table's. It stays whole until the optimizer copies this rank's part of it; of a
  table that is the head's, too, that part is added to the head's, in a copy.

The first rank is counted, which has most where a vocabulary or width is not divided without a rest. Left out: the masks
of an embedding's ids. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vramprobe.architecture import LLAMA_LIKE, Architecture, architecture
from vramprobe.choices import TENSOR_PARALLEL
from vramprobe.spec import ROW_WISE, CellSpec
from vramprobe.terms import course_of, optimizer, parameters, remainders
from vramprobe.terms import operators as op
from vramprobe.terms.cards import Card, require_none_of
from vramprobe.terms.graph import Leaf, Value
from vramprobe.terms.modules import Model
from vramprobe.terms.parameters import Tensor
from vramprobe.terms.setup import Setup, setup_of
from vramprobe.terms.tape import Covers, Tape
from vramprobe.terms.walk import Walk, _micro_step, one_of_each_kind

#: Divided by their outputs, in LLAMA_LIKE's plans (transformers, ``base_model_tp_plan``).
COLUMN_WISE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def part_of(spec: CellSpec, num_ranks: int, has_flash: bool = True) -> Card:
    """A step of the first rank, kept for the next cell that differs in batch size and length only.

    Raises UnsupportedArchitecture for what there is no arithmetic for.
    """
    arch = architecture(spec.architecture)
    _require_known(spec, arch)
    kept = course_of(spec, has_flash).ranks
    key = ("tp", num_ranks)
    if key not in kept:
        kept[key] = _part(spec, arch, num_ranks, has_flash)
    found: Card = kept[key]
    return found


def _require_known(spec: CellSpec, arch: Architecture) -> None:
    known = ", ".join(LLAMA_LIKE)
    unknown = [
        (arch.model_type not in LLAMA_LIKE, f"of a {arch.model_type}, but of {known}"),
        (arch.habits.rotary_positions > 0 or arch.habits.reenters, "with a release of transformers before 5"),
        (spec.fused_linear_cross_entropy, "with a fused loss"),
        (spec.dora, "with dora"),
        (any(parameter.role == "bias" and parameter.module in ROW_WISE for parameter in arch.parameters),
         f"of {spec.model}, whose {' and '.join(ROW_WISE[:2])} have biases"),
    ]  # fmt: skip
    require_none_of(unknown, TENSOR_PARALLEL)


def _part(spec: CellSpec, arch: Architecture, num_ranks: int, has_flash: bool) -> Card:
    setup = part_setup(spec, arch, num_ranks, has_flash)
    own, walk = setup.tensors, part_walk(setup)
    trained = [tensor for tensor in own if tensor.trained]
    idle = {
        "weights": parameters.weights_bytes(own, spec.quant) + parameters.buffers_bytes(arch, spec.dtype),
        "optimizer_state": optimizer.allocated_state_bytes(spec, trained),
        "block_remainders": remainders.of_what_stands(spec, own),
    }
    gradients = [_gradient_of(tensor, arch) for tensor in trained]
    at_step = {"gradients": sum(tensor.num_bytes * tensor.num_copies for tensor in gradients),
               "optimizer_temporaries": _stepping_bytes(spec, arch, trained)}  # fmt: skip
    return Card(walk, idle, at_step, remainders.of_gradients(gradients), has_batch=True)


def part_setup(spec: CellSpec, arch: Architecture, num_ranks: int, has_flash: bool = True) -> Setup:
    """The Setup of the first rank, with its heads and its parts of tensors."""
    own = tuple([divided(tensor, num_ranks) for tensor in parameters.tensors(spec, arch)])
    heads = replace(arch, num_heads=arch.num_heads // num_ranks, num_kv_heads=arch.num_kv_heads // num_ranks)
    return setup_of(spec, heads, own, has_flash)


def divided(tensor: Tensor, num_ranks: int) -> Tensor:
    """The first rank's part of a tensor, where it has no more than one."""
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
    """What a step holds at most beside weights, gradients and state: of DTensors, then of what is whole on every rank.

    Each operator of the optimizer copies this rank's part of the embedding's gradient anew. Adagrad's numerators have
    it whole.
    """
    parts = [tensor for tensor in trained if is_divided(tensor)]
    lists, others = (
        optimizer.temporaries_bytes(spec, some) for some in (parts, [one for one in trained if one not in parts])
    )
    copied = sum(tensor.num_bytes for tensor in parts if _stays_whole(tensor, arch))
    match spec.optim:
        case "adamw_torch":  # which has no more of the gradients when it makes its list of denominators
            lists = max(lists, copied)
        case "adagrad":
            lists += sum(_gradient_of(tensor, arch).num_bytes for tensor in parts if _stays_whole(tensor, arch))
        case _:
            lists += copied
    return max(lists, others)


def part_walk(setup: Setup) -> Walk:
    """The Walk of a rank, whose heads and tensors are those of the setup."""
    tape = PartTape(setup.sizes.covers)
    saved, peaks = _micro_step(tape, PartModel(tape, setup, one_of_each_kind(setup.arch)))
    return Walk(setup.sizes, saved, peaks)


class PartTape(Tape):
    """A Tape on which the gradient of a divided table is made whole."""

    def __init__(self, covers: Covers) -> None:
        super().__init__(covers)
        self.kept_whole: dict[Leaf, int] = {}  # where it stays so: its elements

    def make_gradient(self, leaf: Value) -> None:
        numel = self.kept_whole.get(leaf.node, leaf.numel)
        leaf.node.gradient = self.new(numel, leaf.dtype, "gradients")

    def _sum(self, old: Value | None, new: Value, to_leaf: bool) -> Value:
        """Of a tied table: the head's is a part, and the embedding's comes whole."""
        if old is None or new.numel == old.numel:
            return super()._sum(old, new, to_leaf)
        part = self.new_like(old)
        total = self.new_like(old)
        del part
        self._recause(total.storage, "gradients")
        return total


class PartModel(Model):
    """A Model whose layers are divided, with the sums and copies of its plan."""

    def __init__(self, tape: PartTape, setup: Setup, layers: Sequence[int]) -> None:
        super().__init__(tape, setup, layers)
        for name, tensor in self.tensors.items():
            if tensor.trained and _stays_whole(tensor, self.arch):
                tape.kept_whole[self.weight(name).node] = _gradient_of(tensor, self.arch).numel

    def _matmul(self, value: Value, weight_name: str, bias: Value | None, num_out: int) -> Value:
        if weight_name == self.head or _is_column_wise(weight_name):
            value = _summed_in_backward(value)
        out = super()._matmul(value, weight_name, bias, num_out)
        return _summed(out) if _is_row_wise(weight_name) else out

    def embed(self, name: str, num_ids: int, ids: Value | None = None) -> Value:
        """The rows of a divided table, those of other ranks' as zeros, summed; its gradient is the whole table's."""
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
        """Those of all words, brought together."""
        tape, num_words = self.tape, self.tensors[self.head].shape[0]
        own = self._matmul(hidden, self.head, None, num_words)
        num_gathered = -(-self.arch.vocab_size // num_words) * own.numel
        gathered = tape.new(num_gathered, own.dtype)
        by_tokens = tape.new(num_gathered, own.dtype)
        del gathered
        numel = own.numel
        out = tape.view(by_tokens, numel // num_words * self.arch.vocab_size)
        tape.record([own], [out], [], lambda grads: [tape.new(numel, grads[0].dtype)])
        return out


def _summed(value: Value) -> Value:
    """Added up among the ranks, in a copy; backward passes the gradient on."""
    out = value.tape.new_like(value)
    value.tape.record([value], [out], [], lambda grads: [grads[0].tape.view(grads[0])])
    return out


def _summed_in_backward(value: Value) -> Value:
    """What is the same on all ranks, whose gradient is added up among them, in a copy."""
    out = value.tape.view(value)
    value.tape.record([value], [out], [], lambda grads: [op.value_like(grads[0])])
    return out
