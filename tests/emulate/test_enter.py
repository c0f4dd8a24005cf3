"""Folder that another interpreter imports this package from, and the environment that somebody else's command gets."""

import os
import shutil
import sys
from pathlib import Path

import pytest

import vramprobe
from vramprobe.emulate import build, enter, installation
from vramprobe.emulate.activate import plain_environment
from vramprobe.emulate.enter import package_home
from vramprobe.emulate.machine import read_machine


def test_a_checkout_is_searched_as_it_is(tmp_path):
    assert package_home(tmp_path) == Path(vramprobe.__file__).parents[1]
    assert list(tmp_path.iterdir()) == []


def test_of_an_environment_only_the_package_is_searched(tmp_path):
    package = tmp_path / "lib" / "site-packages" / "vramprobe"
    machine = tmp_path / "machine"
    for folder in (package, package.parent / "torch", machine):
        folder.mkdir(parents=True)
    home = package_home(machine, package)
    assert [path.name for path in home.iterdir()] == ["vramprobe"]
    assert (home / "vramprobe").resolve() == package
    assert home.is_relative_to(machine)  # it goes with the machine


def test_a_command_keeps_what_it_imports_from_behind_the_hook(built, tmp_path, monkeypatch):
    monkeypatch.setenv("VRAMPROBE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "theirs")
    monkeypatch.setattr(enter, "installation_to_use", lambda: pytest.fail("another interpreter was named"))
    monkeypatch.setattr(installation, "find_installation", lambda python: built.installation)
    monkeypatch.setattr(build, "ensure_build", lambda installation, say: built)
    way = enter.entrance_for_command(Path(sys.executable), "A100-80GB-SXM x2", policy={"contents": "ones"})
    assert way.python == Path(sys.executable)
    assert way.environment["PYTHONPATH"] == f"{way.machine / 'site'}:theirs"
    assert "PYTHONSAFEPATH" not in way.environment
    assert way.environment["VRAMPROBE_EMULATED_MACHINE"] == str(way.machine)
    assert way.environment["VRAMPROBE_VALUES_POLICY"] == '{"contents": "ones"}'
    assert read_machine(way.machine)[0] == 2
    assert shutil.which("nvidia-smi", path=way.environment["PATH"]) == str(way.machine / "bin" / "nvidia-smi")
    outside = plain_environment(way.environment)
    assert str(way.machine) not in outside["PATH"]
    assert outside["PATH"] == os.environ["PATH"]
