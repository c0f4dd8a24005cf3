"""Completion as the host learns of it: at once before its process trains, then once it waits or a queue is full."""

import threading
from collections.abc import Callable
from ctypes import c_float, c_size_t, c_uint, c_void_p, create_string_buffer

import pytest
from driver_client import DEVICE_TO_HOST, Driver
from driver_process import on_card

NOT_READY = 600


class Recorded:
    """Three events: the second on a stream of its own."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        driver.call("control_trains")
        self.pointer = driver.malloc(4096)
        self.side = driver.pointer("cudaStreamCreateWithFlags", c_uint(1))
        self.events = [driver.pointer("cudaEventCreate") for _ in range(3)]
        for event, stream in zip(self.events, (0, self.side, 0), strict=True):
            driver.launch(stream)
            driver.check("cudaEventRecord", c_void_p(event), c_void_p(stream))

    def ready(self) -> list[bool]:
        codes = [self.driver.call("cudaEventQuery", c_void_p(event)) for event in self.events]
        assert set(codes) <= {0, NOT_READY}
        return [code == 0 for code in codes]


@pytest.mark.parametrize(("blocking", "ready"), [("0", False), ("1", True)])
def test_a_host_whose_launches_block(blocking: str, ready: bool, make_machine, in_process, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", blocking)
    assert in_process(lambda driver: Recorded(driver).ready(), make_machine()) == [ready] * 3


def wait_for_the_second(driver: Driver, seen: Recorded) -> None:
    driver.check("cudaEventSynchronize", c_void_p(seen.events[1]))


def wait_for_the_side_stream(driver: Driver, seen: Recorded) -> None:
    driver.check("cudaStreamSynchronize", c_void_p(seen.side))


def wait_for_the_device(driver: Driver, seen: Recorded) -> None:
    driver.check("cudaDeviceSynchronize")


def free(driver: Driver, seen: Recorded) -> None:
    driver.free(seen.pointer)


def copy_to_the_host(driver: Driver, seen: Recorded) -> None:
    buffer = create_string_buffer(8)
    driver.check("cudaMemcpy", buffer, c_void_p(seen.pointer), c_size_t(8), DEVICE_TO_HOST)


def copy_to_pageable_memory(driver: Driver, seen: Recorded) -> None:
    buffer = create_string_buffer(8)
    driver.check("cudaMemcpyAsync", buffer, c_void_p(seen.pointer), c_size_t(8), DEVICE_TO_HOST, c_void_p(seen.side))


def copy_to_pinned_memory(driver: Driver, seen: Recorded) -> None:
    pinned = driver.pointer("cudaHostAlloc", c_size_t(8), c_uint(0))
    driver.check("cudaMemcpyAsync", c_void_p(pinned), c_void_p(seen.pointer), c_size_t(8), DEVICE_TO_HOST, c_void_p(0))


def wait_on_another_stream(driver: Driver, seen: Recorded) -> None:
    driver.check("cudaStreamWaitEvent", c_void_p(seen.side), c_void_p(seen.events[0]), c_uint(0))


def ask_for_the_stream(driver: Driver, seen: Recorded) -> None:
    assert driver.call("cudaStreamQuery", c_void_p(seen.side)) == NOT_READY


@pytest.mark.parametrize(
    ("act", "ready"),
    [
        (wait_for_the_second, [True, True, False]),
        (wait_for_the_side_stream, [True, True, False]),
        (wait_for_the_device, [True] * 3),
        (free, [True] * 3),
        (copy_to_the_host, [True] * 3),
        (copy_to_pageable_memory, [True] * 3),  # it is behind all that was recorded before it
        (copy_to_pinned_memory, [False] * 3),
        (wait_on_another_stream, [False] * 3),
        (ask_for_the_stream, [False] * 3),
    ],
)
def test_a_busy_card_is_done_with_what_the_host_waits_for(act: Callable, ready, make_machine, in_process) -> None:
    def run(driver: Driver) -> tuple[list[bool], list[bool]]:
        seen = Recorded(driver)
        before = seen.ready()
        act(driver, seen)
        return before, seen.ready()

    assert in_process(run, make_machine()) == ([False] * 3, ready)


@on_card(returns=[NOT_READY, 0])
def test_a_time_between_events_that_are_not_done(driver: Driver) -> list[int]:
    first, _, last = (c_void_p(event) for event in Recorded(driver).events)
    codes = [driver.call("cudaEventElapsedTime", c_float_pointer(), first, last)]
    driver.check("cudaEventSynchronize", last)
    return [*codes, driver.call("cudaEventElapsedTime", c_float_pointer(), first, last)]


@on_card(returns=[0, 0, NOT_READY, 0])
def test_a_busy_card_is_done_at_once_before_its_process_trains(driver: Driver) -> list[int]:
    event = c_void_p(driver.pointer("cudaEventCreate"))
    codes = []
    for _ in range(2):
        driver.check("cudaEventRecord", event, c_void_p(0))
        codes.append(driver.call("cudaEventQuery", event))
        driver.call("control_trains")
        codes.append(driver.call("cudaEventQuery", event))  # what was recorded before is done
    return codes


def test_a_queue_of_launches_is_never_longer(make_machine, in_process) -> None:
    def run(driver: Driver) -> list[list[bool]]:
        seen, answers = Recorded(driver), []
        for num_launches in (1021, 1, 1, 1):  # a launch before each event counts for those before it
            for _ in range(num_launches):
                driver.launch()
            answers.append(seen.ready())
        return answers

    later = [[False] * 3, [True, False, False], [True, True, False], [True] * 3]
    assert in_process(run, make_machine()) == later


@on_card(returns=0)
def test_an_event_that_was_never_recorded_is_done(driver: Driver) -> int:
    Recorded(driver)
    return driver.call("cudaEventQuery", c_void_p(driver.pointer("cudaEventCreate")))


@on_card(returns=(False, 255))
def test_a_host_that_does_nothing_but_ask_is_answered(driver: Driver) -> tuple[bool, int]:
    """-> of one who launches between: ready; who only asks: how often in vain."""
    seen = Recorded(driver)
    event = c_void_p(seen.events[0])
    for _ in range(1000):
        driver.launch()
        driver.call("cudaEventQuery", event)
    busy = seen.ready()[0]
    num_polls = 0
    while driver.call("cudaEventQuery", event) == NOT_READY:
        num_polls += 1
    return busy, num_polls


@on_card(returns=65_535)
def test_a_host_that_asks_for_several_in_turn_is_answered_too(driver: Driver) -> int:
    """As torch's watchdog does while its group ends: it spins over all collectives that are not done."""
    seen = Recorded(driver)
    num_polls = 0
    while driver.call("cudaEventQuery", c_void_p(seen.events[num_polls % 2])) == NOT_READY and num_polls < 100_000:
        num_polls += 1
    return num_polls


def c_float_pointer() -> object:
    return (c_float * 1)()


@on_card(returns=(True, [False] * 3))
def test_a_thread_beside_the_program_that_waits_makes_nothing_done_for_it(driver: Driver) -> tuple[bool, list[bool]]:
    """As torch's watchdog, which looks by the clock: what the program keeps would depend on this machine."""
    seen, answers = Recorded(driver), []
    event = c_void_p(seen.events[2])
    asks = threading.Thread(target=lambda: answers.extend(driver.call("cudaEventQuery", event) for _ in range(300)))
    asks.start()
    asks.join()
    return answers[-1] == 0, seen.ready()
