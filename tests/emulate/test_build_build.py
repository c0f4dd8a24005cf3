"""The driver is built once, whole or not at all, for what is installed; and a process under it sees nothing else."""

import csv
import errno
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fake_installation
import pytest
from grids import exhaustive

from vramprobe.catalog.own import cache_folder
from vramprobe.emulate import MACHINE_VARIABLE, toolchain
from vramprobe.emulate import build as building
from vramprobe.emulate.activate import emulated_environment, plain_environment
from vramprobe.emulate.build import Build, ensure_build
from vramprobe.emulate.installation import NotEmulatable, installation_in
from vramprobe.emulate.toolchain import BuildError, NoCompiler, find_compiler
from vramprobe.emulate.version import emulator_version

ASK = """
import ctypes, sys
[ctypes.CDLL(path) for path in sys.argv[2:]]
torch = ctypes.CDLL(sys.argv[1])
print(torch.torch_version(), torch.torch_wait(), torch.torch_multiply())
"""


def run(build: Build | None, *command: str, **more: str) -> subprocess.CompletedProcess:
    environment = os.environ | more
    environment = (
        plain_environment(environment) if build is None else emulated_environment(build, Path("/m"), environment)
    )
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def ask(build: Build | None, installation, *first: str, **more: str) -> str:
    library = installation.site_packages[0] / "torch" / "lib" / "libtorch_cuda.so"
    done = run(build, sys.executable, "-c", ASK, str(library), *first, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_emulated_libraries_win_over_nvidias_packages_at_torchs_rpath(built):
    assert ask(None, built.installation) == f"{fake_installation.NVIDIAS_VERSION} 77 77"
    assert ask(built, built.installation) == "13000 0 0"


def test_they_win_after_torch_has_loaded_nvidias_by_their_paths(built):
    """As torch's _preload_cuda_deps does, where the packages are there."""
    nvidia = built.installation.site_packages[0] / "nvidia" / "cu13" / "lib"
    assert ask(built, built.installation, *map(str, nvidia.iterdir())) == "13000 0 0"


def test_they_win_over_a_library_path_of_the_users(built):
    nvidia = str(built.installation.site_packages[0] / "nvidia" / "cu13" / "lib")
    assert ask(built, built.installation, LD_LIBRARY_PATH=nvidia) == "13000 0 0"


def test_nvidias_files_are_not_needed_and_not_touched(built, fake_driver, tmp_path, cache):
    site = fake_installation.write_installation(tmp_path / "bare" / "site-packages", with_nvidia=False)
    bare = installation_in([site], Path(sys.executable))
    assert ask(ensure_build(bare), bare) == "13000 0 0"
    nvidia = built.installation.site_packages[0] / "nvidia" / "cu13" / "lib"
    assert sorted(path.name for path in nvidia.iterdir()) == ["libcublas.so.13", "libcudart.so.13"]


def test_processes_of_any_depth_and_language_see_it(built):
    library = built.installation.site_packages[0] / "torch" / "lib" / "libtorch_cuda.so"
    inner = f"{sys.executable} -c '{ASK}' {library}"
    done = run(built, "sh", "-c", f'bash -c "{inner}"')
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "13000 0 0", "")


def test_an_unknown_function_ends_the_run_with_its_name_and_pythons_line(built):
    library = built.installation.site_packages[0] / "torch" / "lib" / "libtorch_cuda.so"
    done = run(built, sys.executable, "-c", f"import ctypes\nctypes.CDLL('{library}').torch_stream()")
    assert done.returncode == -6
    assert done.stderr.startswith("vramprobe: cudaStreamGetId of libcudart.so.13 is not emulated\n")
    assert 'File "<string>", line 2' in done.stderr


def test_short_names_are_there_for_who_links_with_them(built):
    done = run(built, sys.executable, "-c", "import ctypes\nprint(ctypes.CDLL('libcuda.so').cuInit(0))")
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_the_table_says_what_becomes_of_each_function(built):
    with built.functions.open(newline="") as file:
        kinds = {row["function"]: row["kind"] for row in csv.DictReader(file)}
    assert kinds["cudaRuntimeGetVersion"] == "emulated"
    assert kinds["cublasCreate_v2"] == "generic"
    assert kinds["cublasSgemm_v2"] == "allowed"
    assert kinds["cudaStreamGetId"] == "unknown"
    assert "cuLaunchKernel" in kinds  # nobody asks for it by its name; what is compiled at run time will


