"""Intervals, runs of bytes, sequences of allocations, the hook: the parts of the values layer that need no mode."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vramprobe.emulate import values
from vramprobe.emulate.values import allocations, hook, reads
from vramprobe.emulate.values.intervals import Intervals
from vramprobe.emulate.values.memory import alias, runs, span


def test_intervals_agree_with_a_set():
    chance, found, model = random.Random(0), Intervals(), set()
    for _ in range(3000):
        start = chance.randrange(200)
        stop = start + chance.randrange(20)
        if chance.random() < 0.5:
            found.add(start, stop)
            model |= set(range(start, stop))
        else:
            found.discard(start, stop)
            model -= set(range(start, stop))
        low = chance.randrange(200)
        asked = set(range(low, low + chance.randrange(1, 10)))
        assert found.overlaps(min(asked), max(asked) + 1) == bool(asked & model)
        assert found.covers(min(asked), max(asked) + 1) == (asked <= model)
    assert [at for start, stop in found for at in range(start, stop)] == sorted(model)


def test_runs_are_the_bytes_of_the_elements():
    x = torch.arange(120, dtype=torch.int16).reshape(4, 5, 6)
    for view in (
        x,
        x[1],
        x[:, 1],
        x[..., 2:4],
        x.permute(2, 0, 1),
        x[::2, :, ::3],
        x[0, 0, 0],
        x[:, :0],
        x[:1].expand(3, 5, 6),
    ):
        expected = {int(i) * 2 + b for i in view.flatten() for b in (0, 1)}
        found = [at - x.data_ptr() + b for at, n in runs(view) for b in range(n)]
        assert sorted(found) == sorted(expected)
        if view.numel():
            address, num_bytes = span(view)
            assert (address - x.data_ptr(), num_bytes) == (min(expected), max(expected) + 1 - min(expected))


def test_an_alias_is_the_same_memory():
    x = torch.zeros(4, 6, dtype=torch.float64)[:, 1::2]
    alias(x).fill_(3)
    assert x.tolist() == [[3.0] * 3] * 4


def history(*entries):
    """A snapshot's history of (action, address, size); entry i comes from line i of a.py."""
    trace = [
        {"action": action, "addr": address, "size": size, "frames": [{"filename": "a.py", "line": line}]}
        for line, (action, address, size) in enumerate(entries)
    ]
    return {"device_traces": [trace]}


def test_equal_sequences_at_other_addresses_are_equal():
    one = history(("segment_alloc", 0, 100), ("alloc", 0, 40), ("alloc", 40, 60), ("free_completed", 0, 40))
    other = history(("segment_alloc", 7, 100), ("alloc", 7, 40), ("alloc", 90, 60), ("free_completed", 7, 40))
    first, second = allocations.events(one), allocations.events(other)
    assert allocations.parting(first, second) is None


def test_a_place_that_is_taken_again_is_another_block():
    again = history(("alloc", 0, 40), ("free_completed", 0, 40), ("alloc", 0, 40), ("alloc", 40, 60))
    elsewhere = history(("alloc", 0, 40), ("free_completed", 0, 40), ("alloc", 80, 40), ("alloc", 120, 60))
    assert allocations.parting(allocations.events(again), allocations.events(elsewhere)) is None


def test_the_first_place_where_sequences_part_is_named():
    base = [("alloc", 0, 40), ("alloc", 40, 60), ("free_completed", 0, 40)]
    first = allocations.events(history(*base))
    freed = allocations.events(history(*base[:2], ("free_completed", 40, 40)))
    found = allocations.parting(first, freed)
    assert (found["index"], found["first"]["frames"], found["second"]["block"]) == (2, ["a.py:2"], 1)
    shorter = allocations.parting(first, first[:2])
    assert (shorter["index"], shorter["second"], shorter["num_first"], shorter["num_second"]) == (2, None, 3, 2)


