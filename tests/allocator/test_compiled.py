"""The allocator in C against the one in Python: the same numbers after every request, the same refusals."""

import random
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vramprobe.allocator import compiled
from vramprobe.allocator.allocator import CachingAllocator
from vramprobe.allocator.compiled import counting_allocator
from vramprobe.allocator.config import LARGE_SEGMENT, AllocatorConfig, parse_alloc_conf
from vramprobe.allocator.ledger import Device, Ledger, OutOfMemory
from vramprobe.lengths.course import STREAM, play
from vramprobe.log import pairing
from vramprobe.log.log import Log, PhaseMark
from vramprobe.log.pairing import Unpaired, log_from, scripts_of
from vramprobe.log.reserved import player
from vramprobe.units import GIB, MIB

SOURCES = Path(compiled.__file__).parent / "plain"
needs_it = pytest.mark.skipif(
    compiled.PlainAllocator is None, reason="the allocator in C was not built: no C compiler as vramprobe was installed"
)


def pair(config: AllocatorConfig | None = None, device: Device | None = None) -> tuple[CachingAllocator, Any]:
    made = counting_allocator(config, device)
    assert type(made) is compiled.PlainAllocator
    return CachingAllocator(config, device), made


def told(ask: Callable[..., object], *words: Any) -> object:
    """Return the error that a call raises, in a form that both allocators share; None without an error."""
    try:
        ask(*words)
    except OutOfMemory as error:
        return vars(error), str(error)
    except (AssertionError, KeyError) as error:
        return type(error)
    return None


def require_alike(one: CachingAllocator, other: Any) -> None:
    assert other.ledger.now() == one.ledger.now()
    assert other.ledger.peak() == one.ledger.peak()
    assert other.ledger.num_alloc_retries == one.ledger.num_alloc_retries


@needs_it
@pytest.mark.parametrize("limit_bytes", [None, 3 * GIB, 600 * MIB])
@pytest.mark.parametrize("conf", ["", "large_segment_size_mb:64"])
@pytest.mark.parametrize("seed", range(3))
def test_anything_at_random(seed: int, conf: str, limit_bytes: int | None) -> None:
    """Sizes over six orders of magnitude on three streams, in any order, with what a caller gets wrong."""
    rng = random.Random(seed)
    allocators = pair(parse_alloc_conf(conf), Device(segment_bytes=limit_bytes))
    alive: list[int] = []
    awaiting: list[int] = []
    for name in range(3000):
        words: tuple[Any, ...]
        match rng.choice(["allocate"] * 5 + ["free"] * 3 + ["request_free", "complete_free", "mistake", "empty_cache"]):
            case "allocate":
                any_size = rng.randrange(2, 10) * MIB, int(2 ** rng.uniform(0, 27))
                size_bytes = rng.choice((0, 512, MIB, 10 * MIB, *any_size))
                words = ("allocate", name, size_bytes, rng.choice((0, 0, 0, 1, 7)))
                alive.append(name)
            case "free" if alive:
                words = ("free", alive.pop(rng.randrange(len(alive))))
            case "request_free" if alive:
                awaiting.append(alive.pop(rng.randrange(len(alive))))
                words = ("request_free", awaiting[-1])
            case "complete_free" if awaiting:
                words = ("complete_free", awaiting.pop(rng.randrange(len(awaiting))))
            case "mistake":
                words = rng.choice([("free", "nobody's"), ("request_free", "nobody's"), ("complete_free", "nobody's")])
            case "empty_cache" if rng.random() < 0.1:
                words = ("empty_cache",)
            case _:
                words = ("allocate", alive[0], 1) if alive else ("empty_cache",)  # once more
        verb, *rest = words
        answers = [told(getattr(one, verb), *rest) for one in allocators]
        assert answers[0] == answers[1], words
        if isinstance(answers[0], tuple):
            alive.pop()
        if rng.random() < 0.02:
            for one in allocators:
                one.ledger.reset_peaks()
        require_alike(*allocators)
    assert allocators[0].ledger.num_alloc_retries > 0 or limit_bytes is None or limit_bytes > GIB


def test_a_request_on_another_stream_says_so_as_it_is_logged() -> None:
    allocator = CachingAllocator()
    play(allocator, [512, 3 * STREAM + 1024], 0)
    blocks = allocator._live
    assert [(number, block.requested) for number, block in blocks.items()] == [(0, 512), (1, 1024)]
    assert [block.pool for block in blocks.values()] == [allocator.pool(stream, is_small=True) for stream in (0, 3)]


@needs_it
def test_a_log() -> None:
    """Two steps of it, some requests on another stream; the cache is emptied at the first event."""
    rng, events, alive, number = random.Random(0), [0], [], 0
    while number < 2000:
        if alive and rng.random() < 0.5:
            events.append(~alive.pop(rng.randrange(len(alive))))
        else:
            events.append(int(2 ** rng.uniform(6, 26)) + rng.choice((0, 0, STREAM)))
            alive.append(number)
            number += 1
    events += [~one for one in alive]
    allocators = pair()
    for _ in range(2):
        for one in allocators:
            play(one, events, 0)
        require_alike(*allocators)
    assert allocators[0].ledger.now().allocated_bytes == 0 < allocators[0].ledger.now().reserved_bytes


@needs_it
@pytest.mark.parametrize(("events", "error"), [([5, 7, ~1, ~1], KeyError), ([~9], KeyError), ([1 << 40], OutOfMemory)])
def test_a_log_that_cannot_be(events: list[int], error: type[Exception]) -> None:
    for one in pair(device=Device(total_bytes=GIB)):
        with pytest.raises(error):
            play(one, events, 0)


