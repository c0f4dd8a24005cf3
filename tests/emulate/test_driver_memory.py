"""Memory charged to a card: random sequences against a model in Python, exhaustion, threads, pools, virtual memory."""

import itertools
import random
import threading
from collections.abc import Callable
from ctypes import c_size_t, c_void_p
from pathlib import Path

import pytest
from driver_client import OUT_OF_MEMORY, CudaError, Driver
from driver_process import on_card
from grids import grid

MIB = 1 << 20
GRANULE, CHUNK = 2 * MIB, 32 * MIB
CONTEXT = 100 * MIB


def up(n: int, to: int) -> int:
    return -(-n // to) * to


@on_card(returns=[1, 0, 0, CONTEXT])
def test_a_context_is_charged_by_the_first_call_that_needs_one(driver: Driver) -> list[int]:
    seen = [driver.number("cudaGetDeviceCount"), driver.call("control_process_used_bytes", 0)]
    driver.number("cudaDeviceGetAttribute", 16, 0)
    driver.nvml_used()
    seen.append(driver.call("control_process_used_bytes", 0))
    driver.check("cudaSetDevice", 0)
    seen.append(driver.call("control_process_used_bytes", 0))
    return seen


@on_card(returns=[2 * MIB, 2 * MIB, 2 * MIB, 2 * MIB, 2 * MIB, 4 * MIB, 0, 0])
def test_sizes_as_a_card_holds_them(driver: Driver) -> list[int]:
    driver.free(0)
    used = []
    for num_bytes in (1, 511, 1 * MIB - 1, 1 * MIB, 2 * MIB, 2 * MIB + 1):
        pointer = driver.malloc(num_bytes)
        used.append(driver.used() - CONTEXT)
        driver.free(pointer)
    return [*used, driver.used() - CONTEXT, driver.malloc(0)]


@on_card(returns=[512, 518, 520, 500, 512, 522])
def test_segments_are_handed_out_from_the_top_down_and_the_highest_hole_first(driver: Driver) -> list[int]:
    """As the listings of torch.cuda.memory_snapshot() show that tests/allocator/test_allocator.py replays."""
    first = driver.malloc(20 * MIB)
    second, third, fourth = (driver.malloc(n * MIB) for n in (512, 6, 2))
    driver.free(second)
    driver.free(fourth)
    in_hole, beside_it, below = driver.malloc(500 * MIB), driver.malloc(12 * MIB), driver.malloc(3 * MIB)
    return [(first - at) // MIB for at in (second, third, fourth, in_hole, beside_it, below)]


@on_card(returns=(GRANULE, 2 * GRANULE, 0))
def test_small_allocations_share_a_granule(driver: Driver) -> tuple[int, int, int]:
    pointers = [driver.malloc(512) for _ in range(4096)]
    full = driver.used() - CONTEXT
    one_more = driver.malloc(1)
    more = driver.used() - CONTEXT
    for pointer in [*pointers, one_more]:
        driver.free(pointer)
    return full, more, driver.used() - CONTEXT


class Model:
    """Bytes that a card with unlimited address space must be charged, by kind."""

    def __init__(self) -> None:
        self.small: dict[int, int] = {}
        self.large: dict[int, int] = {}
        self.pooled: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.reserved = 0

    def used(self) -> int:
        granules = {pointer // GRANULE for pointer in self.small}
        mapped = sum(num_bytes for num_bytes, _ in self.mapped.values())
        return len(granules) * GRANULE + sum(self.large.values()) + self.reserved + mapped


@pytest.mark.parametrize("seed", grid(range(12), *range(4)))
def test_random_sequences_are_charged_as_the_model_says(seed: int, make_machine, in_process) -> None:
    def run(driver: Driver) -> int:
        chance, model = random.Random(seed), Model()
        driver.free(0)
        pool = driver.pool()
        driver.set_pool_attribute(pool, 4, 2**64 - 1)
        peak = 0
        for _ in range(400):
            step(driver, chance, model)
            peak = max(peak, model.used())
            assert driver.used() - CONTEXT == model.used()
            assert driver.pool_attribute(pool, 7) == sum(model.pooled.values())
            assert driver.pool_attribute(pool, 5) == model.reserved
            check_apart(model)
        assert driver.call("control_device_peak_bytes", 0) >= peak + CONTEXT
        return driver.used()

    in_process(run, make_machine(total_bytes=64 << 30))


def step(driver: Driver, chance: random.Random, model: Model) -> None:
    kind = chance.choice("sslLppPvV")
    if kind == "s":
        num_bytes = chance.randint(1, MIB - 1)
        model.small[driver.malloc(num_bytes)] = num_bytes
    elif kind == "l" and model.small:
        pointer = chance.choice(list(model.small))
        driver.free(pointer)
        del model.small[pointer]
    elif kind == "L":
        if len(model.large) > 20:
            pointer = chance.choice(list(model.large))
            driver.free(pointer)
            del model.large[pointer]
        else:
            num_bytes = chance.randint(MIB, 50 * MIB)
            model.large[driver.malloc(num_bytes)] = up(num_bytes, GRANULE)
    elif kind == "p":
        num_bytes = chance.randint(1, 40 * MIB)
        model.pooled[driver.malloc_async(num_bytes)] = up(num_bytes, 512)
        model.reserved = max(model.reserved, up(sum(model.pooled.values()), CHUNK))
    elif kind == "P":
        for pointer in [p for p in model.pooled if chance.random() < 0.5]:
            driver.free_async(pointer)
            del model.pooled[pointer]
        if chance.random() < 0.3:
            driver.check("cudaMemPoolTrimTo", c_void_p(driver.pool()), c_size_t(0))
            model.reserved = up(sum(model.pooled.values()), CHUNK)
    elif kind == "v":
        num_bytes = GRANULE * chance.randint(1, 10)
        pointer, handle = driver.reserve(num_bytes), driver.make_memory(num_bytes)
        driver.map(pointer, num_bytes, handle)
        model.mapped[pointer] = (num_bytes, handle)
    elif kind == "V" and model.mapped:
        pointer, (num_bytes, handle) = chance.choice(list(model.mapped.items()))
        first, second = chance.sample([(driver.unmap, pointer, num_bytes), (driver.release_memory, handle)], 2)
        used = driver.used()
        first[0](*first[1:])
        assert driver.used() == used, "memory lives as long as its handle or its mapping"
        second[0](*second[1:])
        driver.check("cuMemAddressFree", c_void_p(pointer), c_size_t(num_bytes))
        del model.mapped[pointer]


def check_apart(model: Model) -> None:
    spans = [*model.small.items(), *model.large.items(), *model.pooled.items()]
    spans += [(pointer, num_bytes) for pointer, (num_bytes, _) in model.mapped.items()]
    spans.sort()
    for (start, num_bytes), (following, _) in itertools.pairwise(spans):
        assert start + num_bytes <= following


@on_card()
def test_exhaustion_gives_error_2_and_the_right_free_bytes(driver: Driver) -> None:
    free, total = driver.info()
    assert (free, total) == (924 * MIB, 1024 * MIB)
    with pytest.raises(CudaError) as failed:
        driver.malloc(free + 1)
    assert failed.value.code == OUT_OF_MEMORY
    assert driver.call("cudaPeekAtLastError") == OUT_OF_MEMORY
    assert driver.call("cudaGetLastError") == OUT_OF_MEMORY
    assert driver.call("cudaGetLastError") == 0, "taken once"
    assert driver.info() == (free, total), "a failure holds nothing"
    pointer = driver.malloc(free)
    assert driver.info()[0] == 0
    for small in (lambda: driver.malloc(1), lambda: driver.malloc_async(1), lambda: driver.make_memory(GRANULE)):
        with pytest.raises(CudaError) as failed:
            small()
        assert failed.value.code == OUT_OF_MEMORY
    driver.free(pointer)
    assert driver.info() == (free, total)


@on_card(returns=[1, 1, 1, 1, 1, 0, 1])
def test_what_cannot_be_freed_is_an_invalid_value(driver: Driver) -> list[int]:
    pointer, small, host = (driver.malloc(4 * MIB), driver.malloc(100), driver.pointer("cudaMallocHost", c_size_t(100)))
    driver.free(small)
    driver.free(0)
    wrong = [pointer + 512, small, host, 12345]
    return [driver.call("cudaFree", c_void_p(p)) for p in wrong] + [
        driver.call("cudaFreeHost", c_void_p(pointer)),
        driver.call("cudaFreeHost", c_void_p(host)),
        driver.call("cudaFreeHost", c_void_p(host)),
    ]


@on_card(returns=(0, 0), total_bytes=64 << 30)
def test_threads_allocate_and_free_at_once(driver: Driver) -> tuple[int, int]:
    driver.free(0)
    failures = []

    def work(seed: int) -> None:
        try:
            chance, held = random.Random(seed), []
            for _ in range(300):
                if held and chance.random() < 0.5:
                    driver.free(held.pop(chance.randrange(len(held))))
                else:
                    held.append(driver.malloc(chance.choice((100, 5000, 3 * MIB))))
            for pointer in held:
                driver.free(pointer)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return driver.used() - CONTEXT, len(failures)


@on_card(returns=[128 * MIB, 0, 128 * MIB, CHUNK, 128 * MIB, 128 * MIB])
def test_a_pool_gives_back_beyond_its_threshold_when_the_host_waits(driver: Driver) -> list[int]:
    pool, seen = driver.pool(), []
    for threshold in (0, CHUNK, 2**64 - 1):
        driver.set_pool_attribute(pool, 4, threshold)
        pointer = driver.malloc_async(100 * MIB)
        driver.free_async(pointer)
        seen.append(driver.pool_attribute(pool, 5))
        driver.check("cudaStreamSynchronize", c_void_p(0))
        seen.append(driver.pool_attribute(pool, 5))
    return seen


@on_card(returns=0)
def test_idle_pool_memory_makes_room_for_cudamalloc(driver: Driver) -> int:
    driver.set_pool_attribute(driver.pool(), 4, 2**64 - 1)
    driver.free_async(driver.malloc_async(800 * MIB))
    driver.malloc(900 * MIB)
    return driver.pool_attribute(driver.pool(), 5)


@on_card()
def test_virtual_memory_refuses_what_a_card_refuses(driver: Driver) -> None:
    driver.free(0)
    pointer, handle = driver.reserve(4 * GRANULE), driver.make_memory(GRANULE)
    driver.map(pointer, GRANULE, handle)

    def code(function: Callable, *arguments: object) -> int:
        with pytest.raises(CudaError) as failed:
            function(*arguments)
        return failed.value.code

    assert code(driver.map, pointer, GRANULE, driver.make_memory(GRANULE)) == 208
    assert code(driver.map, pointer + GRANULE, 2 * GRANULE, handle) == 1
    assert code(driver.map, pointer + 1, GRANULE, handle) == 1
    assert code(driver.unmap, pointer, 2 * GRANULE) == 1
    assert code(driver.make_memory, GRANULE + 1) == 1
    assert driver.call("cuMemAddressFree", c_void_p(pointer), c_size_t(4 * GRANULE)) == 1, "mapped"
    driver.unmap(pointer, GRANULE)
    driver.check("cuMemAddressFree", c_void_p(pointer), c_size_t(4 * GRANULE))


@on_card(returns=b"before\0\0\0\0after")
def test_one_handle_mapped_twice_shows_the_same_bytes(driver: Driver) -> bytes:
    driver.free(0)
    first, handle = driver.reserve(2 * GRANULE), driver.make_memory(GRANULE)
    driver.map(first, GRANULE, handle)
    driver.write(first, b"before")
    driver.map(first + GRANULE, GRANULE, handle)
    driver.write(first + 10, b"after")
    driver.mark(first + GRANULE, 100)
    return driver.read(first + GRANULE, 15)


def test_freed_memory_is_zero_and_costs_the_host_nothing(make_machine, in_process) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def run(driver: Driver) -> tuple[bytes, int]:
        before = resident()
        small = driver.malloc(10_000)
        driver.write(small, b"x" * 10_000)
        driver.free(small)
        assert driver.malloc(10_000) == small
        driver.mark(small, 10_000)
        assert driver.read(small, 10_000) == bytes(10_000), "the pages at its ends as well"
        pointer = driver.malloc(3 * MIB)
        driver.write(pointer, b"x" * (3 * MIB))
        driver.free(pointer)
        again = driver.malloc(3 * MIB)
        driver.mark(again, 3 * MIB)
        big = driver.malloc(900 * MIB)
        driver.memset(big, 0, 900 * MIB)
        return driver.read(again, 3 * MIB).strip(b"\0"), resident() - before

    left, grown = in_process(run, make_machine())
    assert left == b""
    assert grown < 100 * MIB


def test_zeros_that_are_copied_to_untouched_memory_cost_the_host_nothing(make_machine, in_process) -> None:
    """As an empty checkpoint's experts, a piece of 3 MiB each."""

    def run(driver: Driver) -> tuple[bytes, bool, int]:
        zeros, num_pieces = bytes(3 * MIB), 60
        pointer = driver.malloc(num_pieces * 3 * MIB)
        before = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        for piece in range(num_pieces):
            driver.write(pointer + piece * 3 * MIB, zeros)
        grown = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 - before
        known = driver.is_computed(pointer, num_pieces * 3 * MIB)
        driver.write(pointer, b"x" * (3 * MIB))
        driver.write(pointer, zeros)
        return driver.read(pointer, 3 * MIB).strip(b"\0"), known, grown

    left, known, grown = in_process(run, make_machine())
    assert (left, known) == (b"", True)
    assert grown < 20 * MIB


@on_card(returns=0)
def test_reset_gives_everything_back(driver: Driver) -> int:
    driver.malloc(100), driver.malloc(10 * MIB), driver.malloc_async(10 * MIB)
    pointer, handle = driver.reserve(GRANULE), driver.make_memory(GRANULE)
    driver.map(pointer, GRANULE, handle)
    driver.check("cudaDeviceReset")
    return driver.call("control_process_used_bytes", 0)


@on_card(returns=[64 << 20, 0, 32 << 20, 32 << 20])
def test_the_peak_of_a_stretch_begins_anew_with_each_look(driver: Driver) -> list[int]:
    def peak() -> int:
        return driver.call("control_take_device_peak_bytes", 0)

    driver.free(0)  # the context
    base = driver.used()
    block = driver.malloc(64 << 20)
    driver.free(block)
    found = [peak() - base, peak() - base]
    block = driver.malloc(32 << 20)
    return [*found, peak() - base, peak() - base]
