"""What libraries import and a simulation never runs is loaded when somebody asks for it: half of a cold start.

In: nothing; :func:`put_off` and :func:`compile_late` stand before the imports. Out: modules that load themselves, whole
and in place, at the first name that is asked of them; so a process that simulates may compile and measure afterwards.
Only a simulation does this: a worker that measures imports what its libraries import. Changes nothing of what runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

from vramprobe.emulate.values.imports import when_imported
from vramprobe.simulate.late_modules import (
    LateModule,
    is_late,
    late_class,
    late_function,
    late_object,
    put_off_module,
)  # fmt: skip
from vramprobe.simulate.number_questions import answers_to_numbers

# Modules, and the classes and functions that others take from them by name: what no simulation runs,
_NOT_RUN: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("sympy", ("Basic", "Expr", "Float", "Integer", "Symbol"), ()),
    ("torch.utils._sympy.functions", ("Max",), ()),
    ("scipy.optimize", (), ("linear_sum_assignment",)),
)
# and what a process needs that trains on several ranks.
_OF_SEVERAL_RANKS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("torch.distributed.tensor", ("DTensor", "Shard"), ()),
    ("torch.distributed.tensor._utils", (), ("compute_local_shape_and_global_offset",)),
    ("torch.distributed.tensor.placement_types", ("Shard", "_StridedShard"), ()),
    ("torch.distributed.fsdp", ("CPUOffloadPolicy", "MixedPrecisionPolicy"), ()),
    ("torch.distributed._composable.fsdp", (), ("fully_shard",)),
    ("torch.distributed.checkpoint", (), ()),
    ("torch.distributed.checkpoint.hf_storage", ("HuggingFaceStorageReader", "HuggingFaceStorageWriter"), ()),
    ("transformers.distributed.expert_parallel", (), ("apply_expert_parallelism",)),
    ("transformers.distributed.tensor_parallel", (), (
        "apply_tensor_parallelism", "gather_state_dict_for_save", "get_kv_heads_per_rank", "verify_tp_plan",
    )),
)  # fmt: skip
_THEIR_LIGHT_PARTS = ("_utils", "placement_types", "hf_storage")


def put_off(*, ranks_too: bool = False) -> None:
    """Put off what is imported and not run: 3 s in all, where it is not loaded yet.

    PyTorch's compiler (by transformers' masks, every optimizer's step and fake tensors, for words that do nothing while
    nothing is compiled), its symbolic shapes (sympy; by fake tensors, whose sizes are numbers here), Triton (by
    bitsandbytes, to know whether it is there), scipy's optimizers (by a loss for object detection).

    ``ranks_too``: what several ranks need as well (1.5 s): DTensor, FSDP, checkpoints, transformers' parallel layers.
    For a process that simulates and ends: until one of those is asked for, transformers does not know them by name.
    """
    when_imported("transformers.utils.import_utils", _read_its_files_fast)
    if put_off_module(
        "torch._dynamo", _words_of_the_compiler, light=("config", "source", "_trace_wrapped_higher_order_op")
    ):
        put_off_module("torch._dynamo.source", lambda late: {
            "RandomValueSource": late_class(late, "RandomValueSource"),
            "ConstantSource": late_object(late, "ConstantSource"), "AttrSource": late_object(late, "AttrSource"),
        })  # fmt: skip
    put_off_module("torch.fx.experimental.symbolic_shapes", answers_to_numbers)
    if put_off_module("triton", lambda late: {}, light=("language",)):
        put_off_module("triton.language", lambda late: {})
    for name, classes, functions in (*_NOT_RUN, *(_OF_SEVERAL_RANKS if ranks_too else ())):
        stand_ins = functools.partial(_named, classes=classes, functions=functions)
        put_off_module(name, stand_ins, light=_THEIR_LIGHT_PARTS)


def _read_its_files_fast(import_utils: ModuleType) -> None:
    """transformers reads its 2,000 model files as it is imported, for what they export.

    Twice, since its cache holds 128 folders of 550; and line by line to ``__all__``, which is at the end of a file.
    """
    scan = getattr(import_utils, "create_import_structure_from_path", None)
    if hasattr(scan, "__wrapped__"):
        import_utils.create_import_structure_from_path = functools.cache(scan.__wrapped__)  # type: ignore[attr-defined]
    fetch = getattr(import_utils, "fetch__all__", None)
    if fetch is not None:
        import_utils.fetch__all__ = lambda content: fetch(content[content.find("\n__all__") + 1 :])  # type: ignore[attr-defined]


@contextmanager
def compile_late() -> Iterator[None]:
    """While open, a function given to ``torch.compile`` is compiled when it is first called; bitsandbytes has four."""
    import torch

    compile_now = torch.compile

    def compile_at_first_call(model: Any = None, **options: Any) -> Any:
        if not isinstance(model, FunctionType):
            return compile_now(model, **options)
        compiled = functools.cache(lambda: compile_now(model, **options))
        return functools.wraps(model)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    with patch.object(torch, "compile", compile_at_first_call):
        yield


def _named(late: LateModule, *, classes: tuple[str, ...], functions: tuple[str, ...]) -> dict[str, Any]:
    return {name: late_class(late, name) for name in classes} | {name: late_function(late, name) for name in functions}


def _words_of_the_compiler(late: LateModule) -> dict[str, Any]:
    """What says to ``torch.compile`` how to go about a function; until that is loaded there is nobody to tell.

    torch/_dynamo/decorators.py. The two that mark a function do so as soon as the compiler is there.
    """

    def disable(fn: Any = None, *args: Any, **options: Any) -> Any:
        if fn is None:
            return lambda given: disable(given, *args, **options)
        disabled = functools.cache(lambda: late.disable(fn, *args, **options))

        @functools.wraps(fn)
        def call(*words: Any, **named: Any) -> Any:
            return (fn if is_late(late) else disabled())(*words, **named)

        return call

    def mark(name: str) -> Callable[[Any], Any]:
        def marked(fn: Any) -> Any:
            late._when_loaded.append(lambda: getattr(late, name)(fn))
            return fn

        return marked

    return {
        "disable": disable, "graph_break": lambda msg="": None,
        "allow_in_graph": mark("allow_in_graph"), "assume_constant_result": mark("assume_constant_result"),
    }  # fmt: skip
