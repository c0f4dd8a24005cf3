"""An action waits for a module's import, runs once, and leaves the import system as it was."""

import importlib
import sys
from pathlib import Path

import pytest

from vramprobe.emulate.values.imports import when_imported


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "waited_for").mkdir()
    (tmp_path / "waited_for" / "__init__.py").write_text("")
    (tmp_path / "waited_for" / "words.py").write_text("text = 'words'")
    monkeypatch.syspath_prepend(tmp_path)
    return "waited_for"


def test_an_action_runs_once_after_the_import_and_at_once_where_it_is_done(package: str) -> None:
    met: list[object] = []
    before = list(sys.meta_path)
    when_imported(f"{package}.words", met.append)
    assert importlib.util.find_spec(f"{package}.words") is not None
    assert met == []
    words = importlib.import_module(f"{package}.words")
    assert met == [words]
    assert words.text == "words"
    assert sys.meta_path == before
    when_imported(f"{package}.words", met.append)
    assert met == [words, words]
    for name in (f"{package}.words", package):
        del sys.modules[name]
