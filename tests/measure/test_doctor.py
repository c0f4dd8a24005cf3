"""The doctor: a real run on this machine's CPU, and every way in which a check can fail, made to fail."""

import importlib.metadata
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
from factories import make_record
from grids import exhaustive
from typer.testing import CliRunner

from vramprobe import api
from vramprobe.cli import display, verbs
from vramprobe.errors import SpecError
from vramprobe.measure import doctor, environment, machine, nvml
from vramprobe.measure.doctor import Diagnosis
from vramprobe.measure.machine import CheckResult, DoctorState
from vramprobe.records.outcomes import Error
from vramprobe.units import GIB, MIB

Look = Callable[..., Diagnosis]
UUID = "GPU-0b1f6d3a-0000-0000-0000-000000000001"
GOOD_TORCH = {"version": "2.13.0", "cuda": "13.0", "available": True, "uuid": UUID, "name": "H200", "capability": "9.0"}
GOOD_GIB = {"allocated": GIB, "reserved": GIB, "mem_get_info": GIB, "NVML": GIB + 2 * MIB}
GOOD_CPU = {"peak": 64 * MIB, "end": 64 * MIB}


STATE = nvml.GpuState(
    uuid=UUID,
    name="NVIDIA H200",
    total_bytes=143_771 * MIB,
    used_bytes=MIB,
    memory_info="v2",
    mig=False,
    persistence=True,
)


