"""Parts of an architecture: its parameters, its linear layers, its experts, and the widths they have.

In: what the families' modules have read of a config.json. Out: frozen values. Never reads a config.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from vramprobe.errors import VramprobeError

#: The last four are weights that are no linear layer's: bitsandbytes leaves them as they are.
Role = Literal["linear", "head", "embedding", "norm", "bias", "router", "experts", "sinks", "mixer"]


class UnsupportedArchitecture(VramprobeError):
    """A model, or an option of it, whose tensors are not counted here."""


class RunFails(UnsupportedArchitecture):
    """An option that the libraries fail on with this model: no other engine is to be asked."""


class Parameter(NamedTuple):
    """One parameter tensor; ``{layer}`` in the name stands for the layer's number where there is one per layer."""

    name: str
    module: str  # the last part of its module's name: q_proj, c_attn, fc1, input_layernorm
    shape: tuple[int, ...]
    role: Role
    per_layer: bool
    only: str = ""  # in layers of this kind: dense or sparse, without experts or with them, or one of ``mixers``

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Linear(NamedTuple):
    """A linear layer by its module name: a LoRA target, and what bitsandbytes replaces."""

    name: str
    num_in: int
    num_out: int
    per_layer: bool
    num_copies: int


class Wrapped(NamedTuple):
    """A parameter that peft's LoRA reaches though it is no linear layer's (``ParamWrapper``).

    ``targets`` are the linear layers it was in transformers 4, which peft still goes by, and all of which it takes;
    the adapter of ``num_experts`` matrices has ``num_experts`` × the rank, once for each of the targets.
    """

    name: str
    targets: tuple[str, ...]
    num_experts: int  # 1 for a matrix that is no stack
    num_in: int
    num_out: int


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Dimensions and parameters of a causal language model. Widths are elements."""

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    tied: bool  # the head's weight is the embedding's
    scores_rows: bool = False  # by a head of one output in place of the vocabulary's
    rotary_size: int  # rotated part of a head; 0 with learned positions
    value_size: int | None = None  # of a value's head, where it is not head_size
    sliding_window: int | None = None
    #: Which layers look through the window, one by one; empty where all do or there is none.
    sliding_layers: tuple[bool, ...] = ()
    own_linears: bool = False  # a linear class of its own, which bitsandbytes leaves alone
    scales_embedding: bool = False  # by a number that is kept in a buffer
    num_rotary_tables: int = 1  # kinds of layers that turn heads at their own speeds
    dense_layers: tuple[int, ...] = ()  # those without experts, where others have them
    #: What mixes the tokens of each layer: full_attention, linear_attention or conv; empty where all are alike.
    mixers: tuple[str, ...] = ()
    #: Elements that a layer which does not attend keeps of one sequence while it generates: inputs of its convolution,
    #: and its recurrence.
    convolved_size: int = 0
    recurrent_size: int = 0
    wrapped: tuple[Wrapped, ...] = ()
    parameters: tuple[Parameter, ...] = ()

    @property
    def head_width(self) -> int:
        """Elements of a token that the output head takes: as wide as the embedding."""
        return self.parameters[0].shape[1]

    @cached_property
    def has_experts(self) -> bool:
        """True if layers have experts."""
        return any(parameter.role == "experts" for parameter in self.parameters)

    def slides(self, layer: int) -> bool:
        """True if this layer looks through the window."""
        return self.sliding_layers[layer] if self.sliding_layers else self.sliding_window is not None

    def num_copies(self, parameter: Parameter) -> int:
        """Number of tensors of this name pattern in the model."""
        if not parameter.per_layer:
            return 1
        num_dense = len(self.dense_layers)
        numbers = {"": self.num_layers, "dense": num_dense, "sparse": self.num_layers - num_dense}
        return numbers.get(parameter.only, self.mixers.count(parameter.only))

    @cached_property
    def num_params(self) -> int:
        """Parameters of the model, tied ones once."""
        return sum(parameter.numel * self.num_copies(parameter) for parameter in self.parameters)

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers apart from the output head; a fused projection is one."""
        return tuple(
            Linear(p.name.removesuffix(".weight"), *_in_out(p, self.model_type), p.per_layer, self.num_copies(p))
            for p in self.parameters
            if p.role == "linear"
        )


def _in_out(parameter: Parameter, model_type: str) -> tuple[int, int]:
    """(in, out) of a linear weight: nn.Linear stores out × in, GPT-2's Conv1D in × out."""
    first, second = parameter.shape
    return (first, second) if model_type == "gpt2" else (second, first)
