"""``nvidia-smi`` of the emulated machine: what the real driver below it says, in nvidia-smi's own forms."""

import subprocess
import sys
from pathlib import Path

import pytest
from driver_client import Driver
from driver_process import card

from vramprobe.emulate import nvidia_smi
from vramprobe.emulate.machine import MachinePolicy, device_uuid, write_machine
from vramprobe.explain.smi import Readings
from vramprobe.units import MIB

CSV = ["--format=csv,noheader,nounits"]
VERSIONS = ("13.emulated", "580.65.06", "13.0")


class Stub:
    """The driver's library under the names of NVML's stub."""

    def __init__(self, library) -> None:
        self._library = library

    def __getattr__(self, name: str):
        return getattr(self._library, f"emu_{name}")


def printed(driver: Driver, *queries: list[str]) -> list[str]:
    driver.check("cudaSetDevice", 0)
    driver.malloc(300 * MIB)
    nvml = nvidia_smi.Nvml(Stub(driver.library))
    return [nvidia_smi.answered(words, nvml.cards(), nvml.versions()) for words in queries]


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A card of 1 GiB, of which the driver keeps 100 MiB, and one that shares the host's memory."""
    cards = [card(1024 * MIB), card(2048 * MIB, nvml_total_bytes=2048 * MIB, name="Shared", integrated=1)]
    return write_machine(tmp_path / "machine", cards, MachinePolicy(context_bytes=100 * MIB))


def test_it_says_what_the_driver_does(machine, in_process) -> None:
    fields = "index,name,memory.total,memory.used,memory.free,memory.reserved,compute_cap,driver_version,fan.speed"
    wanted = (
        [],
        ["-L"],
        [f"--query-gpu={fields}", *CSV],
        ["--query-gpu", "gpu_uuid,memory.used", "--format", "csv", "-i", "0"],
        ["--query-compute-apps=used_memory,gpu_name", *CSV],
    )
    table, listed, row, units, apps = in_process(lambda driver: printed(driver, *wanted), machine)
    assert listed.splitlines()[1] == f"GPU 1: Shared (UUID: {device_uuid(machine, 1)})"
    assert row.splitlines() == [
        "0, Emulated Test Card, 1124, 400, 624, 100, 8.0, 580.65.06, [N/A]",
        "1, Shared, [N/A], [N/A], [N/A], [N/A], 8.0, 580.65.06, [N/A]",
    ]
    assert units.splitlines() == ["uuid, memory.used [MiB]", f"{device_uuid(machine, 0)}, 400 MiB"]
    assert apps == "400, Emulated Test Card"
    assert "|          Not Supported |" in table
    lines = [line for line in table.splitlines()[1:] if line]
    assert {len(line) for line in lines} == {91}, table
    readings = Readings()
    for line in lines:
        readings.read(line)
    assert (readings.used, readings.total) == ({0: 400 * MIB}, {0: 1124 * MIB})
    assert [list(one.values()) for one in readings.processes.values() if one] == [[400 * MIB]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-q"], r"'-q' is not answered on an emulated machine\. It answers: without options, -L"),
        (["--query-gpu=memory.total"], "--query-gpu needs --format=csv"),
        (["--query-gpu=memory.total", "--format=json"], "--query-gpu needs --format=csv"),
        (["--query-gpu=volts", "--format=csv"], 'Field "volts" is not a valid field.*It answers: timestamp, count'),
        (["-i", "7"], "no GPU 7: this machine has 0"),
        (["-i"], "-i needs a value"),
    ],
)
def test_what_it_does_not_answer_is_one_line(words, message) -> None:
    with pytest.raises(nvidia_smi.UnknownQuery, match=message) as caught:
        nvidia_smi.answered(words, [{"index": 0, "uuid": "GPU-0", "name": "A", "apps": []}], VERSIONS)
    assert "\n" not in str(caught.value)


def test_without_an_emulated_machine_it_ends_with_a_line() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", nvidia_smi.__file__, "-q"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("nvidia-smi: '-q' is not answered")