class FakeServer:
    """A launcher whose proof went one way or the other, without a process."""

    isolation, isolation_reason = "forkserver", None

    def __init__(self, *settings: object) -> None:
        del settings

    def start(self, timeout_seconds: float = 0.0) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine where everything is right; a test changes what ``answers`` says, or replaces a part."""
    for name in (*machine.SAID_BY_THE_SPEC, "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    answers: dict[str, Any] = {"torch": GOOD_TORCH, "cuda": GOOD_GIB}
    monkeypatch.setattr(nvml, "gpu_states", lambda: [STATE])
    monkeypatch.setattr(nvml, "visible_gpus", lambda: [(UUID, "NVIDIA H200")])
    monkeypatch.setattr(nvml, "driver_version", lambda: "595.10")
    monkeypatch.setattr(nvml, "cuda_driver_version", lambda: "13.2")
    monkeypatch.setattr(doctor, "_ask", lambda test, timeout_seconds: answers[test])
    monkeypatch.setattr(doctor, "Server", FakeServer)
    monkeypatch.setattr(doctor, "run_isolated", lambda spec, *rest: make_record(spec))
    return answers


@pytest.fixture
def look(h200: dict[str, Any], tmp_path: Path) -> Look:
    """Diagnoses that machine for its GPU."""
    return lambda device="cuda", results=tmp_path: doctor.doctor(device=device, results=results)


def found(diagnosis: Diagnosis, name: str) -> CheckResult:
    (finding,) = (finding for finding in diagnosis.findings if finding.name == name)
    return finding


def failed(diagnosis: Diagnosis) -> list[str]:
    """Name the checks that failed; the machine is ready, and the command ends with 0, where there are none."""
    found = [finding.name for finding in diagnosis.findings if finding.status == "failed"]
    with mock.patch.object(api, "doctor", return_value=diagnosis):
        done = CliRunner().invoke(verbs.app, ["doctor"])
    assert (diagnosis.ready, done.exit_code) == (not found, int(bool(found)))
    return found


def test_this_machine_is_ready_to_measure_on_its_cpu(tmp_path: Path) -> None:
    """Real: a fork server that proves itself, and a cell from its worker's start to its record."""
    command = [sys.executable, "-m", "vramprobe", "doctor", "--device", "cpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["ready"]
    assert told["verdict"].startswith("ready to measure on this CPU")
    assert "cells are forked" in told["verdict"]
    by_name = {finding["name"]: finding for finding in told["findings"]}
    for name in ("python", "host memory", "results folder", "torch", "peft", "torch build", "self-test", "fork server"):
        assert by_name[name]["status"] == "ok", by_name[name]
    assert by_name["self-test"]["detail"] == "64.00 MiB allocated; peak, end agree"
    assert "proven" in by_name["fork server"]["detail"]
    assert "overhead" in by_name["a cell"]["detail"]
    assert list(tmp_path.iterdir()) == []  # neither a results folder nor a scratch file is left


@exhaustive
def test_a_cell_is_spawned_where_nothing_can_be_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real: the launcher falls back by itself, and the machine is ready all the same."""
    monkeypatch.setattr("vramprobe.measure.forkserver.is_available", lambda: False)
    answers = {"torch": {"version": "2.13.0", "cuda": None, "available": False}, "cpu": GOOD_CPU}
    monkeypatch.setattr(doctor, "_ask", lambda test, seconds: answers[test])
    diagnosis = doctor.doctor(device="cpu", results=tmp_path)
    assert diagnosis.ready
    assert found(diagnosis, "fork server").status == "warning"
    assert "no fork with pidfd" in found(diagnosis, "fork server").detail
    assert found(diagnosis, "a cell").status == "ok"
    assert "cells are spawned" in diagnosis.verdict
    assert diagnosis.verdict.endswith("1 warning above")


def test_every_check_is_made_and_finds_something() -> None:
    """A check that is written but not in the list would never run; one that finds nothing would hide that it ran."""
    functions = [*inspect.getmembers(machine, inspect.isfunction), *inspect.getmembers(doctor, inspect.isfunction)]
    written = {function for name, function in functions if name.startswith("check_")}
    assert set(doctor.CHECKS) == written
    assert len(doctor.CHECKS) == len(written)
    names: list[str] = []
    for check in doctor.CHECKS:
        findings = list(check(DoctorState("cuda", Path("results"), Path("."), blocked="this is a test")))
        assert findings, check
        assert {finding.status for finding in findings} <= set(get_args(machine.Status))
        names += [finding.name for finding in findings]
    assert len(names) == len(set(names))


def test_a_good_gpu_machine(look: Look) -> None:
    diagnosis = look("auto")
    assert (diagnosis.device, diagnosis.ready) == ("cuda", True)
    assert {finding.status for finding in diagnosis.findings} == {"ok"}
    assert diagnosis.verdict.startswith("ready to measure on NVIDIA H200 (140.40 GiB): cells are forked, ")
    gpu = found(diagnosis, "GPU 0").detail
    for word in ("NVIDIA H200", UUID, "140.40 GiB", "1.00 MiB in use", "memory info v2", "mode on", "MIG off"):
        assert word in gpu
    assert found(diagnosis, "driver").detail == "595.10, serves CUDA up to 13.2"


def test_no_nvml(look: Look, h200: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    h200["torch"] = {"version": "2.13.0", "cuda": "13.0", "available": False}
    monkeypatch.setattr(nvml, "gpu_states", list)
    monkeypatch.setattr(nvml, "visible_gpus", list)
    monkeypatch.setattr(nvml, "why_unavailable", lambda: "NVML Shared Library Not Found")
    monkeypatch.setattr(nvml, "cuda_driver_version", lambda: None)
    diagnosis = look()
    assert failed(diagnosis) == ["GPU", "torch build"]
    assert "NVML Shared Library Not Found" in found(diagnosis, "GPU").detail
    assert diagnosis.verdict.startswith("not ready to measure on cuda: GPU: no NVIDIA GPU is to be seen")
    assert found(diagnosis, "a cell").detail == "not tried: torch does not see the GPU"
    h200["cpu"] = GOOD_CPU
    on_cpu = look("auto")
    assert (on_cpu.device, on_cpu.ready, found(on_cpu, "GPU").status) == ("cpu", True, "absent")


def test_a_gpu_that_is_hidden(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(nvml, "why_unavailable", lambda: None)
    diagnosis = look()
    assert "CUDA_VISIBLE_DEVICES hides them all" in found(diagnosis, "GPU").detail
    assert found(diagnosis, "GPU 0, not used").status == "ok"
    assert not diagnosis.ready


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"used_bytes": 300 * MIB}, "warning", "end what else uses it"),
        ({"used_bytes": 300 * MIB, "memory_info": "v1"}, "ok", None),  # the driver's own memory is in it
        ({"used_bytes": None, "memory_info": None}, "warning", "device tier will be null"),
        ({"mig": True}, "warning", "MIG is on"),
        ({"mig": None, "persistence": None}, "ok", None),
    ],
    ids=str,
)
def test_what_nvml_says_of_a_gpu(
    look: Look, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], status: str, said: str | None
) -> None:
    monkeypatch.setattr(nvml, "gpu_states", lambda: [replace(STATE, **changes)])
    diagnosis = look()
    finding = found(diagnosis, "GPU 0")
    assert finding.status == status
    assert (finding.advice is None) if said is None else (said in finding.advice)
    assert diagnosis.ready


def without(name: str) -> Callable[[str], str]:
    real = importlib.metadata.version

    def version(package: str) -> str:
        if package == name:
            raise importlib.metadata.PackageNotFoundError(package)
        return real(package)

    return version


def test_a_package_that_everything_needs_is_missing(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", without("torch"))
    diagnosis = look()
    assert failed(diagnosis) == ["torch"]
    assert found(diagnosis, "torch").advice.startswith("pip install 'torch")
    for name in ("torch build", "self-test", "fork server", "a cell"):
        assert found(diagnosis, name) == CheckResult(name, "absent", "not tried: torch is not installed")


def test_a_package_that_some_methods_need_is_missing(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", without("peft"))
    diagnosis = look()
    assert found(diagnosis, "peft").status == "absent"
    assert "no method lora and qlora" in found(diagnosis, "peft").detail
    assert "_full_" in found(diagnosis, "a cell").detail  # measured with what there is
    assert failed(diagnosis) == []


def test_versions_are_held_against_the_tested_ranges(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0+cu130", "transformers": "4.40.0", "accelerate": "1.15.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name, "99.0"))
    wanted = ["torch<2.14,>=2.11; extra == 'measure'", "transformers<5.24,>=5.17; extra == 'measure'", "accelerate"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    diagnosis = look()
    assert found(diagnosis, "torch").status == "ok"  # the local part of a version does not count
    assert found(diagnosis, "transformers").status == "warning"
    assert found(diagnosis, "transformers").advice == "pip install 'transformers<5.24,>=5.17'"
    assert diagnosis.ready


def test_a_checkout_that_is_not_installed_knows_no_ranges(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    monkeypatch.setattr(importlib.metadata, "version", without("bitsandbytes"))
    diagnosis = look()
    assert found(diagnosis, "vramprobe").status == "warning"
    assert "not known here" in found(diagnosis, "vramprobe").detail
    assert found(diagnosis, "bitsandbytes").advice == "pip install bitsandbytes"
    assert diagnosis.ready


@pytest.mark.parametrize(
    ("answer", "said", "advice"),
    [
        ({"version": "2.13.0+cpu", "cuda": None, "available": False}, "for the CPU only", "CUDA build of torch"),
        ({"version": "2.13.0", "cuda": "13.2", "available": False}, "it sees no GPU", "CUDA up to 13.2"),
        (GOOD_TORCH | {"uuid": "GPU-other"}, "it calls GPU-other GPU 0", "nvidia-smi -L"),
        ({"error": "RuntimeError: driver too old"}, "RuntimeError: driver too old", "another CUDA"),
    ],
    ids=["cpu build", "sees none", "another gpu", "error"],
)
def test_torch_and_nvml_must_mean_the_same_gpu(
    look: Look, h200: dict[str, Any], answer: dict[str, Any], said: str, advice: str
) -> None:
    h200["torch"] = answer
    diagnosis = look()
    assert failed(diagnosis) == ["torch build"]
    assert said in found(diagnosis, "torch build").detail
    assert advice in found(diagnosis, "torch build").advice
    assert found(diagnosis, "self-test").status == "absent"


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (GOOD_GIB | {"NVML": 0}, "failed", "NVML moved by 0"),
        (GOOD_GIB | {"allocated": GIB + 512}, "failed", f"allocated moved by {GIB + 512}"),
        (GOOD_GIB | {"mem_get_info": GIB + 5 * MIB}, "failed", "mem_get_info moved by"),
        (GOOD_GIB | {"mem_get_info": GIB - 2 * MIB}, "ok", "agree"),
        (GOOD_GIB | {"NVML": None}, "warning", "NVML does not tell"),
        ({"error": "it did not end within 180 s"}, "failed", "did not end"),
    ],
    ids=str,
)
def test_a_self_test_that_disagrees(
    look: Look, h200: dict[str, Any], answer: dict[str, Any], status: str, said: str
) -> None:
    h200["cuda"] = answer
    diagnosis = look()
    assert found(diagnosis, "self-test").status == status
    assert said in found(diagnosis, "self-test").detail
    assert found(diagnosis, "a cell").status == "ok"  # what can be tried is tried
    assert failed(diagnosis) == ["self-test"] * (status == "failed")


def test_a_proof_that_failed_costs_time_and_not_the_numbers(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unproven(FakeServer):
        isolation, isolation_reason = "spawn", "no fork server: the canary ended with 1"

        def __init__(self, device: str, alloc_conf: None, env: dict, model_types: list, log: Path) -> None:
            log.write_text("Traceback …\nRuntimeError: NVML answers the server, but not its child\n")

    monkeypatch.setattr(doctor, "Server", Unproven)
    diagnosis = look()
    finding = found(diagnosis, "fork server")
    assert finding.status == "warning"
    assert finding.detail.startswith("no fork server: the canary ended with 1, after ")
    assert finding.detail.endswith("(its log ends: RuntimeError: NVML answers the server, but not its child)")
    assert "cells are spawned" in diagnosis.verdict
    assert failed(diagnosis) == []


def test_a_cell_that_failed(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = Error(phase="load", error_type="RuntimeError", message="no kernel image")
    monkeypatch.setattr(doctor, "run_isolated", lambda spec, *rest: make_record(spec, outcome=outcome))
    diagnosis = look()
    assert failed(diagnosis) == ["a cell"]
    assert "no kernel image" in found(diagnosis, "a cell").detail
    assert "vramprobe measure --model smollm2-135m --method lora" in found(diagnosis, "a cell").advice


def test_variables_that_are_ignored_or_move_the_numbers(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    diagnosis = look()
    assert found(diagnosis, "PYTORCH_ALLOC_CONF").detail == "'expandable_segments:True' is ignored"
    assert found(diagnosis, "CUDA_DEVICE_ORDER").advice == "PCI_BUS_ID is used"
    assert found(diagnosis, "CUBLAS_WORKSPACE_CONFIG").status == "warning"
    assert found(diagnosis, "CUDA_VISIBLE_DEVICES").detail == "'0'"
    assert diagnosis.verdict.endswith("3 warnings above")


def test_a_results_folder_that_cannot_be_written_to(look: Look, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    diagnosis = look(results=tmp_path / "file" / "results")
    assert failed(diagnosis) == ["results folder"]


def test_too_little_room_is_a_warning(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "free_host_bytes", lambda: (500 * MIB, 8 * GIB))
    monkeypatch.setattr(machine, "_FREE_DISK_BYTES", 2**60)
    diagnosis = look()
    assert found(diagnosis, "host memory").detail == "only 500.00 MiB free"
    assert found(diagnosis, "results folder").status == "warning"
    assert diagnosis.ready


def test_a_check_that_breaks_is_a_finding_and_stops_no_other(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "gpu_states", lambda: 1 / 0)
    diagnosis = look()
    assert failed(diagnosis) == ["gpus"]
    assert "ZeroDivisionError" in found(diagnosis, "gpus").detail
    assert found(diagnosis, "a cell").status == "ok"


def test_a_child_that_hangs_or_dies_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._ask("cpu", 0.01) == {"error": "it did not end within 0 s"}
    assert doctor._ask("no such test", 60) == {"error": "KeyError: 'no such test'"}
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    assert doctor._ask("cpu", 60) == {"error": "it ended with status 1: it said nothing"}


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(SpecError, match="allowed: auto, cuda, cpu"):
        doctor.doctor(device="gpu")


def test_words_from_the_machine_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    odd = CheckResult("[bold]name[/]", "failed", "[red]detail[/red] [/]", "pip install 'vramprobe[measure]'")
    verdict = "not ready: [/] [link]"
    display.print_doctor(Diagnosis(device="cpu", ready=False, verdict=verdict, findings=(odd,), seconds=1.0))
    said = capsys.readouterr().out
    for words in ("[bold]name[/]", "[red]detail[/red] [/]", "vramprobe[measure]", "not ready: [/] [link]"):
        assert words in said
