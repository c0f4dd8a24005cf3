"""The machine as Python writes and reads it."""

import json
import types
from pathlib import Path

import pytest
from machine_state import read_state

from vramprobe.emulate import machine_folder
from vramprobe.emulate.machine import MachineEvent, MachinePolicy, read_events, read_machine, write_machine
from vramprobe.errors import SpecError, StoreError

MIB = 1 << 20


@pytest.fixture
def a_card() -> types.SimpleNamespace:
    from driver_process import card

    return card()


def test_the_file_says_every_key(a_card, tmp_path: Path) -> None:
    lines = (write_machine(tmp_path / "m", [a_card] * 2, ecc=(0, 1)) / "machine.txt").read_text().splitlines()
    head = ["format 1", "num_devices 2", "context_bytes 0"]
    assert lines[:6] == [*head, f"graph_bytes {190 << 10}", f"graph_node_bytes {13 << 10}", "fill zeros"]
    second = lines[lines.index("device 1") :]
    assert "name Emulated Test Card" in second
    assert "pci_bus_id 0000:02:00.0" in second
    assert "compute_capability 8.0" in second
    assert second[-1] == "ecc 1"
    assert len({line for line in lines if line.startswith("uuid GPU-")}) == 2


def test_a_card_that_its_contexts_would_fill_is_refused(a_card, tmp_path: Path) -> None:
    message = "context_bytes is 2,147,483,648: Emulated Test Card has 1,073,741,824 bytes"
    with pytest.raises(SpecError, match=message):
        write_machine(tmp_path / "m", [a_card], MachinePolicy(context_bytes=2 << 30))
    assert not (tmp_path / "m").exists()


def test_a_machine_is_written_once(a_card, tmp_path: Path) -> None:
    write_machine(tmp_path, [a_card])
    with pytest.raises(StoreError, match="exists: a machine is written once"):
        write_machine(tmp_path, [a_card])


def test_the_state_of_a_machine_nobody_used(a_card, tmp_path: Path) -> None:
    state = read_state(write_machine(tmp_path, [a_card] * 2))
    assert (state.used_bytes, state.peak_bytes, state.processes) == ((0, 0), (0, 0), ())


def test_a_folder_that_is_no_machine(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="name a folder that write_machine made"):
        read_state(tmp_path)


@pytest.mark.parametrize("said", ["format 1", "num_devices", "num_devices 17", "num_devices two"])
def test_a_machine_that_does_not_say_its_cards(said: str, tmp_path: Path) -> None:
    (tmp_path / "machine.txt").write_text(said)
    with pytest.raises(StoreError, match="does not say num_devices, 1 to 16"):
        read_machine(tmp_path)


def test_events_in_order_and_a_damaged_one(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []
    lines = [
        {"kind": "lower_bound", "name": "a", "pid": 1, "detail": "why"},
        {"kind": "k", "name": "b", "pid": 2, "x": 3},
    ]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    expected = [
        MachineEvent(kind="lower_bound", name="a", pid=1, detail="why"),
        MachineEvent(kind="k", name="b", pid=2, more={"x": 3}),
    ]
    assert read_events(tmp_path) == expected
    path.write_text('{"kind": "half"')
    with pytest.raises(StoreError, match="line 1 is no event"):
        read_events(tmp_path)


def test_the_machine_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("VRAMPROBE_EMULATED_MACHINE", raising=False)
    assert machine_folder() is None
    monkeypatch.setenv("VRAMPROBE_EMULATED_MACHINE", str(tmp_path))
    assert machine_folder() == tmp_path
