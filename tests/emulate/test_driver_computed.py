"""Map of computed bytes: against a byte array, copies, reads of what nobody computed, fills."""

import mmap
import random
from ctypes import c_int, c_size_t, c_void_p

import pytest
from driver_client import DEVICE_TO_HOST, HOST_TO_DEVICE, Driver
from driver_process import on_card

MIB = 1 << 20
ROOM = 400_000  # over six chunks of 64 KiB, with both ends inside one


@pytest.mark.parametrize("seed", range(8))
def test_the_map_is_the_byte_array(seed: int, make_machine, in_process) -> None:
    def run(driver: Driver) -> None:
        chance = random.Random(seed)
        base = driver.malloc(4 * MIB) + chance.choice((0, 512, 1, 65535))
        model = bytearray(ROOM)
        for _ in range(250):
            start = chance.randrange(ROOM)
            length = min(ROOM - start, chance.choice((1, 3, 16, 64, 1000, 65536, 131072, chance.randrange(1, ROOM))))
            if chance.random() < 0.3:
                start = min(ROOM - 1, start // 65536 * 65536)
                length = min(length, ROOM - start)
            kind = chance.choice("mmuc")
            if kind == "c":
                to = chance.randrange(ROOM - length + 1)
                driver.copy(base + to, base + start, length)
                model[to : to + length] = model[start : start + length]
            else:
                driver.mark(base + start, length, kind == "m")
                model[start : start + length] = bytes([kind == "m"]) * length
            for _ in range(8):
                at = chance.randrange(ROOM)
                n = min(ROOM - at, chance.choice((1, 2, 8, 100, 70000)))
                assert driver.is_computed(base + at, n) == (0 not in model[at : at + n]), (at, n)
                assert driver.any_computed(base + at, n) == (1 in model[at : at + n]), (at, n)

    in_process(run, make_machine())


def test_what_makes_bytes_computed(make_machine, in_process) -> None:
    def run(driver: Driver) -> list[bool]:
        a, b, large = driver.malloc(MIB), driver.malloc(MIB), driver.malloc(64 * MIB)
        seen = [driver.is_computed(a, 1)]
        driver.write(a, b"x" * 100)
        seen += [driver.is_computed(a, 100), driver.is_computed(a, 101)]
        driver.copy(b + 50, a + 50, 100)
        seen += [driver.is_computed(b + 50, 50), driver.is_computed(b + 50, 51)]
        driver.launch()
        seen.append(driver.is_computed(a, 100))
        driver.memset(large, 0, 64 * MIB)
        seen.append(driver.is_computed(large, 64 * MIB))
        driver.memset(large, 7, 64 * MIB)  # too large to write, so not known
        seen.append(driver.is_computed(large, 1))
        driver.mark(large, 64 * MIB)
        driver.write(large, bytes(5 * MIB))  # larger than copy_max_bytes: not moved
        seen += [driver.is_computed(large, 1), driver.is_computed(large + 5 * MIB, 59 * MIB)]
        driver.free(a)
        seen.append(driver.is_computed(driver.malloc(MIB), 1))
        return seen

    no, yes = False, True
    assert in_process(run, make_machine()) == [no, yes, no, yes, no, yes, yes, no, no, yes, no]


@on_card()
def test_reads_of_what_nobody_computed_are_counted_and_told(driver: Driver) -> None:
    pointer, told = driver.malloc(MIB), []
    driver.on_uncomputed_read(lambda address, n: told.append((address - pointer, n)))
    driver.write(pointer, b"abcd")
    assert driver.read(pointer, 4) == b"abcd"
    assert (driver.uncomputed_reads(), told) == (0, [])
    driver.read(pointer, 5)
    driver.read(pointer + 100, 50)
    assert (driver.uncomputed_reads(), told) == (2, [(0, 5), (100, 50)])
    rows = (c_int * 100)()
    width, height = c_size_t(4), c_size_t(3)
    driver.mark(pointer + 1000, 4), driver.mark(pointer + 1064, 4)
    arguments = c_size_t(4), c_void_p(pointer + 1000), c_size_t(64), width, height, DEVICE_TO_HOST
    driver.check("cudaMemcpy2D", rows, *arguments)
    assert told[2:] == [(1000, 132)], "one read, though of three rows"
    driver.mark(pointer + 1128, 4)
    driver.check("cudaMemcpy2D", rows, *arguments)
    driver.check("cudaMemcpy2DAsync", rows, *arguments, c_void_p(0))
    assert driver.uncomputed_reads() == 3
    host = driver.pointer("cudaMallocHost", c_size_t(100))
    driver.check("cudaMemcpyAsync", c_void_p(host), c_void_p(pointer + 9000), c_size_t(10), 2, c_void_p(0))
    assert driver.uncomputed_reads() == 4


@on_card(returns=1)
def test_the_callback_may_use_the_driver(driver: Driver) -> int:
    pointer = driver.malloc(MIB)
    driver.on_uncomputed_read(lambda address, n: driver.mark(driver.malloc(100) and address, n))
    driver.read(pointer, 8), driver.read(pointer, 8)
    return driver.uncomputed_reads()


def mixed(driver: Driver) -> bytes:
    pointer = driver.malloc(MIB)
    driver.write(pointer + 4, b"real")
    return driver.read(pointer, 12, before=b"............")


def test_fills(make_machine, in_process) -> None:
    assert in_process(mixed, make_machine(fill="zeros")) == b"\0\0\0\0real\0\0\0\0"
    assert in_process(mixed, make_machine(fill="ones")) == b"\1\1\1\1real\1\1\1\1"
    first = in_process(mixed, make_machine(fill="random", fill_seed=5))

    def elsewhere(driver: Driver) -> bytes:
        held = mmap.mmap(-1, 64 * MIB)  # so that the card's addresses begin elsewhere
        return mixed(driver) if held else b""

    again = in_process(elsewhere, make_machine(fill="random", fill_seed=5))
    other = in_process(mixed, make_machine(fill="random", fill_seed=6))
    assert first == again != other
    assert first[4:8] == b"real"

    def kept(driver: Driver) -> bytes:
        pointer = driver.malloc(MIB)
        driver.write(pointer, b"old stuff")
        driver.mark(pointer, 9, computed=False)
        return driver.read(pointer, 9)

    assert in_process(kept, make_machine(fill="keep")) == b"old stuff"
    assert in_process(kept, make_machine(fill="zeros")) == bytes(9)


def test_fresh_memory_holds_the_fill_for_who_looks_past_the_driver(make_machine, in_process) -> None:
    def run(driver: Driver) -> tuple[bool, bytes, bytes]:
        import ctypes

        pointer = driver.malloc(1000)
        return driver.is_computed(pointer, 1), ctypes.string_at(pointer, 4), driver.read(pointer, 4)

    computed, seen, read = in_process(run, make_machine(fill="random", fill_seed=3))
    assert not computed
    assert seen == read != bytes(4)


@on_card(returns=(b"host", 1))
def test_a_large_read_of_nothing_leaves_the_host_alone(driver: Driver) -> tuple[bytes, int]:
    pointer = driver.malloc(8 * MIB)
    return driver.read(pointer, 8 * MIB, before=b"host")[:4], driver.uncomputed_reads()


@on_card(returns=[7, 2**40, 0, 0, 1, 3, False])
def test_injected_counts_are_read_once_each_and_not_counted(driver: Driver) -> list[int]:
    pointer = driver.malloc(100)
    driver.inject(7), driver.inject(2**40)
    big = driver.read(pointer, 16)
    seen = [int.from_bytes(driver.read(pointer, n), "little") for n in (4, 8)]
    before = driver.uncomputed_reads()
    seen.append(int.from_bytes(driver.read(pointer, 8), "little"))
    driver.inject(1), driver.call("control_clear_counts")
    seen.append(int.from_bytes(driver.read(pointer, 8), "little"))
    return [*seen, before, driver.uncomputed_reads(), any(big)]


def test_marking_gigabytes_touches_almost_nothing(make_machine, in_process) -> None:
    def run(driver: Driver) -> tuple[bool, int]:
        def resident() -> int:
            return int(open("/proc/self/statm").read().split()[1]) * 4096

        pointer = driver.malloc(60 << 30)
        before = resident()
        driver.mark(pointer + 1, (60 << 30) - 2)
        return driver.is_computed(pointer + 1, (60 << 30) - 2), resident() - before

    computed, grown = in_process(run, make_machine(total_bytes=80 << 30))
    assert computed
    assert grown < 4 * MIB


@on_card(returns=b"by the CPU")
def test_device_memory_is_the_hosts_to_read_and_write(driver: Driver) -> bytes:
    import ctypes

    pointer = driver.malloc(100)
    ctypes.memmove(pointer, b"by the CPU", 10)
    driver.mark(pointer, 10)
    driver.check("cudaMemcpy", c_void_p(pointer + 50), c_void_p(pointer), c_size_t(10), HOST_TO_DEVICE)
    return driver.read(pointer + 50, 10)
