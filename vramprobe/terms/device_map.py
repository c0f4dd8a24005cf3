"""Device map: where transformers' ``device_map="auto"`` puts each part of a model on several cards, by arithmetic.

In: a spec and its architecture, how many cards, each with room enough. Out: a CardMap. Written as in transformers 5
(integrations/accelerate.py: ``get_balanced_memory``, ``infer_auto_device_map``; accelerate's ``get_max_layer_size``),
which looks at the weights as they are made, without adapters, and at buffers. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from vramprobe.architecture import LLAMA_LIKE, Architecture, UnsupportedArchitecture
from vramprobe.errors import SpecError
from vramprobe.spec import CellSpec
from vramprobe.terms import parameters
from vramprobe.terms.graph import ITEMSIZE_BYTES
from vramprobe.terms.parameters import Tensor

#: What both of bitsandbytes' quantizers leave free of each card's share (``adjust_max_memory``).
_QUANTISED_SHARE = 0.90
#: Of the largest part that is not split, what a card's share has beside its part of the whole.
_ROOM = 1.25
_ELEMENT_BYTES = {"int8": 1.0, "nf4": 0.5, "fp4": 0.5, "nf4-single": 0.5}


@dataclass(frozen=True)
class CardMap:
    """The card of each part: the layers in their order, and what is outside them."""

    layers: tuple[int, ...]
    embedding: int
    norm: int
    rotary: int
    head: int

    def of(self, part: int | str) -> int:
        """The card of a layer, by its number, or of ``embedding``, ``norm``, ``rotary``, ``head``; of the ``batch``."""
        if isinstance(part, int):
            return self.layers[part]
        return 0 if part == "batch" else int(getattr(self, part))

    def of_tensor(self, tensor: Tensor) -> int:
        """The card of what there is once."""
        return self.of(parameters.part_of(tensor))


@dataclass(frozen=True)
class _Part:
    """A module: its bytes, and the modules that it may be split into."""

    name: str
    own_bytes: float = 0
    children: tuple[_Part, ...] = ()

    @cached_property
    def num_bytes(self) -> float:
        return self.own_bytes + sum(child.num_bytes for child in self.children)

    @cached_property
    def whole(self) -> list[_Part]:
        """What is not split, in the model's order."""
        if not self.children:
            return [self]
        return [part for child in self.children for part in child.whole]


def card_map(spec: CellSpec, arch: Architecture, num_cards: int) -> CardMap:
    """Where each part lies on so many cards.

    Raises SpecError where that is a single one, UnsupportedArchitecture for a family without rule.
    """
    if arch.model_type not in LLAMA_LIKE:
        raise UnsupportedArchitecture(
            f"there is no arithmetic for sharding device-map of a {arch.model_type}, but of {', '.join(LLAMA_LIKE)}; "
            "run it, on emulated GPUs say: vramprobe measure --emulate"
        )
    if not 1 < num_cards <= arch.num_layers:
        raise SpecError(
            f"num_gpus {num_cards} under device-map: the model has {arch.num_layers} layers, and no layer is divided; "
            f"give 2 to {arch.num_layers}"
        )
    model = _model(spec, arch)
    found = _inferred(model, arch.tied, num_cards, _share(model, spec.quant, num_cards))

    def card_of(name: str) -> int:
        while name not in found:
            name = name.rpartition(".")[0]
        return found[name]

    layers = tuple([card_of(f"model.layers.{index}") for index in range(arch.num_layers)])
    outside = {"embedding": "model.embed_tokens", "norm": "model.norm", "rotary": "model.rotary_emb", "head": "lm_head"}
    made = CardMap(layers, **{part: card_of(name) for part, name in outside.items()})
    if len(set(found.values())) == 1:
        raise SpecError(
            'device_map="auto" puts the whole of this model on one card, and nothing on the others; leave num_gpus and '
            "sharding out"
        )
    if made.embedding:
        raise UnsupportedArchitecture(
            f'there is no arithmetic for {spec.model} on {num_cards} cards: device_map="auto" leaves the first one '
            "empty, which has the batch; use fewer"
        )
    return made


def _model(spec: CellSpec, arch: Architecture) -> _Part:
    """The base model as it is made; a tied head's weight is the embedding's."""
    sizes = {"layer": 0.0, "embedding": 0.0, "norm": 0.0, "head": 0.0}
    for tensor in parameters.tensors(spec.model_copy(update={"kbit_prep": "none"}), arch):
        if tensor.role != "adapter":
            width = _ELEMENT_BYTES[spec.quant] if tensor.quantised else ITEMSIZE_BYTES[spec.dtype]
            sizes["layer" if tensor.per_layer else parameters.part_of(tensor)] += tensor.numel * width
    layers = tuple([_Part(f"model.layers.{index}", sizes["layer"]) for index in range(arch.num_layers)])
    inner = (
        _Part("model.embed_tokens", sizes["embedding"]), _Part("model.layers", children=layers),
        _Part("model.norm", sizes["norm"]), _Part("model.rotary_emb", parameters.buffers_bytes(arch, spec.dtype)),
    )  # fmt: skip
    return _Part("", children=(_Part("model", children=inner), _Part("lm_head", sizes["head"])))


def _share(model: _Part, quant: str, num_cards: int) -> float:
    """What may lie on each card but the last: an equal part, with room for the largest thing beside it."""
    room = int(_ROOM * max(part.num_bytes for part in model.whole))
    return (model.num_bytes // num_cards + room) * (1.0 if quant == "none" else _QUANTISED_SHARE)


def _inferred(model: _Part, tied: bool, num_cards: int, share: float) -> dict[str, int]:
    """The card of each module that was put somewhere as a whole.

    The first card keeps as much free as the largest of what is still to come takes.
    """
    found: dict[str, int] = {}
    waiting = list(model.children)
    largest, names = _largest(waiting)
    card, used = 0, 0.0
    while waiting:
        part, *waiting = waiting
        names = [name for name in names if name != part.name and not name.startswith(f"{part.name}.")]
        if not names:
            largest, names = _largest(waiting)
        kept_free = largest if card == 0 else 0
        if card == num_cards - 1 or used + part.num_bytes <= share - kept_free:
            used += part.num_bytes
            found[part.name] = card
            if tied and part.name in ("model", "model.embed_tokens"):  # the head goes with it
                waiting = [one for one in waiting if one.name != "lm_head"]
                found["lm_head"] = card
        elif part.children:
            waiting = [*part.children, *waiting]
            largest, names = _largest(waiting)
        else:
            card, used = card + 1, 0.0
            waiting = [part, *waiting]
    return found


def _largest(waiting: Sequence[_Part]) -> tuple[float, list[str]]:
    """The most bytes of what is not split, and the names of those that have as many."""
    whole = [part for one in waiting for part in one.whole]
    largest = max((part.num_bytes for part in whole), default=0)
    return largest, [part.name for part in whole if part.num_bytes == largest]
