"""Self-tests: what only a process with torch can tell of a machine. ``python -m vramprobe.measure.selftest NAME``.

In: the name of a test. Out: one line of JSON on stdout, ``{"error": …}`` where the test could not be made. Judges
nothing: doctor.py does, from another process, so that this one may hang or die.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from vramprobe.measure import nvml
from vramprobe.units import GIB, MIB

#: What the cpu instrument is given to see.
CPU_BLOCK_BYTES = 64 * MIB


def torch_build() -> dict[str, Any]:
    """torch's version, the CUDA it was built for, and the GPU that it calls 0, which makes no context."""
    import torch

    found: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "available": torch.cuda.is_available(),
    }
    if found["available"]:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "uuid": nvml.uuid_of(properties, 0),
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
        }
    return found


def one_gib_on_cuda() -> dict[str, int | None]:
    """By how many bytes each tier moves when torch allocates 1 GiB; null where NVML does not tell."""
    import torch

    device = nvml.open_first_visible()
    torch.zeros((), device="cuda")

    def tiers() -> dict[str, int | None]:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "mem_get_info": total - free,
            "NVML": device.used_bytes() if device else None,
        }

    before = tiers()
    block = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    after = tiers()
    del block
    return {tier: None if None in (now, before[tier]) else now - before[tier] for tier, now in after.items()}


def a_block_on_cpu() -> dict[str, int | None]:
    """Bytes that the cpu instrument sees of an allocation of CPU_BLOCK_BYTES: at its peak, and at the end."""
    import torch

    from vramprobe.measure.cpu import CpuInstrument

    instrument = CpuInstrument()
    instrument.start()
    with instrument.phase("load"):
        block = torch.empty(CPU_BLOCK_BYTES, dtype=torch.uint8)
    (phase,) = instrument.finish().phases
    del block
    return {"peak": phase.allocated_peak_bytes, "end": phase.allocated_end_bytes}


TESTS: dict[str, Callable[[], dict[str, Any]]] = {"torch": torch_build, "cuda": one_gib_on_cuda, "cpu": a_block_on_cpu}


def _answer(name: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print while they load must not speak in the answer
    try:
        found = TESTS[name]()
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    answers.write(json.dumps(found) + "\n")
    answers.flush()


if __name__ == "__main__":
    _answer(sys.argv[1])
