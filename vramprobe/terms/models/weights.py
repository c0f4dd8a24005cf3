"""The weights of a model on the tape, and products with them under the cell's autocast.

In: a Setup. Out: Weights, which modules.py's Model is, and which quantized.py and adapters.py multiply by. Never
imports torch or the workload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vramprobe.terms.cell.setup import Setup
from vramprobe.terms.models import operators as op
from vramprobe.terms.tape.graph import Leaf, Value
from vramprobe.terms.tape.tape import Tape


class Weights:
    """A model's weights as constants of a tape, and autocast's cache of their copies."""

    def __init__(self, tape: Tape, setup: Setup, layers: Sequence[int]) -> None:
        self.tape, self.setup, self.arch, self.layers = tape, setup, setup.arch, layers
        self.num_tokens, self.device = setup.num_tokens, setup.device
        tape.device = setup.device
        self.tensors = {tensor.name: tensor for tensor in setup.tensors}
        self.layer = 0
        self._weights: dict[tuple[str, int], Value] = {}
        self._cast_cache: dict[Value, Value] = {}

    def weight(self, name: str) -> Value:
        """The weight of this name, in the current layer where there is one per layer."""
        key = (name, self.layer if "{layer}" in name else 0)
        if key not in self._weights:
            tensor = self.tensors[name]
            self._weights[key] = self.tape.constant(tensor.numel, tensor.dtype, trained=tensor.trained)
        return self._weights[key]

    def autocasted(self, weight: Value) -> Value:
        """A weight as autocast hands it to a matmul: trained fp32 weights are cast once per forward and cached."""
        if self.setup.autocast == "none" or weight.dtype == self.setup.autocast:
            return weight
        if weight in self._cast_cache:
            return self._cast_cache[weight]
        with self.tape.cause("cast_copies"):
            copy = op.cast(weight, self.setup.autocast)
        if isinstance(weight.node, Leaf):
            self._cast_cache[weight] = copy
        return copy

    def leave_autocast(self) -> None:
        """The end of the autocast block: its cache of cast weights goes."""
        self._cast_cache.clear()

    def plain(self, name: str, value: Value) -> Value:
        """An ``nn.Linear``."""
        bias = f"{name}.bias" if f"{name}.bias" in self.tensors else None
        bias = self.autocasted(self.weight(bias)) if bias else None
        return self.matmul(value, f"{name}.weight", bias, self.num_out(name))

    def matmul(self, value: Value, weight_name: str, bias: Value | None, num_out: int) -> Value:
        """The product with the weight of this name."""
        return self.product(value, self.weight(weight_name), num_out, bias)

    def product(self, value: Value, weight: Value, num_out: int, bias: Value | None = None) -> Value:
        """``F.linear`` under the cell's autocast: each call casts its own copy of a wider input, after the weight's, as
        g++ evaluates arguments.
        """
        cast = self.autocasted(weight)
        given = value if self.setup.autocast == "none" else op.cast(value, self.setup.autocast)
        return op.linear(given, cast, bias, num_out, self.setup.linears_save_inputs)

    def num_out(self, name: str) -> int:
        """Output width of a linear layer; GPT-2's Conv1D stores in × out unless it is quantised."""
        tensor = self.tensors[f"{name}.weight"]
        return tensor.shape[1] if self.arch.model_type == "gpt2" and not tensor.quantised else tensor.shape[0]

    def leaves(self) -> Iterator[Leaf]:
        """Where gradients end, of the trained weights that were used."""
        return (weight.node for weight in self._weights.values() if isinstance(weight.node, Leaf))