def test_a_second_call_builds_nothing(built_here, installation, monkeypatch):
    monkeypatch.setattr(building, "_make", lambda *_: pytest.fail("built again"))
    assert ensure_build(installation) == built_here


@pytest.mark.parametrize("change", ["torch", "emulator", "compiler"])
def test_a_change_builds_again(built_here, installation, fake_driver, monkeypatch, change):
    if change == "torch":
        os.utime(installation.site_packages[0] / "torch" / "lib" / "libtorch_cuda.so", (1, 1))
    elif change == "emulator":
        before = emulator_version()
        fake_driver.write_text(fake_driver.read_text() + "\n")
        assert emulator_version() != before
    else:
        other = toolchain.Compiler(command=("cc",), identity="another")
        monkeypatch.setattr(building, "find_compiler", lambda cache: other)
    lines = []
    again = ensure_build(installation, lines.append)
    assert again.folder != built_here.folder
    assert built_here.folder.is_dir()
    assert lines == [f"building the emulated driver for torch 2.13.0+cu130 in {again.folder}"]


def test_a_new_extension_gets_its_library(built_here, installation, tmp_path):
    before = {path.name for path in built_here.stubs}
    cufft = tmp_path / "nv" / "libcufft.so.12"
    fake_installation.compile_library(cufft, "int cufftDestroy(int p) { return p; }", soname="libcufft.so.12")
    extension = installation.site_packages[0] / "new" / "extension.so"
    fake_installation.compile_library(
        extension, "int cufftDestroy(int);\nint f(void) { return cufftDestroy(3); }", str(cufft)
    )
    again = ensure_build(installation)
    assert {path.name for path in again.stubs} - before == {"libcufft.so.12"}
    done = run(again, sys.executable, "-c", f"import ctypes\nprint(ctypes.CDLL('{extension}').f())")
    assert (done.stdout, done.stderr) == ("0\n", "")


def _build(installation, source, queue):
    building.driver_sources = lambda: (source,)
    lines = []
    queue.put((ensure_build(installation, lines.append).folder, lines))


def test_of_two_processes_one_builds_and_the_other_waits(installation, fake_driver, cache):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_build, args=(installation, fake_driver, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    answers = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert len({folder for folder, _ in answers}) == 1
    assert sum(any("building" in line for line in lines) for _, lines in answers) == 1
    assert list((cache / "emulate").glob("building-*")) == []


def test_what_was_cut_off_leaves_nothing_and_is_cleared(installation, cache, monkeypatch):
    home = cache / "emulate"
    (home / "building-old").mkdir(parents=True)  # as kill -9 leaves one
    monkeypatch.setattr(building, "write_stubs", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        ensure_build(installation)
    assert [path.name for path in home.iterdir() if path.is_dir()] == []
    monkeypatch.undo()


def test_a_driver_that_does_not_compile_says_so_in_one_line(installation, fake_driver, cache):
    fake_driver.write_text("int broken(\n")
    with pytest.raises(BuildError, match=r"cc failed \(1\): .*driver\.c:.*error:") as error:
        ensure_build(installation)
    assert "\n" not in str(error.value)
    assert [path for path in (cache / "emulate").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "is full"),
        (errno.EROFS, "cannot be written (Read-only file system)"),
        (errno.EACCES, "cannot be"),
    ],
)
def test_a_cache_that_cannot_take_it_is_named_with_the_way_out(installation, cache, monkeypatch, number, says):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(building.tempfile, "mkdtemp", fail)
    with pytest.raises(BuildError) as error:
        ensure_build(installation)
    assert str(error.value).startswith(f"the cache folder {cache / 'emulate'} {says}")
    assert str(error.value).endswith("set VRAMPROBE_CACHE_DIR to a folder elsewhere.")


def test_a_disk_that_fills_up_under_the_compiler_is_named(installation, cache, monkeypatch):
    def fail(*_):
        raise BuildError("cc failed (1): /usr/bin/ld: final link failed: No space left on device")

    monkeypatch.setattr(building, "compile_driver", fail)
    with pytest.raises(BuildError, match=r"the cache folder .* is full"):
        ensure_build(installation)


