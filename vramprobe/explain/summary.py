"""Lines of ``torch.cuda.memory_summary()`` → peaks, reserved memory, pools and retries by GPU.

In: one line after the other. Out: Summaries. The table prints whole units, cut off; bytes here are those.
"""

import re
from dataclasses import dataclass, field

from vramprobe.units import GIB, KIB, MIB, format_bytes, plural

_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024 * GIB}
_DEVICE = re.compile(r"memory summary, device ID (\d{1,18})")
_COUNTS = re.compile(r"OOMs: (\d{1,18}) .*Malloc retries: (\d{1,18})")
_CELL = r"\|\s*(\d{1,18}) (B|[KMGT]iB)\s*"
_ROW = re.compile(rf"^\|\s*([A-Za-z][A-Za-z -]+?)\s*{_CELL}{_CELL}")
#: Peaks that are shown, by the table's names.
_PEAKS = {
    "Allocated memory": "allocated at the peak",
    "Allocated memory from large pool": "  of it in the large pool (requests above 1 MiB)",
    "Allocated memory from small pool": "  of it in the small pool",
    "GPU reserved memory": "reserved at the peak",
    "Non-releasable memory": "unused parts of segments in use, at their highest: fragmentation",
}
_POOLS = ("from large pool", "from small pool")


@dataclass
class AllocatorSummary:
    """One GPU's table. Bytes now and at the peak, by the table's own names."""

    device: int
    num_ooms: int = 0
    num_retries: int = 0
    now: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)

    def lines(self) -> tuple[tuple[str, int], ...]:
        """Peaks by what they are."""
        return tuple((text, self.peak[name]) for name, text in _PEAKS.items() if name in self.peak)

    def in_words(self) -> str:
        """The table in a sentence."""
        peak, reserved = (format_bytes(self.peak.get(name)) for name in ("Allocated memory", "GPU reserved memory"))
        now = format_bytes(self.now.get("Allocated memory"))
        full = "the allocator emptied its cache to go on" if self.num_retries else "the allocator never ran out"
        counts = f"{plural(self.num_ooms, 'out-of-memory error')}, {self.num_retries} cudaMalloc retries"
        return (
            f"memory_summary() of GPU {self.device}: peak {peak} allocated, {reserved} reserved; {now} allocated when "
            f"it was printed; {counts}: {full}"
        )


@dataclass
class Summaries:
    """The last table of each GPU, in the order in which they came."""

    tables: dict[int, AllocatorSummary] = field(default_factory=dict)
    _table: AllocatorSummary | None = None
    _tier: str = ""

    @property
    def is_open(self) -> bool:
        """Return True if the next line may be of the table."""
        return self._table is not None

    def read(self, line: str) -> None:
        """Take one line of a table; most are of something else."""
        if not line.startswith("|"):
            self._table = None
        elif device := _DEVICE.search(line):
            self._table = self.tables[int(device[1])] = AllocatorSummary(int(device[1]))
        elif self._table is None:
            return
        elif counts := _COUNTS.search(line):
            self._table.num_ooms, self._table.num_retries = int(counts[1]), int(counts[2])
        elif row := _ROW.match(line):
            name = row[1]
            if name in _POOLS:
                name = f"{self._tier} {name}"
            else:
                self._tier = name
            self._table.now[name] = int(row[2]) * _UNITS[row[3]]
            self._table.peak[name] = int(row[4]) * _UNITS[row[5]]
