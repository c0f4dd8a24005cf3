"""Weights that transformers 5 would load in threads, on an emulated GPU."""

import importlib
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from vramprobe.profile import launch

PACKAGE = Path(launch.__file__).parents[1]


def loaded(loading: types.SimpleNamespace, is_quantized_already: bool | None) -> object:
    """The pool of ``convert_and_load_state_dict_in_model``, which has these locals in 5.0 to 5.23."""
    model, dtype = torch.nn.Linear(1 << 15, 1 << 15, bias=False, device="meta"), torch.bfloat16
    quantized = types.SimpleNamespace(pre_quantized=is_quantized_already)
    hf_quantizer = None if is_quantized_already is None else quantized
    _ = model, dtype, hf_quantizer  # who makes a pool sees them
    return loading.ThreadPoolExecutor(max_workers=4)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """``loading_threads.install`` as a command's processes have it; -> the remarks that will be made."""
    for name, folder in (("vramprobe_values", "emulate/values"), ("vramprobe_hook", "profile/hook")):
        package = types.ModuleType(name)
        package.__path__ = [str(PACKAGE / folder)]
        monkeypatch.setitem(sys.modules, name, package)
    for name in ("imports", "one_rank"):
        monkeypatch.delitem(sys.modules, f"vramprobe_values.{name}", raising=False)
    threads = importlib.import_module("vramprobe_hook.loading_threads")

    def act() -> list[str]:
        threads.install()
        return sys.modules["vramprobe_values.one_rank"].remarks

    yield act
    for name in [name for name in sys.modules if name.startswith(("vramprobe_values.", "vramprobe_hook."))]:
        sys.modules.pop(name)


@pytest.mark.parametrize(("is_quantized_already", "num_remarks"), [(None, 0), (True, 0), (False, 1)])
def test_one_weight_follows_the_other(
    install: Callable, is_quantized_already: bool | None, num_remarks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = types.SimpleNamespace(ThreadPoolExecutor=ThreadPoolExecutor)
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", loading)
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__="5.0.0"))
    remarks = install()
    assert loaded(loading, is_quantized_already) is None
    assert len(remarks) == num_remarks
    assert all("transformers 5.0.0 loads in 4 threads" in said and "2.00 GiB more" in said for said in remarks)


def test_transformers_makes_its_pool_so_still() -> None:
    """Without a pool it loads in order, as under HF_DEACTIVATE_ASYNC_LOAD."""
    from transformers import core_model_loading as loading

    code = loading.convert_and_load_state_dict_in_model.__code__
    assert {"hf_quantizer", "model", "dtype", "thread_pool"} <= {*code.co_varnames, *code.co_cellvars}
    assert loading.ThreadPoolExecutor is ThreadPoolExecutor
    assert callable(loading.spawn_materialize(None, torch.zeros(1)))
