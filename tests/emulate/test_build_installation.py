"""Detection of torch from its files, and each refusal in one line that says what to do."""

import platform
import sys
from pathlib import Path

import pytest
from fake_installation import METADATA, VERSION, write_torch

from vramprobe.emulate.installation import NotEmulatable, find_installation, installation_in, require_platform

PYTHON = Path("/opt/python")


def test_versions_are_read_from_the_files_as_nvidias_functions_write_them(tmp_path):
    found = installation_in([tmp_path / "empty", write_torch(tmp_path / "site-packages")], PYTHON)
    assert found.torch_version == "2.13.0+cu130"
    assert (found.cuda_version, found.cudnn_version, found.nccl_version) == (13000, 92000, 22907)


def test_older_metadata_is_read_too(tmp_path):
    version = VERSION.replace("2.13.0+cu130", "2.4.1+cu121").replace("'13.0'", "'12.1'")
    metadata = "Requires-Dist: nvidia-cudnn-cu12 (==8.9.2.26) ; x\nRequires-Dist: nvidia-nccl-cu12 (==2.20.5) ; x\n"
    found = installation_in([write_torch(tmp_path, version, metadata)], PYTHON)
    assert (found.cuda_version, found.cudnn_version, found.nccl_version) == (12010, 8902, 22005)


def test_a_build_that_names_no_library_has_the_oldest_that_will_do(tmp_path):
    found = installation_in([write_torch(tmp_path, metadata="Name: torch\n")], PYTHON)
    assert (found.cudnn, found.nccl) == (None, None)
    assert (found.cudnn_version, found.nccl_version) == (90100, 22005)


@pytest.mark.parametrize(
    ("version", "says"),
    [
        (VERSION.replace("'13.0'", "None"), ["a build without CUDA", "vramprobe emulate setup --torch 2.13.0"]),
        (VERSION.replace("'13.0'", "None").replace("hip: Optional[str] = None", "hip = '6.4'"), ["a ROCm build"]),
        (VERSION.replace("2.13.0+cu130", "2.2.2+cu121"), ["torch 2.2.2+cu121, too old", "2.3 or newer"]),
        (VERSION.replace("'13.0'", "'11.8'"), ["built for CUDA 11.8", "CUDA 12 or 13"]),
        ("broken = 1\n", ["too old"]),
    ],
    ids=["cpu", "rocm", "too-old", "cuda-11", "no-version"],
)
def test_a_torch_that_will_not_do_is_refused_in_one_line(tmp_path, version, says):
    with pytest.raises(NotEmulatable) as refusal:
        installation_in([write_torch(tmp_path, version, METADATA)], PYTHON)
    message = str(refusal.value)
    assert all(part in message for part in [*says, "vramprobe emulate setup"])
    assert "\n" not in message


def test_no_torch_is_refused(tmp_path):
    with pytest.raises(NotEmulatable, match=r"/opt/python has no torch.*`vramprobe emulate setup` sets up"):
        installation_in([tmp_path], PYTHON)


@pytest.mark.parametrize(
    ("system", "machine", "called"),
    [("Darwin", "arm64", "macOS on arm64"), ("Windows", "AMD64", "Windows on AMD64"), ("Linux", "aarch64", "Linux on")],
)
def test_another_platform_is_refused(monkeypatch, system, machine, called):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    for ask in (require_platform, find_installation):
        with pytest.raises(NotEmulatable) as refusal:
            ask()
        assert f"this is {called}" in str(refusal.value)
        assert "Linux x86-64 alone" in str(refusal.value)


def test_another_interpreter_is_asked_for_its_own_path(tmp_path):
    site = write_torch(tmp_path / "site-packages")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    assert find_installation(python).site_packages[0] == site


def test_a_python_too_old_is_refused(tmp_path):
    python = tmp_path / "python"
    says = '{"path": [], "version": [3, 9], "system": "Linux", "machine": "x86_64"}'
    python.write_text(f"#!/bin/sh\necho '{says}'\n")
    python.chmod(0o755)
    with pytest.raises(NotEmulatable, match=r"is Python 3\.9: an emulated GPU needs Python 3\.11"):
        find_installation(python)


def test_what_is_no_interpreter_is_refused(tmp_path):
    with pytest.raises(NotEmulatable, match="there is no interpreter at"):
        find_installation(tmp_path / "nowhere")
    (tmp_path / "text").write_text("no program")
    (tmp_path / "text").chmod(0o755)
    with pytest.raises(NotEmulatable, match="does not run as a Python interpreter"):
        find_installation(tmp_path / "text")
