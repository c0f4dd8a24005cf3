"""The fork server for CUDA, as far as a machine without a GPU can tell: what it loads, and what its proof asks."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import children

from vramprobe.emulate.values import hook
from vramprobe.measure import forkserver, launcher, nvml
from vramprobe.measure.launcher import Server, worker_environment
from vramprobe.profile.hook.journal import FOLDER_VARIABLE

torch = pytest.importorskip("torch")

#: Makes torch believe that it was built with CUDA and sees a GPU, writes down who asks CUDA anything, and preloads.
_PRETEND = """
import json, os, sys, traceback
import torch, torch.cuda

asked = []
def notes(name):
    def ask(*args, **kwargs):
        places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()[:-1]]
        asked.append([name, [place for place in places if "importlib" not in place][-3:]])
        raise RuntimeError(f"{name} touches CUDA")
    return ask

torch.version.cuda = "13.0"
torch.cuda._is_compiled = lambda: True
torch.cuda._device_count_nvml = lambda: 1
torch._C._cuda_isInBadFork = lambda: False
torch._C._cuda_getDeviceCount = notes("_cuda_getDeviceCount")
torch._C._cuda_getCurrentRawStream = notes("_cuda_getCurrentRawStream")
for name in ("_lazy_init", "init", "current_device", "get_device_properties", "get_device_name", "mem_get_info",
             "set_device", "synchronize", "get_device_capability", "memory_stats"):
    setattr(torch.cuda, name, notes(f"torch.cuda.{name}"))
capability = torch.cuda.get_device_capability
assert torch.cuda.is_available()

from vramprobe.measure import forkserver, nvml
nvml.compute_capability = lambda: (9, 0)
why = forkserver._load("cuda", ["llama", "gpt2", "gpt_neox", "opt", "qwen2", "qwen3", "mistral"], [])
loaded = [name for name in ("peft", "bitsandbytes", "bitsandbytes.backends.cuda.ops") if name in sys.modules]
restored = torch.cuda.get_device_capability is capability
print(json.dumps({"why": why, "asked": asked, "loaded": loaded, "restored": restored}))
"""


def test_nothing_that_is_preloaded_asks_cuda_anything() -> None:
    """As Python sees it; what the libraries' own C code does when it loads, only the canary on a GPU can tell."""
    done = subprocess.run(
        [sys.executable, "-c", _PRETEND], capture_output=True, text=True, check=True, env=worker_environment()
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["why"] is None
    assert told["asked"] == []
    assert told["loaded"] == ["peft", "bitsandbytes", "bitsandbytes.backends.cuda.ops"]
    assert told["restored"]


def test_the_worker_environment_keeps_availability_checks_off_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, torch.cuda.is_available() initialises the driver, and every fork is spoilt."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    env = worker_environment()
    assert env["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert not set(launcher.SAID_BY_THE_SPEC) & set(env)


def test_a_worker_is_not_watched_with_its_starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = hook.site_folder(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([site, "theirs"]))
    assert worker_environment()["PYTHONPATH"].split(os.pathsep)[-1] == "theirs"
    assert site not in worker_environment()["PYTHONPATH"]
    monkeypatch.setenv(hook.WATCHED_VARIABLE, str(tmp_path))
    assert hook.WATCHED_VARIABLE == FOLDER_VARIABLE
    assert hook.WATCHED_VARIABLE not in worker_environment()


@pytest.mark.parametrize(
    ("readings", "status", "said"),
    [
        ([0, forkserver.CANARY_BYTES], 0, ""),
        ([0, forkserver.CANARY_BYTES - 1], 1, "NVML saw"),
        ([None, None], 1, "NVML answers the server, but not its child"),
        (None, 1, "NVML answers the server, but not its child"),
    ],
    ids=["moved", "not enough", "no answer", "no device"],
)
def test_the_canary_must_see_its_allocation_by_nvml(
    readings: list[int | None] | None,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: SimpleNamespace(nbytes=forkserver.CANARY_BYTES))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    watched = readings and SimpleNamespace(used_bytes=iter(readings).__next__)
    monkeypatch.setattr(nvml, "open_first_visible", lambda: watched)
    assert forkserver._canary("cuda") == status
    assert said in capsys.readouterr().err


def test_a_server_that_initialised_the_driver_is_not_forked_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "_open_files", lambda: {"/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"})
    assert "initialised the CUDA driver" in forkserver._unsafe("cuda")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "has initialised CUDA" in forkserver._unsafe("cuda")


def test_what_opens_the_driver_as_it_loads_is_left_to_the_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server begins anew without that module, and says which; what was open before is nobody's fault."""
    began: list[list[str]] = []
    tmp_path.joinpath("opens_the_driver.py").touch()
    tmp_path.joinpath("harmless.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(forkserver, "PRELOADED", ("harmless", "opens_the_driver"))
    monkeypatch.setattr(forkserver, "_PRELOADED_WITH_CARE", ())
    monkeypatch.setattr(forkserver.environment, "remember", lambda: None)
    is_open = "opens_the_driver"
    monkeypatch.setattr(forkserver, "_open_files", lambda: {"/dev/nvidia-uvm"} if is_open in sys.modules else set())
    monkeypatch.setattr(forkserver.os, "execv", lambda program, words: began.append(words))
    monkeypatch.setenv(forkserver._LEFT_OUT, "")
    with pytest.raises(forkserver._InitialisedCuda, match=r"^opens_the_driver$"):
        forkserver._load("cpu", [], [])
    forkserver._begin_without(["opens_the_driver"])
    assert began[0][1:3] == ["-m", "vramprobe.measure.forkserver"]
    assert os.environ[forkserver._LEFT_OUT] == "opens_the_driver"
    forkserver._import("json", [])  # open already, and not by this
    monkeypatch.delitem(sys.modules, "opens_the_driver")
    assert forkserver._load("cpu", [], ["opens_the_driver"]) is None
    assert "opens_the_driver" not in sys.modules


def test_a_kernel_without_pidfd_is_not_forked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has the function wherever it was built; gVisor, for one, may lack the call."""
    assert forkserver.is_available()

    def missing(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", missing)
    assert not forkserver.is_available()


def test_a_canary_that_hangs_ends_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: the canary forks from it, and here pytest's threads would come along."""
    code = (
        "import time; from vramprobe.measure import forkserver; forkserver._CANARY_SECONDS = 1\n"
        "forkserver._canary = lambda device: time.sleep(60)\n"
        "print(forkserver._unsafe('cpu'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50)
    assert done.stdout == "the canary, a forked child that allocates on cpu, ended with -14\n"


def test_a_server_that_never_gets_ready_costs_the_server_not_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_LOADING_SECONDS", 0.01)
    server = Server("cpu", None, worker_environment(), [], tmp_path / "log")
    server.start()
    assert server.isolation == "spawn"
    assert "was not ready after" in server.isolation_reason
    server.close()
    assert children("forkserver") == []
