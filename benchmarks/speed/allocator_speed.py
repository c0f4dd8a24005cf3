"""How fast the allocator replay is: events per second of a trace like a step's, of a random one and of a 70B's log.

Under default settings in C and in Python. python benchmarks/speed/allocator_speed.py [number of events, 1,000,000 by
default]
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator

from vramprobe.allocator import compiled
from vramprobe.allocator.config import parse_alloc_conf
from vramprobe.allocator.replay import Alloc, Event, Free, Mark, replay
from vramprobe.kernels.chip import Chip
from vramprobe.model.replayed import play
from vramprobe.spec import resolve
from vramprobe.terms.step.requests import Run


def steps(num_events: int, rng: random.Random) -> Iterator[Event]:
    """Layers forward and backward: what is saved lives until backward, temporaries live for a few operators."""
    made, step = 0, 0
    while made < num_events:
        yield Mark(f"step {step}")
        saved: list[str] = []
        for direction in ("forward", "backward"):
            for layer in range(32):
                recent: list[str] = []
                for op in range(40):
                    name = f"{step}.{direction}.{layer}.{op}"
                    yield Alloc(name, rng.choice((512, 16_384, 65_536, 2_097_152, 8_388_608, 33_554_432)))
                    if direction == "forward" and op % 4 == 0:
                        saved.append(name)
                    else:
                        recent.append(name)
                    if len(recent) > 3:
                        yield Free(recent.pop(0))
                    if direction == "backward" and op % 4 == 0 and saved:
                        yield Free(saved.pop())
                for name in recent:
                    yield Free(name)
                made += 80
        for name in saved:
            yield Free(name)
        step += 1


def anything(num_events: int, rng: random.Random) -> Iterator[Event]:
    """Sizes over six orders of magnitude, up to 2,000 blocks alive, freed in any order: the worst fragmentation."""
    alive: list[int] = []
    for name in range(num_events):
        if alive and (len(alive) > 2000 or rng.random() < 0.5):
            at = rng.randrange(len(alive))
            alive[at], alive[-1] = alive[-1], alive[at]
            yield Free(alive.pop())
        else:
            alive.append(name)
            yield Alloc(name, int(2 ** rng.uniform(6, 26)))


def main() -> None:
    num_events = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    in_c = compiled.PlainAllocator
    for kind in (steps, anything):
        events = list(kind(num_events, random.Random(0)))
        for conf, allocator in [
            ("", in_c),
            ("", None),
            ("expandable_segments:True", None),
            ("max_split_size_mb:64,roundup_power2_divisions:8", None),
        ]:
            compiled.PlainAllocator = allocator
            start = time.perf_counter()
            done = replay(events, parse_alloc_conf(conf))
            seconds = time.perf_counter() - start
            setting = conf or f"default{word(allocator)}"
            print(
                f"{kind.__name__:9} {setting:48} {len(events) / seconds / 1e6:.2f} M events/s, "
                f"{seconds:.1f} s for {len(events):,}; reserved / allocated at the peaks "
                f"{done.peak.reserved_bytes / done.peak.allocated_bytes:.3f}"
            )
    spec = resolve(
        model="llama-3.1-70b", method="qlora", batch_size=1, seq_len=4096, gradient_checkpointing=True, device="cuda"
    )
    for allocator in (in_c, None):
        compiled.PlainAllocator = allocator
        run = Run(spec, compiled.counting_allocator(), workspace_bytes=8 << 20, chip=Chip())
        start = time.perf_counter()
        play(run, run.allocator)
        num_played = spec.steps * len(run._log.parts[0])
        seconds = time.perf_counter() - start
        print(f"a 70B by QLoRA{word(allocator)}: its log, its load and {num_played:,} events in {1e3 * seconds:.0f} ms")


def word(allocator: object) -> str:
    return ", in Python" if allocator is None else ", in C"


if __name__ == "__main__":
    main()
