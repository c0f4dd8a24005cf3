"""The hooks of a loop's phases, as libraries meet them."""

import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch

from vramprobe.profile.hook import marks as marks_module
from vramprobe.profile.hook.marks import Marks


def test_pickled_guards_take_no_hooks_along() -> None:
    """torch's ahead-of-time compile pickles all global module hooks with a module's guards."""
    marks = object.__new__(Marks)
    marks._phases = lambda: None  # as a lock, it cannot be pickled
    assert vars(pickle.loads(pickle.dumps(marks))) == {}


def test_a_torch_that_does_not_warn_of_global_hooks_is_watched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.4 has no _has_any_global_hook."""
    monkeypatch.delattr(torch.nn.modules.module, "_has_any_global_hook", raising=False)
    with warnings.catch_warnings():
        before = list(warnings.filters)
        marks_module._let_compile_ignore_our_hooks()
        assert warnings.filters == before


def test_torch_compile_is_not_heard_of_our_hooks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        marks_module._let_compile_ignore_our_hooks()
        warnings.warn("Using `torch.compile(module)` when there are global hooks on modules", stacklevel=1)


def test_a_module_may_have_a_list_by_the_name_of_buffers() -> None:
    """As Megatron's DistributedDataParallel has."""
    module = torch.nn.Linear(1, 1)
    module.buffers = []
    assert not marks_module._is_on_a_card(module)


def test_a_parametrized_weight_that_is_read_is_no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bitsandbytes' 4-bit experts are while a model loads: what follows is still loading."""
    monkeypatch.setattr(marks_module, "_is_on_a_card", lambda module: True)
    marked: list[str] = []
    marks = object.__new__(Marks)
    marks._phases = SimpleNamespace(mark=marked.append, is_outside=False)
    marks._depth, marks._roots = {"forward": 0, "backward": 0}, set()
    marks._discovery, marks._is_settled, marks._on_forward = None, False, lambda module: None
    marks._discover()
    try:
        layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
        with torch.no_grad():
            assert layer.weight.shape == (2, 2)
            read = list(marked)
            layer(torch.ones(1, 2))
    finally:
        marks._look_away()
    assert read == []
    assert marked == ["evaluation", "other"]