def test_a_full_disk_is_said_before_the_compiler_meets_it(installation, cache, monkeypatch):
    monkeypatch.setattr(building.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    with pytest.raises(BuildError, match=r"the cache folder .* is full"):
        ensure_build(installation)


def test_a_cache_under_a_file_is_named(installation, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VRAMPROBE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"the cache folder .* cannot be written"):
        ensure_build(installation)


def test_a_built_driver_serves_from_a_cache_that_cannot_be_written(built_here, installation, monkeypatch):
    monkeypatch.setattr(building, "locked", lambda *_: pytest.fail("locked"))
    monkeypatch.setattr(os, "utime", lambda *_: (_ for _ in ()).throw(PermissionError()))
    assert ensure_build(installation) == built_here


@pytest.mark.parametrize("name", ["a folder", "a:folder"])
def test_a_name_that_the_loader_cannot_take_is_refused(installation, tmp_path, monkeypatch, name):
    monkeypatch.setenv("VRAMPROBE_CACHE_DIR", str(tmp_path / name))
    with pytest.raises(BuildError, match="set VRAMPROBE_CACHE_DIR to a folder without"):
        ensure_build(installation)


def test_without_a_compiler_one_line_says_which_will_do(installation, cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NoCompiler, match=r"no cc, gcc or clang on PATH: .*pip install 'vramprobe\[emulate\]'"):
        ensure_build(installation)


@exhaustive
def test_ziglang_serves_where_there_is_no_other(installation, cache, monkeypatch, tmp_path):
    pytest.importorskip("ziglang")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    build = ensure_build(installation)
    assert find_compiler().is_zig
    monkeypatch.undo()
    assert ask(build, installation) == "13000 0 0"
    wrapper = emulated_environment(build, Path("/m"), {})["CC"]
    (tmp_path / "f.c").write_text('#include <stdio.h>\nint main(void) { puts("compiled"); }\n')
    assert run(build, wrapper, "-o", str(tmp_path / "f"), str(tmp_path / "f.c"), PATH=os.defpath).returncode == 0
    assert run(None, str(tmp_path / "f")).stdout == "compiled\n"


def test_macos_is_refused_before_anything_is_written(installation, cache, monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    with pytest.raises(NotEmulatable, match="this is macOS on arm64"):
        ensure_build(installation)
    assert not cache.exists()


def test_the_users_cache_is_the_default(monkeypatch):
    monkeypatch.delenv("VRAMPROBE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/vramprobe")


def test_old_builds_go_but_the_newest_and_the_lately_used(built_here, installation, monkeypatch):
    home = built_here.folder.parent
    for number in range(6):
        (home / f"old{number}").mkdir()
        (home / f"old{number}" / "functions.csv").write_text("")
        os.utime(home / f"old{number}", (number, number))
    lately = home / "old0"
    os.utime(lately)
    os.utime(installation.site_packages[0] / "torch" / "lib" / "libtorch_cuda.so", (1, 1))
    again = ensure_build(installation)
    left = {path.name for path in home.iterdir() if path.is_dir()}
    assert {built_here.folder.name, again.folder.name, lately.name} <= left
    assert "old1" not in left


def test_the_environment_of_the_real_machine_is_put_aside_and_comes_back(built):
    base = {"CUDA_VISIBLE_DEVICES": "3", "LD_PRELOAD": "libjemalloc.so.2", "LD_LIBRARY_PATH": "/opt/lib", "HOME": "/h"}
    base["PATH"] = "/opt/bin:/usr/bin"
    emulated = emulated_environment(built, Path("/machine"), base)
    assert "CUDA_VISIBLE_DEVICES" not in emulated
    assert emulated[MACHINE_VARIABLE] == "/machine"
    assert emulated["LD_PRELOAD"].split(":")[-1] == "libjemalloc.so.2"
    assert set(map(str, built.stubs)) < set(emulated["LD_PRELOAD"].split(":"))
    assert emulated["LD_LIBRARY_PATH"] == f"{built.folder}:/opt/lib"
    assert emulated["PATH"] == "/machine/bin:/opt/bin:/usr/bin"  # its nvidia-smi
    assert emulated_environment(built, Path("/machine"), emulated) == emulated
    base.pop("CUDA_VISIBLE_DEVICES")
    assert plain_environment(emulated) == base
    assert plain_environment(base) == base
