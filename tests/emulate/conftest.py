"""Fixtures of the emulated GPU's build: a fake installation of torch, a small driver, a cache."""

import os
import shutil
import sys
from pathlib import Path

import fake_installation
import pytest
from driver_process import driver_library, in_process, make_machine, start_process

__all__ = ["driver_library", "in_process", "make_machine", "start_process"]  # fixtures of the driver's tests


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder, as VRAMPROBE_CACHE_DIR."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("VRAMPROBE_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def fake_driver(tmp_path, monkeypatch) -> Path:
    """A driver of a few functions in the place of the real one's sources."""
    _require_tools()
    from vramprobe.emulate import build, version

    source = tmp_path / "driver.c"
    source.write_text(fake_installation.DRIVER)
    for module in (build, version):
        monkeypatch.setattr(module, "driver_sources", lambda: (source,))
    return source


@pytest.fixture(scope="session")
def compiled_site(tmp_path_factory) -> Path:
    """A fake installation of torch with NVIDIA's packages, compiled once; nobody changes it."""
    _require_tools()
    return fake_installation.write_installation(tmp_path_factory.mktemp("torch") / "site-packages")


@pytest.fixture
def installation(tmp_path, fake_driver, compiled_site):
    """A copy of it for one test, which may change it."""
    from vramprobe.emulate.installation import installation_in

    site = Path(shutil.copytree(compiled_site, tmp_path / "site-packages"))
    return installation_in([site], Path(sys.executable))


@pytest.fixture(scope="session")
def built(compiled_site, tmp_path_factory):
    """The build for the installation that nobody changes; nobody changes it either."""
    from vramprobe.emulate import build
    from vramprobe.emulate.installation import installation_in

    folder = tmp_path_factory.mktemp("built")
    (folder / "driver.c").write_text(fake_installation.DRIVER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VRAMPROBE_CACHE_DIR", str(folder / "cache"))
        patch.setattr(build, "driver_sources", lambda: (folder / "driver.c",))
        return build.ensure_build(installation_in([compiled_site], Path(sys.executable)))


@pytest.fixture
def built_here(installation, cache):
    """A build of one test's own."""
    from vramprobe.emulate.build import ensure_build

    return ensure_build(installation)


def cuda_pythons() -> list[Path | None]:
    """Interpreters with a CUDA build of torch: $VRAMPROBE_CUDA_PYTHONS, else the set-up one, else a None to skip by."""
    from vramprobe.emulate.environment import find_environment

    named = [Path(part) for part in os.environ.get("VRAMPROBE_CUDA_PYTHONS", "").split(":") if part]
    return named or [find_environment()]


@pytest.fixture(scope="module", params=cuda_pythons(), ids=str)
def cuda_build(request, tmp_path_factory):
    """The build for one of them, in a cache of its own."""
    from vramprobe.emulate.build import ensure_build
    from vramprobe.emulate.installation import find_installation
    from vramprobe.emulate.version import driver_sources

    if request.param is None:
        pytest.skip("no CUDA build of torch here: `vramprobe emulate setup` makes one")
    if not driver_sources():
        pytest.skip("this checkout has no driver")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VRAMPROBE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return ensure_build(find_installation(request.param))


def _require_tools() -> None:
    pytest.importorskip("elftools", reason="needs pyelftools: pip install 'vramprobe[emulate]'")
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
