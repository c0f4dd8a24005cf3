"""One machine, many processes: a shared card, kill -9, fork, process numbers that come again, memory of another."""

import ctypes
import os
import random
import struct
import time
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

import pytest
from driver_client import CudaError, Driver, IpcHandle
from driver_process import on_card
from machine_state import read_state

MIB = 1 << 20
CONTEXT = 100 * MIB


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come about in 20 s")


def holder(num_bytes: int) -> Callable[[Driver], None]:
    def hold(driver: Driver) -> None:
        driver.malloc(num_bytes)
        while True:
            time.sleep(1)

    return hold


def test_two_processes_share_a_cards_capacity(make_machine, start_process, in_process) -> None:
    machine = make_machine()
    child = start_process(holder(500 * MIB), machine)
    wait_for(lambda: read_state(machine).used_bytes[0] == 600 * MIB)

    def other(driver: Driver) -> tuple[int, int]:
        free, _ = driver.info()
        with pytest.raises(CudaError) as failed:
            driver.malloc(free + 1)
        driver.malloc(free)
        return free, failed.value.code

    try:
        assert in_process(other, machine) == (1024 * MIB - 600 * MIB - CONTEXT, 2)
    finally:
        child.kill()


def test_a_killed_process_gives_its_memory_back(make_machine, start_process, in_process) -> None:
    machine = make_machine()
    child = start_process(holder(800 * MIB), machine)
    wait_for(lambda: read_state(machine).used_bytes[0] == 900 * MIB)
    seen = in_process(lambda driver: (driver.nvml_used() - 100 * MIB, driver.nvml_processes()), machine)
    assert seen == (900 * MIB, {child.pid: 900 * MIB})
    child.kill()
    state = read_state(machine)
    assert state.used_bytes == (0,)
    assert [(p.pid, p.alive, p.peak_bytes) for p in state.processes] == [(child.pid, False, (900 * MIB,))]
    assert in_process(lambda driver: (driver.nvml_used() - 100 * MIB, driver.nvml_processes()), machine) == (0, {})

    def takes_it(driver: Driver) -> int:
        driver.malloc(900 * MIB)
        return driver.used()

    assert in_process(takes_it, machine) == 1000 * MIB


