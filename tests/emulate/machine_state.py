"""The state that the processes of an emulated machine share, as driver/shared.c lays it out, for the driver's tests."""

import struct
from pathlib import Path
from typing import NamedTuple

from vramprobe.emulate.cards import MAX_CARDS
from vramprobe.emulate.machine import FORMAT, read_machine

# driver/shared.c asserts these offsets
_HEAD = struct.Struct("<8s4IQ")  # magic, format, num_devices, max_devices, max_processes, num_joined
_CARDS_AT, _PROCESSES_AT = 128, 384
_CARD = struct.Struct("<2Q")  # used, peak
_PROCESS = struct.Struct(f"<2I2Q{MAX_CARDS}Q{MAX_CARDS}Q")  # pid, slot, start, order, used, peak by device
_LIVE, _ENDED = 1, 2


class ProcessUse(NamedTuple):
    """Bytes by device; a process that has ended holds nothing, its peaks stay."""

    pid: int
    alive: bool
    used_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]


class MachineState(NamedTuple):
    """Bytes by device, of all processes; these in the order in which they came."""

    used_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    processes: tuple[ProcessUse, ...]


def read_state(folder: Path) -> MachineState:
    """The bytes that the machine's processes hold now; nothing is locked."""
    num_devices, _ = read_machine(folder)
    nothing, path = (0,) * num_devices, folder / "state"
    data = path.read_bytes() if path.exists() else b""  # no process has used it yet, or the first is about to begin
    if len(data) < _PROCESSES_AT or not data.startswith(b"VPEMUGPU"):
        return MachineState(nothing, nothing, ())
    _, version, _, max_devices, max_processes, _ = _HEAD.unpack_from(data)
    assert (version, max_devices) == (FORMAT, MAX_CARDS)
    found = []
    for slot in range(max_processes):
        pid, kind, start, order, *rest = _PROCESS.unpack_from(data, _PROCESSES_AT + slot * _PROCESS.size)
        if kind in (_LIVE, _ENDED):
            alive = kind == _LIVE and _start_ticks(pid) == start
            used = tuple(rest[:num_devices]) if alive else nothing
            found.append((order, ProcessUse(pid, alive, used, tuple(rest[MAX_CARDS : MAX_CARDS + num_devices]))))
    processes = tuple(process for _, process in sorted(found))
    return MachineState(
        tuple(sum(process.used_bytes[i] for process in processes) for i in range(num_devices)),
        tuple(_CARD.unpack_from(data, _CARDS_AT + i * _CARD.size)[1] for i in range(num_devices)),
        processes,
    )


def _start_ticks(pid: int) -> int | None:
    """Start of a process in clock ticks since boot (field 22 of its stat); None once it has ended."""
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19]) if fields[0] not in "ZX" else None
