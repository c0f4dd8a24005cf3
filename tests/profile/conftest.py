"""The package ``profile/empty`` as a command's processes have it."""

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vramprobe.cli import display_profile
from vramprobe.emulate import values
from vramprobe.emulate.values import imports
from vramprobe.profile import stand_ins
from vramprobe.records.profile import ProfileRecord

# The names that the hook's modules import them by, in a profiled process.
sys.modules.setdefault("vramprobe_values", values)
sys.modules.setdefault("vramprobe_values.imports", imports)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[[ProfileRecord], str]:
    """Print a profile: its words with one space between them."""

    def words(record: ProfileRecord) -> str:
        display_profile.print_profile(record)
        return " ".join(capsys.readouterr().out.split())

    return words


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """The package as a command's processes have it."""
    for name, folder in (("values", "emulate/values"), ("profile", "profile/hook"), ("empty", "profile/empty")):
        package = types.ModuleType(f"vramprobe_{name}")
        package.__path__ = [str(Path(stand_ins.__file__).parents[1] / folder)]
        monkeypatch.setitem(sys.modules, package.__name__, package)
    names = (
        "checkpoint counts downloads hub loading media pipelines present processors quantised replacements rows "
        "tokenizer yolo"
    )
    modules = {name: importlib.import_module(f"vramprobe_empty.{name}") for name in names.split()}
    yield types.SimpleNamespace(monkeypatch=monkeypatch, **modules)
    for name in [
        name for name in sys.modules if name.startswith(("vramprobe_empty", "vramprobe_profile", "vramprobe_values"))
    ]:
        sys.modules.pop(name, None)
