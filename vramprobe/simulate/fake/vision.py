"""What a model with images does on a card otherwise than on fake tensors: choosing by masks, indices made on the host.

In: operators, a Recorder that knows values. Out: the tensors that CUDA's kernels would make, in that order. Paths are
of pytorch's sources, aten/src/ATen/native. Left out: what counting and sorting take (cub).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from vramprobe.simulate.fake.recorder import Recorder
from vramprobe.simulate.fake.values import number_of, values_of

_WINDOWS = "get_vision_window_index"


def masked_scatter(self: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """cuda/IndexKernel.cpp, ``masked_scatter__cuda``: a running count, and the mask as large as what it masks."""
    out = self.clone(memory_format=torch.contiguous_format)
    count = torch.empty(out.shape, dtype=torch.int64)
    whole = mask.expand(out.shape).contiguous()
    del count, whole
    return out


def masked_scatter_backward(gradient: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """TensorAdvancedIndexing.cpp: what the mask chooses, and zeros for what it left of the source."""
    chosen = masked_select(gradient, mask)
    missing = math.prod(sizes) - chosen.numel()
    if missing > 0:
        chosen = torch.cat([chosen, torch.zeros(missing, dtype=gradient.dtype)])
    return chosen.view(sizes)


def masked_select(self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """cuda/IndexKernel.cpp: by index, so that the mask is made whole and each element's place along each dimension
    stands meanwhile (cuda/Nonzero.cu)."""
    shape = torch.broadcast_shapes(self.shape, mask.shape)
    number = _num_chosen(mask, shape)
    whole = mask.expand(shape).contiguous()
    places = torch.empty(len(shape), number, dtype=torch.int64)
    del whole
    out = torch.empty(number, dtype=self.dtype)
    del places
    return out


def _num_chosen(mask: torch.Tensor, shape: Sequence[int]) -> int:
    known = values_of(mask)
    assert known is not None, "a mask of unknown values decides a size"
    with no_dispatch():
        return int(known.expand(shape).sum())


#: Operators that do otherwise on a GPU than fake CPU tensors say, as Python.
KERNELS: dict[str, Callable[..., Any]] = {
    "aten::masked_scatter": masked_scatter,
    "aten::masked_scatter_backward": masked_scatter_backward,
    "aten::masked_select": masked_select,
}


@contextmanager
def images_on_fake_tensors(recorder: Recorder, model_type: str) -> Iterator[None]:
    """While open, lists of fake tensors become tensors, and windows of patches are looked up on the host."""
    family = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "tensor", _tensor_function(recorder)))
        if (window_index := getattr(family, _WINDOWS, None)) is not None:
            stack.enter_context(patch.object(family, _WINDOWS, _on_host(window_index, recorder)))
        yield


def _on_host(window_index: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """vision_utils.py, ``get_vision_window_index``: it names a device for the windows' ends, and none for the index."""

    def on_host(*args: Any, **kwargs: Any) -> Any:
        recorder.to_host = True
        try:
            index, ends = window_index(*args, **kwargs)
        finally:
            recorder.to_host = False
        recorder.move_to_device(ends)
        return index, ends

    return on_host


def _some_number(tensor: torch.Tensor) -> float:
    known = number_of(tensor)
    return 1 if known is None else known


def _tensor_function(recorder: Recorder) -> Callable[..., torch.Tensor]:
    """``torch.tensor`` for lists of fake tensors, too; in the device's memory where a device is named."""
    plain = torch.tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        made = plain(tree_map_only(FakeTensor, _some_number, data), device=device, **options)
        if device is not None:
            recorder.move_to_device(made)
        return made

    return tensor
