"""NVML as it answers on older drivers and in containers; what it says of a card is read on an emulated one."""

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from vramprobe.measure import nvml
from vramprobe.units import GIB

UUID = "8f2a6a0e-1b1c-4f6d-9f4e-0123456789ab"


def refused(*given: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver without version 2 of the memory query, which tells this process neither MIG nor persistence."""

    def memory(handle: object, version: int | None = None) -> SimpleNamespace:
        if version is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(used=GIB, total=80 * GIB)

    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: "handle",
        "nvmlDeviceGetHandleByUUID": lambda uuid: "handle" if uuid == f"GPU-{UUID}" else refused(),
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{UUID}".encode(),
        "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetMigMode": refused,
        "nvmlDeviceGetPersistenceMode": refused,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("older")
def test_what_an_older_driver_does_not_tell_is_unknown() -> None:
    (state,) = nvml.gpu_states()
    assert (state.uuid, state.used_bytes, state.total_bytes) == (f"GPU-{UUID}", GIB, 80 * GIB)
    assert (state.memory_info, state.mig, state.persistence) == ("v1", None, None)
    assert nvml.open_device("GPU-none") is None
    for properties in (SimpleNamespace(), SimpleNamespace(uuid=UUID)):  # torch before 2.4 has no UUID
        assert nvml.uuid_of(properties, 0) == f"GPU-{UUID}"