@needs_it
def test_a_number_that_stands_is_not_asked_for_again() -> None:
    for one in pair():
        play(one, [5], 3)
        with pytest.raises(AssertionError, match="3 is already allocated"):
            play(one, [5], 3)


@needs_it
def test_made_anew_it_is_empty() -> None:
    _, one = pair()
    play(one, [5, 2 * MIB], 0)
    one.__init__(None, LARGE_SEGMENT)
    play(one, [7], 0)
    assert one.now().requested_bytes == 7
    with pytest.raises(KeyError):
        play(one, [~1], 0)


@needs_it
@pytest.mark.parametrize("words", [([0], [1], [1], [0]), (b"",)], ids=str)
def test_what_is_no_log_is_refused(words: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        pair()[1].play_log(*words)


@needs_it
def test_whoever_looks_at_counters_finds_each() -> None:
    one, other = pair()
    kinds = {"requested", "allocated", "active", "reserved", "num_segments", "num_alloc_retries"}
    counters = {name for name in Ledger.__slots__ if name.removesuffix("_peak") in kinds}
    assert len(counters) == 11
    for allocator in (one, other):
        allocator.allocate("a", 3 * MIB)
        allocator.allocate("b", MIB)
        allocator.free("a")
    for name in counters:
        assert getattr(other.ledger, name) == getattr(one.ledger, name), name
        with pytest.raises(AttributeError):
            setattr(other, name, 1)


@pytest.mark.parametrize(
    "conf",
    [
        "expandable_segments:True",
        "max_split_size_mb:64",
        "garbage_collection_threshold:0.8",
        "roundup_power2_divisions:4",
        "per_process_memory_fraction:0.5",
    ],
)
def test_other_settings_are_left_to_python(conf: str) -> None:
    assert type(counting_allocator(parse_alloc_conf(conf), Device(total_bytes=GIB))) is CachingAllocator


def test_without_it_python_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "PlainAllocator", None)
    assert type(counting_allocator()) is CachingAllocator


def test_it_compiles_without_a_warning(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_path("include"))
    if compiler is None or not (headers / "Python.h").exists():
        pytest.skip("no C compiler, or Python's headers are not installed")
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-c", "-DPy_LIMITED_API=0x030B0000"]
    sources = sorted(SOURCES.glob("*.c"))
    assert [source.name for source in sources] == ["blocks.c", "module.c", "pairing.c", "replay.c"]
    for source in sources[:2]:  # replay.c is WebAssembly's: tests/report/test_page_recipes.py
        command = [compiler, *flags, f"-I{headers}", str(source), "-o", str(tmp_path / f"{source.stem}.o")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def random_log(seed: int, num_events: int = 4000) -> Log:
    """Blocks of a few kinds that come and go, some of them late and on another stream, and an emptied cache."""
    chance = random.Random(seed)
    alive: list[tuple[int, int, int]] = []
    late: list[int] = []
    rows: list[tuple[int, int, int]] = []  # bytes, block, stream
    count = 0
    while len(rows) < num_events:
        what = chance.random()
        if what < 0.5 or not alive:
            count += 1
            size, stream = chance.choice([8, 700, 5000, 3 << 20, 17 << 20]), chance.choice([0, 0, 0, 1])
            alive.append((size, count, stream))
            rows.append((size, count, stream))
        elif what < 0.97:
            size, block, stream = alive.pop(chance.randrange(len(alive)))
            rows.append((-size, block, stream))
            if stream:
                late.append(block)
        elif late:
            rows.append((0, late.pop(0), 1))
        else:
            rows.append((0, 0, 0))
    sizes, blocks, streams = (np.array(column) for column in zip(*rows, strict=True))
    zeros = np.zeros(len(rows), dtype=np.int8)
    return Log(sizes, blocks, zeros, [PhaseMark("load", None, None, range(len(rows)))], streams=streams.astype(np.int8))


@needs_it
@pytest.mark.parametrize("seed", range(4))
def test_a_log_is_played_as_event_by_event(seed: int) -> None:
    log = random_log(seed)
    whole, plain = pair()
    for part in (slice(0, 1000), slice(1000, 2500), slice(2500, None)):
        for one in (plain, whole):
            one.ledger.reset_peaks()
            player(log, one)(part)
        require_alike(plain, whole)


@needs_it
def test_an_event_of_no_block_is_refused() -> None:
    """A free that comes late, of what was never freed, does nothing."""
    for size_bytes, error in ((-8, KeyError), (0, None)):
        sizes, blocks, causes = np.array([size_bytes]), np.array([1]), np.zeros(1, dtype=np.int8)
        log = Log(sizes, blocks, causes, [PhaseMark("load", None, None, range(1))])
        for one in pair():
            assert told(player(log, one), slice(None)) == error


@needs_it
@pytest.mark.parametrize("seed", range(4))
def test_frees_are_paired_as_event_by_event(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    log = replace(random_log(seed), streams=None)
    keep = (log.size_bytes != 0) & (np.isin(log.blocks, log.blocks[log.size_bytes > 0]))
    log = replace(log, **{name: getattr(log, name)[keep] for name in ("size_bytes", "blocks", "causes")})
    log = replace(log, marks=[PhaseMark("load", None, None, range(len(log)))])
    scripts = scripts_of([log])[0]
    fast = log_from(scripts, log.marks)
    broken = replace(scripts[0], ranks=np.where(scripts[0].codes < 0, 999, 0))
    with pytest.raises(Unpaired):
        log_from([broken], log.marks)
    monkeypatch.setattr(pairing, "paired", None)
    slow = log_from(scripts, log.marks)
    assert np.array_equal(fast.blocks, slow.blocks)
    with pytest.raises(Unpaired):
        log_from([broken], log.marks)
