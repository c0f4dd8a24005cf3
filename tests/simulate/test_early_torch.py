"""torch's library is there before torch is, once, and torch takes it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import HERE

from vramprobe.simulate import early_torch

BEFORE_TORCH = """
import sys
from pathlib import Path
from vramprobe.simulate.early_torch import load_library

def mapped():
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libtorch_cpu" in line}

assert not mapped()
load_library().join()
before = mapped()
assert len(before) == 1 and "torch" not in sys.modules, before
import torch
assert mapped() == before
assert torch.ones(3).sum().item() == 3
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is loaded early")
def test_the_library_is_loaded_before_torch_and_only_once() -> None:
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", BEFORE_TORCH], capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, done.stderr


def test_where_there_is_no_torch_or_no_such_file_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_torch.ctypes, "CDLL", lambda path: pytest.fail("a library is loaded"))
    monkeypatch.setattr(early_torch, "find_spec", lambda name: None)
    early_torch._load()
    (tmp_path / "__init__.py").touch()
    spec = importlib.util.spec_from_file_location("torch", tmp_path / "__init__.py")
    monkeypatch.setattr(early_torch, "find_spec", lambda name: spec)
    early_torch._load()