def test_a_zombie_holds_nothing(make_machine, start_process, in_process) -> None:
    machine = make_machine()
    child = start_process(lambda driver: driver.malloc(300 * MIB) and None, machine)
    wait_for(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    assert read_state(machine).used_bytes == (0,), "it has ended and waits for its parent"
    assert in_process(lambda driver: driver.nvml_used() - 100 * MIB, machine) == 0
    child.result()


def test_a_process_number_that_comes_again_is_another_process(make_machine, start_process, in_process) -> None:
    machine = make_machine()
    child = start_process(holder(400 * MIB), machine)
    wait_for(lambda: read_state(machine).used_bytes[0] == 500 * MIB)
    with open(machine / "state", "r+b") as file:  # as if it had begun at another time
        file.seek(384 + 8)
        (start,) = struct.unpack("<Q", file.read(8))
        file.seek(384 + 8)
        file.write(struct.pack("<Q", start - 1))
    try:
        assert read_state(machine).used_bytes == (0,)
        assert in_process(lambda driver: driver.nvml_used() - 100 * MIB, machine) == 0
    finally:
        child.kill()


def test_a_holder_of_the_lock_that_dies_stops_nobody(make_machine, start_process, in_process) -> None:
    machine = make_machine()
    for _ in range(5):  # killed at random moments of charging and releasing

        def churn(driver: Driver) -> None:
            while True:
                driver.free(driver.malloc(2 * MIB))

        child = start_process(churn, machine)
        wait_for(lambda pid=child.pid: any(p.pid == pid for p in read_state(machine).processes))
        time.sleep(0.02)
        child.kill()
    assert in_process(lambda driver: driver.nvml_used() - 100 * MIB, machine) == 0
    assert in_process(lambda driver: (driver.malloc(2 * MIB), driver.used())[1], machine) == CONTEXT + 2 * MIB


def in_fork(function: Callable[[], int]) -> int:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(write, str(function()).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = int(pipe.read())
    os.waitpid(pid, 0)
    return answer


@on_card(returns=[3, 3, 3, 110, 0])
def test_cuda_in_a_forked_child_of_who_used_it_gives_error_3(driver: Driver) -> list[int]:
    count = ctypes.c_int()
    driver.check("cudaGetDeviceCount", byref(count))
    codes = [in_fork(lambda: driver.call("cudaGetDeviceCount", byref(count)))]
    driver.malloc(10 * MIB)
    codes.append(in_fork(lambda: driver.call("cudaMalloc", byref(c_void_p()), c_size_t(10))))
    codes.append(in_fork(lambda: driver.call("cuInit", 0)))
    codes.append(in_fork(lambda: driver.nvml_used() // MIB - 100))
    codes.append(driver.call("cudaMalloc", byref(c_void_p()), c_size_t(10)))
    return codes


@on_card(returns=[110, 110, 0, 100])
def test_a_child_of_who_never_used_cuda_begins_afresh(driver: Driver) -> list[int]:
    driver.nvml_used()

    def child() -> int:
        driver.malloc(10 * MIB)
        return driver.used() // MIB

    return [in_fork(child), in_fork(child), driver.nvml_used() // MIB - 100, driver.used() // MIB]


@on_card(returns=(110, 1))
def test_a_forked_child_holds_nothing_and_takes_nothing_away(driver: Driver) -> tuple[int, int]:
    driver.malloc(10 * MIB)
    in_fork(lambda: 0)
    return driver.used() // MIB, len(driver.nvml_processes())


@pytest.mark.parametrize("num_bytes", [1000, 3 * MIB])
def test_memory_of_another_process_by_its_handle(num_bytes: int, make_machine, start_process, tmp_path) -> None:
    machine = make_machine()
    note, done = tmp_path / "handle", tmp_path / "done"

    def exporter(driver: Driver) -> bytes:
        pointer = driver.malloc(num_bytes)
        driver.write(pointer, b"from one".ljust(num_bytes, b"."))
        handle = IpcHandle()
        driver.check("cudaIpcGetMemHandle", byref(handle), c_void_p(pointer))
        (tmp_path / "new").write_bytes(bytes(handle))
        (tmp_path / "new").rename(note)
        wait_for(done.exists)
        return driver.read(pointer + 20, 5)

    def importer(driver: Driver) -> tuple[bytes, int]:
        wait_for(note.exists)
        handle, out = IpcHandle.from_buffer_copy(note.read_bytes()), c_void_p()
        driver.check("cudaIpcOpenMemHandle", byref(out), handle, c_uint(1))
        seen = driver.read(out.value, 8), driver.call("control_process_used_bytes", 0) // MIB
        driver.write(out.value + 20, b"reply")
        driver.check("cudaIpcCloseMemHandle", out)
        done.touch()
        return seen

    one, other = start_process(exporter, machine), start_process(importer, machine)
    assert other.result() == (b"from one", 100), "the importer is not charged"
    assert one.result() == b"reply"


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


def joined(driver: Driver, number: int, num_ranks: int, folder: Path) -> c_void_p:
    """A communicator of so many ranks, which find one another by a file."""
    unique, communicator, note = UniqueId(), c_void_p(), folder / "id"
    if number == 0:
        driver.check("ncclGetUniqueId", byref(unique))
        (folder / "new").write_bytes(bytes(unique))
        (folder / "new").rename(note)
    wait_for(note.exists)
    unique = UniqueId.from_buffer_copy(note.read_bytes())
    driver.check("ncclCommInitRank", byref(communicator), num_ranks, unique, number)
    return communicator


def rank(number: int, num_ranks: int, folder: Path) -> Callable[[Driver], list]:
    def run(driver: Driver) -> list:
        communicator = joined(driver, number, num_ranks, folder)
        floats = driver.malloc(1024)
        driver.write(floats, struct.pack("<3f", 1.5 + number, -2, 1e6))
        driver.check("ncclAllReduce", c_void_p(floats), c_void_p(floats), c_size_t(3), 7, 0, communicator, c_void_p())
        seen = [struct.unpack("<3f", driver.read(floats, 12)), driver.uncomputed_reads()]
        half, out = driver.malloc(1024), driver.malloc(1024)
        driver.write(half, struct.pack("<2e", 0.1 * (number + 1), 65504 if number else 0))
        driver.check("ncclReduceScatter", c_void_p(half), c_void_p(out), c_size_t(1), 6, 2, communicator, c_void_p())
        seen.append(round(struct.unpack("<e", driver.read(out, 2))[0], 3))
        if number:
            driver.mark(half, 2, computed=False)
        driver.check("ncclAllGather", c_void_p(half), c_void_p(out), c_size_t(2), 1, communicator, c_void_p())
        seen += [driver.is_computed(out, 2), driver.is_computed(out + 2, 2)]
        driver.check("ncclAllReduce", c_void_p(half), c_void_p(out), c_size_t(2), 1, 0, communicator, c_void_p())
        seen.append(driver.is_computed(out, 1))
        large = driver.malloc(10 * MIB)
        driver.memset(large, 0, 10 * MIB)
        count = c_size_t(10 * MIB // 4)
        driver.check("ncclAllReduce", c_void_p(large), c_void_p(large), count, 7, 0, communicator, c_void_p())
        return [*seen, driver.is_computed(large, 1), moved(driver)]

    return run


class Moved(ctypes.Structure):
    _fields_ = [("kind", c_int), ("num_ranks", c_int), ("calls", c_uint64), ("bytes", c_uint64)]


def moved(driver: Driver) -> list[tuple[int, ...]]:
    lines = (Moved * 8)()
    return [(one.kind, one.num_ranks, one.calls, one.bytes) for one in lines[: driver.call("control_moved", lines, 8)]]


def test_small_collectives_are_true_and_large_ones_are_not_computed(make_machine, start_process, tmp_path) -> None:
    machine = make_machine(num_devices=1)
    children = [start_process(rank(number, 2, tmp_path), machine) for number in range(2)]
    results = [child.result() for child in children]
    counted = [  # all-reduces of 12 B, 2 B and 10 MiB; an all-gather of 2 B from each; a reduce-scatter of 2 B to each
        (0, 2, 3, 14 + 10 * MIB),
        (3, 2, 1, 4),
        (4, 2, 1, 4),
    ]
    assert results[0] == [(4.0, -4.0, 2e6), 0, 0.2, True, False, False, False, counted]
    assert results[1] == [(4.0, -4.0, 2e6), 0, 65504.0, True, False, False, False, counted]


def exchange(number: int, folder: Path) -> Callable[[Driver], list]:
    """An object of 700 KiB gathered from both, broadcast from rank 1, sent to rank 0; then the same, not computed.

    Last a short one, which rank 1 has padded to the length of rank 0's with what nobody computed.
    """

    def run(driver: Driver) -> list:
        communicator, size, seen = joined(driver, number, 2, folder), 700 * 1024, []
        mine, out = driver.malloc(MIB), driver.malloc(2 * MIB)
        for computed in (True, False):
            driver.write(mine, random.Random(number).randbytes(size))
            driver.mark(mine, size, computed=computed or not number)
            words = (c_size_t(size), 1, communicator, c_void_p())
            driver.check("ncclAllGather", c_void_p(mine), c_void_p(out), *words)
            seen.append(objects(driver, out, 2))
            driver.check("ncclBroadcast", c_void_p(mine), c_void_p(out), c_size_t(size), 1, 1, *words[2:])
            seen.append(objects(driver, out, 1))
            if number:
                driver.check("ncclSend", c_void_p(mine), c_size_t(size), 1, 0, *words[2:])
            else:
                driver.check("ncclRecv", c_void_p(out), c_size_t(size), 1, 1, *words[2:])
                seen.append(objects(driver, out, 1))
        driver.mark(mine, 100, computed=True)
        if number:
            driver.mark(mine + 60, 40, computed=False)
        driver.check("ncclAllGather", c_void_p(mine), c_void_p(out), c_size_t(100), *words[1:])
        return [*seen, driver.is_computed(out, 160), driver.is_computed(out + 160, 1)]

    def objects(driver: Driver, at: int, count: int) -> list[int | None]:
        """Return whose object lies at each place, None where it was not computed."""
        whose = {random.Random(k).randbytes(700 * 1024): k for k in range(2)}
        places = [at + k * 700 * 1024 for k in range(count)]
        return [whose[driver.read(k, 700 * 1024)] if driver.is_computed(k, 700 * 1024) else None for k in places]

    return run


def test_large_objects_arrive_whole_and_what_nobody_computed_does_not(make_machine, start_process, tmp_path) -> None:
    machine = make_machine(num_devices=1)
    children = [start_process(exchange(number, tmp_path), machine) for number in range(2)]
    assert children[0].result() == [[0, 1], [1], [1], [0, None], [None], [None], True, False]
    assert children[1].result() == [[0, 1], [1], [None, None], [None], True, False]


def test_a_peer_that_does_not_come_is_an_error(make_machine, in_process) -> None:
    def run(driver: Driver) -> int:
        unique, communicator = UniqueId(), c_void_p()
        driver.check("ncclGetUniqueId", byref(unique))
        return driver.call("ncclCommInitRank", byref(communicator), 2, unique, 0)

    machine = make_machine(collective_timeout_seconds=1)
    assert in_process(run, machine) == 6
    assert '"collective_failed"' in (machine / "events.jsonl").read_text()
