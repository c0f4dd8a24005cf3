"""Ends of collectives as torch's watchdog thread is told of them, by a thread of its name that does nothing but ask."""

import ctypes
import threading
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p

import pytest
from driver_client import Driver
from driver_process import on_card

NOT_READY, LAUNCH_QUEUE = 600, 1024


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


class Group:
    """A process group of one rank, as ProcessGroupNCCL calls NCCL; ``asks``: has a watchdog."""

    def __init__(self, driver: Driver, *, asks: bool = True) -> None:
        self.driver = driver
        self.memory = driver.malloc(4096)
        self.stream = driver.pointer("cudaStreamCreateWithFlags", c_uint(1))
        self.communicator = c_void_p()
        driver.check("ncclCommInitRank", byref(self.communicator), 1, UniqueId(), 0)
        self.works: list[int] = []  # end events of what runs
        self.ended: list[int] = []
        self.num_looks = 0
        self._looks = threading.Event()
        if asks:
            threading.Thread(target=self._watch, daemon=True).start()

    def collective(self, *, beside: bool = True) -> int:
        """-> its end event. ``beside``: on a stream of its own (async_op), after what the current one has."""
        stream = self.stream if beside else 0
        if beside:
            current = c_void_p(self.driver.pointer("cudaEventCreate"))
            self.driver.check("cudaEventRecord", current, c_void_p(0))
            self.driver.check("cudaStreamWaitEvent", c_void_p(stream), current, c_uint(0))
        at, count = c_void_p(self.memory), c_size_t(1)
        self.driver.check("ncclAllReduce", at, at, count, 7, 0, self.communicator, c_void_p(stream))
        end = self.driver.pointer("cudaEventCreate")
        self.driver.check("cudaEventRecord", c_void_p(end), c_void_p(stream))
        self.works.append(end)
        return end

    def _watch(self) -> None:
        ctypes.CDLL(None).prctl(15, b"pt_nccl_watchdg", 0, 0, 0)
        while not self._looks.wait(0.003):
            for event in list(self.works):
                if self.driver.call("cudaEventQuery", c_void_p(event)) == 0:
                    self.works.remove(event)
                    self.ended.append(event)
            self.num_looks += 1

    def looked(self) -> list[int]:
        """Return what had ended after the watchdog looked at all twice."""
        until = self.num_looks + 3
        while self.num_looks < until:
            self._looks.wait(0.001)
        return list(self.ended)


def host_waits(group: Group) -> None:
    group.driver.check("cudaDeviceSynchronize")


def a_queue_of_launches(group: Group) -> None:
    for _ in range(LAUNCH_QUEUE):
        group.driver.launch()


def fewer_launches(group: Group) -> None:
    for _ in range(LAUNCH_QUEUE - 1):
        group.driver.launch()


@pytest.mark.parametrize(("act", "ends"), [(host_waits, True), (a_queue_of_launches, True), (fewer_launches, False)])
@pytest.mark.parametrize("trains", [False, True])
def test_the_next_collective_says_what_has_ended(
    act: Callable, ends: bool, trains: bool, make_machine, in_process
) -> None:
    def run(driver: Driver) -> list[list[int]]:
        if trains:
            driver.call("control_trains")
        group = Group(driver)
        first = group.collective()
        before = group.looked()
        act(group)
        meanwhile = group.looked()  # whatever has been waited for, and however often it looks
        group.collective()
        return [before, meanwhile, list(group.ended), [first]]

    before, meanwhile, after, first = in_process(run, make_machine())
    assert before == meanwhile == []
    assert after == (first if ends else [])


def wait_for_the_work(group: Group, end: int) -> None:
    group.driver.check("cudaStreamWaitEvent", c_void_p(0), c_void_p(end), c_uint(0))


def destroy_the_group(group: Group, end: int) -> None:
    group.driver.check("ncclCommDestroy", group.communicator)


def end_the_program(group: Group, end: int) -> None:
    group.driver.call("control_settle", c_int(0))


@pytest.mark.parametrize("act", [wait_for_the_work, destroy_the_group, end_the_program])
def test_what_ends_without_a_collective(act: Callable, make_machine, in_process) -> None:
    def run(driver: Driver) -> bool:
        group = Group(driver)
        end = group.collective()
        before = group.looked()
        act(group, end)
        return before == [] and group.looked() == [end]

    assert in_process(run, make_machine())


def test_a_collective_of_the_current_stream_keeps_nothing(make_machine, in_process) -> None:
    def run(driver: Driver) -> bool:
        group = Group(driver)
        return [group.collective(beside=False)] == group.looked()

    assert in_process(run, make_machine())


@on_card(returns=[0, 0, 0])
def test_without_a_watchdog_nobody_is_waited_for(driver: Driver) -> list[int]:
    group = Group(driver, asks=False)
    events = [group.collective() for _ in range(2)]
    host_waits(group)
    events.append(group.collective())
    return [driver.call("cudaEventQuery", c_void_p(event)) for event in events]


@on_card(returns=4095)
def test_a_watchdog_that_asks_without_end_is_answered(driver: Driver) -> int:
    """A process group that is shut down waits for its works so."""
    end, answers = c_void_p(Group(driver, asks=False).collective()), []

    def ask() -> None:
        answers.extend(driver.call("cudaEventQuery", end) for _ in range(5000))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return answers.index(0)