@pytest.mark.parametrize(
    ("is_float", "num_elements", "branches", "shape", "expected"),
    [
        (True, 1, False, False, "number"),
        (False, 1, False, False, "control"),
        (True, 1, True, False, "control"),
        (True, 4096, False, False, "bulk"),
        (False, 4096, False, True, "control"),
    ],
)
def test_kinds_of_reads(is_float, num_elements, branches, shape, expected):
    assert reads.kind_of(is_float, num_elements, branches, shape) == expected


def test_no_driver_is_said_in_one_line():
    with pytest.raises(values.NoEmulatedDriver, match="no emulated GPU in this process") as error:
        values.enable()
    assert "\n" not in str(error.value)
    assert values.enabled() is None


def test_the_package_imports_nothing_but_the_standard_library_and_says_so_late():
    script = (
        "import sys, vramprobe.emulate.values.hook, vramprobe.emulate.values.allocations\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'numpy', 'pydantic', 'pandas'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_hook_reports_from_any_process_without_failing_it(tmp_path):
    hook.site_folder(tmp_path)
    (tmp_path / "start.py").write_text(hook.PTH_LINE + "import torch\nprint(torch.ones(2).tolist())\n")
    environment = {"VRAMPROBE_EMULATED_MACHINE": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, tmp_path / "start.py"], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, "[1.0, 1.0]")
    (path,) = tmp_path.glob("values-*.json")
    assert "no emulated GPU" in json.loads(path.read_text())["error"]
    assert "values are not watched" in done.stderr


def test_every_python_below_the_site_folder_is_watched_and_its_own_sitecustomize_runs(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys\nsys.own = __name__, __file__\n")
    (tmp_path / "child.py").write_text("import sys, torch\nprint(sys.own)\n")
    parent = (
        f"import os, subprocess, sys\nsubprocess.run([sys.executable, {str(tmp_path / 'child.py')!r}], check=True)\n"
    )
    (tmp_path / "parent.py").write_text(parent)
    searched = f"{hook.site_folder(tmp_path)}:{own}"
    environment = {"VRAMPROBE_EMULATED_MACHINE": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": searched}
    done = subprocess.run([sys.executable, tmp_path / "parent.py"], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, str(("sitecustomize", str(own / "sitecustomize.py"))))
    (path,) = tmp_path.glob("values-*.json")  # the child alone imports torch
    assert json.loads(path.read_text())["arguments"] == [str(tmp_path / "child.py")]


def test_a_hook_that_cannot_be_loaded_is_said_and_fails_nobody(tmp_path):
    watch = Path(hook.site_folder(tmp_path), "vramprobe_watch.py")
    watch.write_text(watch.read_text().replace("__init__.py", "gone.py"))
    environment = {"VRAMPROBE_EMULATED_MACHINE": str(tmp_path), "PYTHONPATH": str(watch.parent)}
    done = subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, "1")
    assert "this process is not watched: FileNotFoundError" in done.stderr


def test_an_operator_is_learned_under_a_torch_that_has_fewer_functions(monkeypatch):
    """torch 2.4 has no OpOverload._can_decompose, and its profiler's operators come by in every data loader."""
    monkeypatch.delattr(torch._ops.OpOverload, "_can_decompose", raising=False)
    from vramprobe.emulate.values.operators import Operator

    assert not Operator(torch.ops.profiler._record_function_enter_new.default).parts
    assert Operator(torch.ops.aten.matmul.default).composite


def test_an_operator_that_the_dispatcher_does_not_know_has_no_parts():
    from vramprobe.emulate.values.operators import Operator

    assert not Operator(torch.ops.prim.device.default).parts


def test_the_hook_does_nothing_without_a_machine(monkeypatch, capsys):
    monkeypatch.delenv(hook.MACHINE, raising=False)
    before = list(sys.meta_path)
    hook.install()
    assert sys.meta_path == before
    assert capsys.readouterr().err == ""
