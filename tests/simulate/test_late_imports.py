"""Modules that are put off load themselves when they are asked for something, once; a simulation asks none."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec
from pathlib import Path

import pytest
from command_line import HERE
from factories import TINY_LLAMA_PATH

pytest.importorskip("torch")

from vramprobe.emulate.values.imports import when_imported
from vramprobe.simulate import late_imports, late_modules

CODE = {
    "__init__": "from . import words\nfrom .heavy import weigh\nlog = ['package']\nname = 'true'",
    "words": "text = 'words'",
    "heavy": "from . import words\nclass Kind:\n    def __init__(self, size):\n        self.size = size\ndef weigh():\n"
             "    return words.text",
}  # fmt: skip


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """outer.inner, whose parts import each other as a compiler's do: heavy needs its package, words nothing."""
    folder = tmp_path / "outer" / "inner"
    folder.mkdir(parents=True)
    (tmp_path / "outer" / "__init__.py").write_text("")
    for name, text in CODE.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield "outer.inner"
    for name in [name for name in sys.modules if name.partition(".")[0] == "outer"]:
        del sys.modules[name]


def put_off(package: str, *light: str, **stand_ins: object) -> object:
    assert late_modules.put_off_module(package, lambda late: stand_ins, light=("words", *light))
    return sys.modules[package]


def test_a_late_module_is_its_true_self_from_the_first_question_on(package: str) -> None:
    late = put_off(package, name="stand-in")
    assert importlib.import_module(package) is late
    assert late.name == "stand-in"
    assert not hasattr(late, "__wrapped__")  # as inspect asks of every module
    assert late_modules.is_late(late)
    assert late.log == ["package"]
    assert not late_modules.is_late(late)
    assert late.name == "true"
    with pytest.raises(AttributeError):
        late.nothing  # noqa: B018
    assert late.log == ["package"]  # and did not run again


def test_a_light_part_leaves_its_package_late_and_another_loads_it_first(package: str) -> None:
    late = put_off(package)
    words = importlib.import_module(f"{package}.words")
    assert late_modules.is_late(late)
    heavy = importlib.import_module(f"{package}.heavy")
    assert not late_modules.is_late(late)
    assert late.heavy is heavy is sys.modules[f"{package}.heavy"]
    assert late.weigh is heavy.weigh  # one module, not two of one name
    assert heavy.words is words
    assert heavy.__spec__.loader is not None
    assert heavy.__spec__.origin == heavy.__file__


def test_what_is_loaded_or_not_there_is_not_put_off(package: str) -> None:
    before = importlib.import_module(package)
    assert not late_modules.put_off_module(package, lambda late: {})
    assert sys.modules[package] is before
    assert not late_modules.put_off_module("outer.nothing", lambda late: {})
    assert not late_modules.put_off_module("nowhere.at_all", lambda late: {})


def test_who_waits_for_a_module_meets_it_once(package: str) -> None:
    met: list[object] = []
    before = list(sys.meta_path)
    when_imported(f"{package}.words", met.append)
    words = importlib.import_module(f"{package}.words")
    assert met == [words]
    assert words.text == "words"
    assert sys.meta_path == before
    when_imported(f"{package}.words", met.append)
    assert met == [words, words]


def test_stand_ins_for_a_function_a_class_and_an_object(package: str) -> None:
    put_off(package, "heavy")
    assert late_modules.put_off_module(
        f"{package}.heavy",
        lambda late: {
            "weigh": late_modules.late_function(late, "weigh"),
            "Kind": late_modules.late_class(late, "Kind"),
            "Made": late_modules.late_object(late, "Kind"),
        },
    )
    late = sys.modules[f"{package}.heavy"]
    kind, weigh, made = late.Kind, late.weigh, late.Made(3)
    assert sys.modules[package].heavy is late
    assert not isinstance(made, kind)
    assert late_modules.is_late(late)
    assert made.size == 3
    assert not late_modules.is_late(late)
    assert isinstance(late.Kind(1), kind)
    assert weigh() == "words"
    assert sys.modules[package].weigh is late.weigh is not weigh  # its package met no stand-in


