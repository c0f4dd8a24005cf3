"""The package ``profile/empty`` as a command's processes have it."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from vramprobe.profile import stand_ins


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """The package as a command's processes have it."""
    for name, folder in (("vramprobe_values", "emulate/values"), ("vramprobe_empty", "profile/empty")):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(stand_ins.__file__).parents[1] / folder)]
        monkeypatch.setitem(sys.modules, name, package)
    names = [
        "added_rows",
        "audio",
        "checkpoint",
        "counts",
        "folders",
        "hub",
        "hub_kernels",
        "images",
        "processors",
        "quantised",
    ]
    yield types.SimpleNamespace(
        monkeypatch=monkeypatch,
        **{
            name: importlib.import_module(f"vramprobe_empty.{name}")
            for name in [*names, "rows", "tokenizer", "replacements", "torch_hub", "videos", "yolo"]
        },
    )
    for name in [name for name in sys.modules if name.startswith(("vramprobe_empty", "vramprobe_values"))]:
        sys.modules.pop(name, None)
