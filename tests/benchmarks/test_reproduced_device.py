"""The device tier's constants: learnt from one half of the configurations, held against the other."""

from types import ModuleType

import pytest
from scripts import script

from vramprobe.units import MIB


@pytest.fixture
def device() -> ModuleType:
    return script("truth.reproduction.device")


def _row(stack: str, num_gpus: int, device_mib: int | None, reserved_mib: int) -> dict[str, str]:
    told = "" if device_mib is None else str(device_mib * MIB)
    reserved = {"reserved_emulated_bytes": str(reserved_mib * MIB)}
    return {"stack": stack, "num_gpus": str(num_gpus), "nvidia_smi_bytes": told} | reserved


def test_a_constant_is_the_median_of_every_other_configuration_and_tested_on_the_rest(device: ModuleType) -> None:
    rows = [
        _row("a", 1, 10_500, 10_000),
        _row("a", 1, 20_600, 20_000),
        _row("a", 1, 30_510, 30_000),
        _row("a", 1, 40_500, 40_000),
        _row("a", 1, 50_520, 50_000),
        _row("a", 2, 11_000, 10_000),
        _row("b", 1, None, 10_000),
    ]
    one, two = device.constants(reversed(rows))
    assert (one.stack, one.num_gpus, one.beside_bytes, one.num_learnt) == ("a", 1, 510 * MIB, 3)
    assert (one.least_bytes, one.most_bytes) == (500 * MIB, 600 * MIB)
    assert one.errors == (pytest.approx(-90 / 20_600), pytest.approx(10 / 40_500))
    assert (two.num_gpus, two.beside_bytes, two.errors) == (2, 1000 * MIB, ())


def test_the_table_says_the_error_of_what_was_left_out(device: ModuleType) -> None:
    lines = device.table([_row("a", 1, 10_500, 10_000), _row("a", 1, 20_600, 20_000), _row("a", 2, 11_000, 10_000)])
    assert lines[2] == "| a | 1 | 500 | 1 | 500 to 600 | 1 | 0.49 | -0.49 | 0.00 |"
    assert lines[3] == "| a | 2 | 1,000 | 1 | 1,000 to 1,000 | 0 |  |  |  |"
    assert lines[4] == "| **all** |  |  | 2 |  | 1 | 0.49 | -0.49 | 0.00 |"
