"""Raw files of a profiled run with known answers: what the hook would write of a synthetic sequence.

In: a script of phases, requests and frees. Out: ``<pid>.jsonl``, ``<pid>.history`` and ``run.json``. Counters are those
of an allocator that rounds each request up to 512 B and takes segments of 2 MiB; times go on by 1 ms an event.
"""

import json
from array import array
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vramprobe.profile.analyse import analyse
from vramprobe.profile.hook.history import ACTIONS, write
from vramprobe.records.profile import ProfileRecord

SEGMENT = 2 * 2**20
FIRST_NS = 1_700_000_000_000_000_000
MODEL = (
    ("/env/site-packages/torch/nn/functional.py", 10, "linear"),
    ("/env/site-packages/models/llama.py", 3, "forward"),
)


def rounded(size_bytes: int) -> int:
    return -(-size_bytes // 512) * 512


class Script:
    """One process, told line by line."""

    def __init__(self, pid: int = 100, **process: Any) -> None:
        self.pid, self.now_ns, self.device = pid, FIRST_NS, 0
        known = {
            "ppid": 1,
            "argv": ["/srv/train.py", "--lr", "1"],
            "python": "3.11.9",
            "torch": "2.13.0+cu130",
            "cuda": "13.0",
            "rank": None,
            "local_rank": None,
            "world_size": None,
            "device_index": 0,
            "device_name": "NVIDIA GeForce RTX 4090",
            "device_total_bytes": 25_757_220_864,
            "capability": [8, 9],
            "emulated": True,
            "versions": {"transformers": "5.23.0"},
            "started_ns": FIRST_NS,
        }
        self.lines: list[dict[str, Any]] = [{"line": "process", "pid": pid, **known, **process}]
        self.columns: dict[str, array] = {
            "actions": array("b"),
            "addresses": array("Q"),
            "sizes": array("q"),
            "times_us": array("q"),
            "streams": array("Q"),
            "stacks_of": array("i"),
        }
        self.stacks: dict[tuple, int] = {}
        self.alive: dict[int, int] = {}
        self.before: list[tuple[int, int, int, int]] = []
        self.held: list[dict[str, Any]] = []
        self.traced = "all"
        self.reserved = self.reserved_peak = 0
        self._peaks = [0, 0]

    def event(self, action: str, address: int, size: int, stack: tuple = MODEL, stream: int = 0) -> None:
        self.now_ns += 1_000_000
        number = self.stacks.setdefault(stack, len(self.stacks)) if stack else -1
        row = (ACTIONS[action], address, size, self.now_ns // 1000, stream, number)
        for column, value in zip(self.columns.values(), row, strict=True):
            column.append(value)

    def alloc(self, address: int, size: int, stack: tuple = MODEL) -> None:
        assert address not in self.alive
        if self.totals()[1] + rounded(size) > self.reserved:
            more = -(-rounded(size) // SEGMENT) * SEGMENT
            self.event("segment_alloc", 2**40 + self.reserved, more, stack)
            self.reserved += more
            self.reserved_peak = max(self.reserved_peak, self.reserved)
        self.event("alloc", address, size, stack)
        self.alive[address] = size
        self._peaks = [max(pair) for pair in zip(self._peaks, self.totals(), strict=True)]

    def free(self, *addresses: int) -> None:
        for address in addresses:
            size = self.alive.pop(address)
            self.event("free_requested", address, size, ())
            self.event("free_completed", address, size, ())

    def totals(self) -> list[int]:
        """Requested and allocated bytes."""
        return [sum(self.alive.values()), sum(map(rounded, self.alive.values()))]

    def holds(self, cause: str, *addresses: int, **names: int) -> None:
        self.now_ns += 1000
        self.held.append(
            {
                "cause": cause,
                "time_ns": self.now_ns,
                "storages": {one: self.alive[one] for one in addresses},
                "names": {address: name for name, address in names.items()},
            }
        )

    @contextmanager
    def phase(self, name: str, step: int | None = None, micro_step: int | None = None):
        start_ns = self.now_ns
        self._peaks, self.reserved_peak = self.totals(), self.reserved
        yield
        self.now_ns += 500_000
        requested, allocated = self.totals()
        self.lines.append(
            {
                "line": "phase",
                "name": name,
                "step": step,
                "micro_step": micro_step,
                "device": self.device,
                "start_ns": start_ns,
                "end_ns": self.now_ns,
                "allocated_end_bytes": allocated,
                "allocated_peak_bytes": self._peaks[1],
                "requested_end_bytes": requested,
                "requested_peak_bytes": self._peaks[0],
                "reserved_end_bytes": self.reserved,
                "reserved_peak_bytes": self.reserved_peak,
                "device_used_bytes": self.reserved + 480 * 2**20,
            }
        )

    def say(self, line: str, **fields: Any) -> None:
        self.lines.append({"line": line, **fields})

    def write(self, folder: Path, *, with_history: bool = True) -> None:
        text = "".join(json.dumps(line) + "\n" for line in self.lines)
        (folder / f"{self.pid}.jsonl").write_text(text)
        if with_history:
            write(self.history(), folder / f"{self.pid}.history")

    def history(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "traced": self.traced,
            "first_ns": FIRST_NS,
            "last_ns": self.now_ns,
            **self.columns,
            "stacks": list(self.stacks),
            "alive_before": self.before,
            "held": self.held,
            "allocator": {},
        }


def write_launcher(folder: Path, **fields: Any) -> None:
    known = {
        "command": ["python", "train.py", "--lr", "1"],
        "emulate": "RTX-4090",
        "started_ns": FIRST_NS,
        "ended_ns": FIRST_NS + 10**10,
        "exit_status": 0,
        "signal": None,
        "stopped": False,
        "tail": [],
        "vramprobe": "0.1.0",
        "emulator": {"version": "1", "num_cards": 1, "context_bytes": 480 * 2**20},
        "options": {},
    }
    (folder / "run.json").write_text(json.dumps(known | fields))


def analysed(
    folder: Path, *scripts: Script, with_history: bool = True, gpus: Sequence[str] | str | None = None, **launcher: Any
) -> ProfileRecord:
    """The profile of these processes and their launcher, whose raw files are written to ``folder``."""
    folder.mkdir(exist_ok=True)
    for script in scripts:
        script.write(folder, with_history=with_history)
    write_launcher(folder, **launcher)
    return analyse(folder, gpus=gpus)


#: One step as it is counted (emulate/values/count): a product, and the embedding of 4 × 2,048 tokens.
ROW: dict[str, Any] = {
    "phase": "forward", "what": "product", "name": "aten::mm", "shapes": "", "dtype": "bfloat16", "calls": 1,
    "flops": 10**15, "read": 10**9, "written": 10**9, "launches": 1, "width": 4096, "line": ["/srv/train.py", 3, "f"],
}  # fmt: skip
TOKENS = ROW | {"what": "other", "name": "aten::embedding", "flops": 0, "shapes": "bfloat16[9, 2] int64[4, 2048] -> x"}
COUNT = {"step": 2, "num_launches": 2, "num_claimed": 2, "unclaimed": {}, "moved": [], "rows": [ROW, TOKENS]}


#: Bytes of the training below; odd, so that a sum that is off by one byte shows.
WEIGHT, STATE, SAVED, TEMPORARY, BATCH, WORKSPACE = 3_000_001, 2_000_003, 1_000_005, 700_007, 90_009, 40_011


def training(pid: int = 100, *, num_steps: int = 3, extra_bytes: int = 0, **process: Any) -> Script:
    """A model of two weights: load, then steps. At a steady backward's peak there are 2 weights, 1 gradient, 2 states,
    1 saved activation (the other is freed), 1 temporary, and the batch and a workspace as other.
    """
    script = Script(pid, **process)
    with script.phase("load"):
        script.alloc(0x1000000, WEIGHT)
        script.alloc(0x2000000, WEIGHT)
        script.alloc(0x3000000, WORKSPACE, ())
    for step in range(1, num_steps + 1):
        if step == 1:
            script.holds(
                "weights", 0x1000000, 0x2000000, **{"layers.0.up.weight": 0x1000000, "layers.1.up.weight": 0x2000000}
            )
        with script.phase("other", step):
            if step > 1:
                script.free(0x4000000)
            script.alloc(0x4000000, BATCH)
        with script.phase("forward", step, 1):
            script.alloc(0x5000000, SAVED + extra_bytes)
            script.alloc(0x6000000, TEMPORARY)
            script.free(0x6000000)
            script.alloc(0x6000000, SAVED)  # where a temporary was
        with script.phase("backward", step, 1):
            script.alloc(0x7000000, WEIGHT, ())
            script.free(0x6000000)
            script.alloc(0x8000000, TEMPORARY, ())
            script.alloc(0x6000000, 3 * TEMPORARY, ())  # the peak, where a saved activation was
            script.free(0x6000000, 0x8000000, 0x5000000)
            script.alloc(0x8000000, WEIGHT, ())
            script.holds("gradients", 0x7000000, 0x8000000)
        with script.phase("optimizer_step", step):
            if step == 1:
                script.alloc(0x9000000, STATE)
                script.alloc(0xA000000, STATE)
                script.holds("optimizer_state", 0x9000000, 0xA000000)
        with script.phase("zero_grad", step):
            script.free(0x7000000, 0x8000000)
        script.say("step", step=step)
    script.say("end", why="exit", num_alloc_retries=0, num_ooms=0)
    return script