def test_a_function_is_compiled_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    asked = []

    def compiling(model: object, **options: object) -> object:
        asked.append((model, options))
        return lambda number: number + 1

    monkeypatch.setattr(torch, "compile", compiling)

    def double(number: int) -> int:
        return 2 * number

    with late_imports.compile_late():
        compiled = torch.compile(double, dynamic=False)
    assert torch.compile is compiling
    assert (asked, compiled.__name__) == ([], "double")
    assert (compiled(3), compiled(4)) == (4, 5)
    assert asked == [(double, {"dynamic": False})]


def test_what_model_files_export_is_what_transformers_reads_in_them() -> None:
    spec = find_spec("transformers.utils.import_utils")
    assert spec is not None
    own = module_from_spec(spec)
    spec.loader.exec_module(own)
    models = Path(spec.origin).parents[1] / "models"
    slow = own.create_import_structure_from_path(models)
    own.create_import_structure_from_path.cache_clear()
    given: list[str] = []
    fetch = own.fetch__all__
    own.fetch__all__ = lambda content: given.append(content) or fetch(content)
    late_imports._read_its_files_fast(own)
    assert own.create_import_structure_from_path(models) == slow
    assert given
    assert all(text.startswith("__all__") or "__all__" not in text for text in given)


IN_ONE_PROCESS = f"""
import sys
from vramprobe import api
from vramprobe.simulate.late_modules import is_late

cell = dict(model={str(TINY_LLAMA_PATH)!r}, method="qlora", batch_size=1, seq_len=16, gradient_checkpointing=True)
before = api.simulate(**cell)
import torch
put_off = ["torch._dynamo", "torch._dynamo.source", "scipy.optimize", "triton"]
loaded = [name for name in put_off if name in sys.modules and not is_late(sys.modules[name])]
assert not loaded, loaded
assert "torch._inductor.compile_fx" not in sys.modules

from torch._dynamo.utils import counters
from transformers.integrations import finegrained_fp8
assert not is_late(sys.modules["torch._dynamo"]) and not is_late(sys.modules["torch._dynamo.source"])
assert sys.modules["torch._dynamo"].utils.counters is counters
function = torch.compile(lambda x: torch.sin(x) * 2, backend="eager", fullgraph=True)
assert torch.equal(function(torch.ones(3)), torch.sin(torch.ones(3)) * 2)
assert counters["stats"]["unique_graphs"] == 1
from scipy.optimize import linear_sum_assignment
assert [list(part) for part in linear_sum_assignment([[4, 1], [2, 3]])] == [[0, 1], [1, 0]]
after = api.simulate(**cell)
assert (before.peak, before.phases, before.ledger) == (after.peak, after.phases, after.ledger)
"""


AS_A_COMMAND = f"""
import sys
from vramprobe.cli.verbs import app
from vramprobe.simulate.late_imports import _OF_SEVERAL_RANKS
from vramprobe.simulate.late_modules import is_late

words = ["simulate", "--model", {str(TINY_LLAMA_PATH)!r}, "--method", "qlora", "--batch-size", "1", "--seq-len", "16"]
app([*words, "--json"], standalone_mode=False)
symbols = ["sympy", "torch.utils._sympy.functions", "torch.fx.experimental.symbolic_shapes"]
names = [*symbols, *(name for name, _, _ in _OF_SEVERAL_RANKS)]
loaded = [name for name in names if name in sys.modules and not is_late(sys.modules[name])]
assert not loaded, loaded

from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Shard as same
assert isinstance(Shard(0), same) and isinstance(Shard(0), Shard) and not isinstance(Replicate(), Shard)
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import ColwiseParallel
assert isinstance(ALL_PARALLEL_STYLES["colwise"], ColwiseParallel)
"""


def test_a_command_loads_nothing_of_several_ranks_and_leaves_it_whole() -> None:
    done = subprocess.run([sys.executable, "-c", AS_A_COMMAND], capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, done.stderr


def test_a_simulation_loads_no_compiler_and_leaves_a_whole_one() -> None:
    done = subprocess.run([sys.executable, "-c", IN_ONE_PROCESS], capture_output=True, text=True, env=None, cwd=HERE)
    assert done.returncode == 0, done.stderr
