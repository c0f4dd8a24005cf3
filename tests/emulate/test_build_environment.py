"""An environment of its own with a CUDA build: its pins, its steps, what cuts it off, what it refuses."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fake_installation
import pytest

from vramprobe.catalog.shipped import data_file
from vramprobe.emulate import environment
from vramprobe.emulate.build import BuildError
from vramprobe.emulate.environment import (
    SetupError,
    find_environment,
    list_environments,
    pinned_torch,
    remove_environment,
    set_up_environment,
)
from vramprobe.emulate.installation import NotEmulatable
from vramprobe.emulate.values.hook import PTH_LINE
from vramprobe.errors import MissingDependency

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def pins() -> dict[str, str]:
    lines = data_file("emulated_environment.txt").read_text().splitlines()
    return dict(re.split("={2,3}", line) for line in lines if not line.startswith("#"))


class Commands:
    """Stands for venv and pip: makes what they would, and remembers what was asked."""

    def __init__(self, version: str = fake_installation.VERSION) -> None:
        self.asked: list[list[str]] = []
        self.version = version
        self.fails_at = ""
        self.words = "ERROR: no such package"

    def __call__(self, command, **_) -> subprocess.CompletedProcess:
        self.asked.append([str(part) for part in command])
        line = " ".join(self.asked[-1])
        if self.fails_at and self.fails_at in line:
            return subprocess.CompletedProcess(command, 1, stdout="", stderr=self.words)
        if " -m venv " in line:
            folder = Path(command[-1])
            (folder / "bin").mkdir(parents=True)
            (folder / "bin" / "python").symlink_to(sys.executable)
            (folder / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
        elif "torch===" in line:
            site = next(Path(command[0]).parents[1].glob("lib/*/site-packages"))
            metadata = fake_installation.METADATA + "Requires-Dist: triton==3.7.1; x\n"
            fake_installation.write_torch(site, self.version, metadata)
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")


@pytest.fixture
def commands(cache, monkeypatch) -> Commands:
    stand_in = Commands()
    monkeypatch.setattr(environment.subprocess, "run", stand_in)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9e9, 1e9, 8e9))
    return stand_in


def test_the_pins_are_the_packages_own():
    constraints = dict(
        line.split("==") for line in CONSTRAINTS.read_text().splitlines() if line and not line.startswith("#")
    )
    ours = pins()
    assert {name: version for name, version in ours.items() if constraints.get(name, version) != version} == {}
    assert set(ours) - set(constraints) == {"setuptools"}  # torch asks for it


def test_the_pins_are_closed_and_hold_nothing_of_nvidias_libraries():
    """Every package that a pinned one needs is pinned too (where the pinned one is installed here to be asked)."""
    from importlib import metadata

    from packaging.requirements import Requirement

    names = {environment._name(name) for name in pins()}
    missing = set()
    for name in sorted(names - {"torch"}):
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        wanted = [Requirement(need) for need in needs]
        wanted = [need for need in wanted if need.marker is None or need.marker.evaluate({"extra": ""})]
        missing |= {environment._name(need.name) for need in wanted} - names
    assert missing <= {"triton"}  # torch's own metadata says which
    assert [name for name in names if name.startswith("nvidia")] == ["nvidia-ml-py"]


def test_torch_is_asked_for_exactly_and_alone_then_all_else_without_needs(commands):
    lines = []
    python = set_up_environment(say=lines.append)
    venv, torch, rest = commands.asked
    assert venv[1:3] == ["-m", "venv"]
    assert torch[-1] == f"torch==={pinned_torch()}"
    assert "--no-deps" in torch
    assert "--no-deps" in rest
    assert "triton==3.7.1" in rest
    assert "transformers==5.23.0" in rest
    assert not any(part.startswith("torch=") for part in rest)
    assert [line[:3] for line in lines] == ["1/3", "2/3", "3/3", "rea"]
    assert python == find_environment()
    (hook,) = python.parents[1].glob("lib/*/site-packages/vramprobe.pth")
    assert hook.read_text() == PTH_LINE
    assert list_environments() == [pinned_torch()]


def test_one_that_is_ready_is_used_and_another_choice_of_packages_makes_it_anew(commands):
    set_up_environment()
    set_up_environment()
    assert len(commands.asked) == 3
    set_up_environment(packages=["transformers==5.20.0", "trl==1.0"])
    assert len(commands.asked) == 4  # torch stays
    assert {"transformers==5.20.0", "trl==1.0"} <= set(commands.asked[-1])
    assert "transformers==5.23.0" not in commands.asked[-1]
    assert "--force-reinstall" in commands.asked[-1]


def test_what_was_cut_off_is_not_ready_and_goes_on_where_it_was_whole(commands):
    commands.fails_at = "transformers"
    with pytest.raises(SetupError, match=r"pip install failed \(1\): ERROR: no such package"):
        set_up_environment()
    assert find_environment() is None
    commands.fails_at = ""
    set_up_environment()
    assert [" ".join(asked).count("torch===") for asked in commands.asked] == [0, 1, 0, 0]
    assert find_environment() is not None


def test_a_torch_that_was_cut_off_is_made_anew(commands):
    commands.fails_at = "torch==="
    with pytest.raises(SetupError, match="pip install torch==="):
        set_up_environment()
    commands.fails_at = ""
    set_up_environment()
    assert sum("-m venv" in " ".join(asked) for asked in commands.asked) == 2


def test_a_cpu_build_under_that_version_is_said(commands):
    commands.version = fake_installation.VERSION.replace("'13.0'", "None")
    with pytest.raises(NotEmulatable, match="is a build without CUDA"):
        set_up_environment()
    assert find_environment() is None


def test_a_full_disk_is_named_before_and_during(commands, monkeypatch):
    commands.fails_at, commands.words = "torch===", "ERROR: Could not install: [Errno 28] No space left on device"
    with pytest.raises(BuildError, match=r"the cache folder .*environments is full: .*VRAMPROBE_CACHE_DIR"):
        set_up_environment()
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9e9, 8e9, 1e9))
    with pytest.raises(SetupError, match=r"has 1\.0 GB free, .* needs about 6 GB .* VRAMPROBE_CACHE_DIR"):
        set_up_environment()


def test_a_python_without_ensurepip_is_told_what_to_install(commands):
    commands.fails_at, commands.words = "-m venv", "The virtual environment was not created: ensurepip is not available"
    with pytest.raises(MissingDependency, match=r"lacks ensurepip .*apt-get install python3-venv"):
        set_up_environment()


@pytest.mark.parametrize(
    ("torch", "says"), [("2.2.0", "torch 2.2.0 is too old"), ("newest", "'newest' is no version of torch")]
)
def test_a_version_that_cannot_be(commands, torch, says):
    with pytest.raises(SetupError, match=says):
        set_up_environment(torch)
    assert commands.asked == []


def test_it_can_be_removed(commands):
    assert remove_environment() is False
    python = set_up_environment()
    (python.parents[1] / "vramprobe-ready.json").write_text(json.dumps({}))
    assert remove_environment() is True
    assert find_environment() is None


def test_no_name_removes_a_folder_elsewhere(commands):
    home = set_up_environment().parents[2]
    (home.parent / "precious").mkdir()
    with pytest.raises(SetupError, match="is no version of torch"):
        remove_environment(f"{pinned_torch()}/../../precious")
    assert (home.parent / "precious").is_dir()
