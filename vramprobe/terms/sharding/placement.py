"""Placement: which GPU transformers' ``device_map="auto"`` puts each part of a model on.

In: a spec, its architecture, the number of GPUs, each with enough free memory. Out: a CardMap. As in transformers 5
(integrations/accelerate.py: ``get_balanced_memory``, ``infer_auto_device_map``; accelerate's ``get_max_layer_size``),
which reads the weights as they are made, without adapters, and the buffers. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from vramprobe.architecture import LLAMA_LIKE, Architecture, UnsupportedArchitecture
from vramprobe.errors import SpecError
from vramprobe.spec import CellSpec
from vramprobe.terms.cell import parameters
from vramprobe.terms.cell.parameters import Tensor
from vramprobe.terms.tape.graph import ITEMSIZE_BYTES

#: The part of each GPU's share that bitsandbytes' quantizers use (``adjust_max_memory``).
_QUANTISED_SHARE = 0.90
#: A GPU's share exceeds an equal part of the model by this factor of the largest part that is not split.
_MARGIN = 1.25
_ELEMENT_BYTES = {"int8": 1.0, "nf4": 0.5, "fp4": 0.5, "nf4-single": 0.5}


@dataclass(frozen=True)
class CardMap:
    """The GPU of each part: of each layer in order, and of what is outside the layers."""

    layers: tuple[int, ...]
    embedding: int
    norm: int
    rotary: int
    head: int

    def of(self, part: int | str) -> int:
        """The GPU of a layer, by its number, or of ``embedding``, ``norm``, ``rotary``, ``head`` or the ``batch``."""
        if isinstance(part, int):
            return self.layers[part]
        return 0 if part == "batch" else int(getattr(self, part))

    def of_tensor(self, tensor: Tensor) -> int:
        """The GPU of a tensor outside the layers."""
        return self.of(parameters.part_of(tensor))


@dataclass(frozen=True)
class _Part:
    """A module: its bytes, and the modules it may be split into."""

    name: str
    own_bytes: float = 0
    children: tuple[_Part, ...] = ()

    @cached_property
    def num_bytes(self) -> float:
        return self.own_bytes + sum(child.num_bytes for child in self.children)

    @cached_property
    def whole(self) -> list[_Part]:
        """The parts that are not split, in the model's order."""
        if not self.children:
            return [self]
        return [part for child in self.children for part in child.whole]


def card_map(spec: CellSpec, arch: Architecture, num_cards: int) -> CardMap:
    """The GPU of each part on ``num_cards`` GPUs.

    Raises SpecError if all parts are on one, UnsupportedArchitecture for a family without rules.
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
        _Part("model.embed_tokens", sizes["embedding"]),
        _Part("model.layers", children=layers),
        _Part("model.norm", sizes["norm"]),
        _Part("model.rotary_emb", parameters.buffers_bytes(arch, spec.dtype)),
    )
    return _Part("", children=(_Part("model", children=inner), _Part("lm_head", sizes["head"])))


def _share(model: _Part, quant: str, num_cards: int) -> float:
    """Bytes that each GPU but the last may hold: an equal part and a margin for the largest module."""
    margin = int(_MARGIN * max(part.num_bytes for part in model.whole))
    return (model.num_bytes // num_cards + margin) * (1.0 if quant == "none" else _QUANTISED_SHARE)


def _inferred(model: _Part, tied: bool, num_cards: int, share: float) -> dict[str, int]:
    """The GPU of each module that was placed as a whole.

    The first GPU keeps free as much as the largest module that is still to be placed.
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
    """The bytes of the largest parts that are not split, and their names."""
    whole = [part for one in waiting for part in one.whole]
    largest = max((part.num_bytes for part in whole), default=0)
    return largest, [part.name for part in whole if part.num_bytes == largest]
