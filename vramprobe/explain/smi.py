"""Lines of ``nvidia-smi``, its table or its CSV → the most memory seen in use on each GPU, and its processes.

In: one line after the other. Out: Readings. It knows no process by name: names may hold paths.
"""

import re
from dataclasses import dataclass, field

from vramprobe.units import MIB

_GPU = re.compile(r"^\|\s+(\d{1,9})\s+\S.*\|.*\|")
_MEMORY = re.compile(r"^\|.*?(\d{1,9})MiB\s*/\s*(\d{1,9})MiB")
_PROCESS = re.compile(r"^\|\s+(\d{1,9})\s+(?:\S+\s+\S+\s+)?(\d{1,9})\s+(?:C|G|C\+G|M\+C)\s+.*\s(\d{1,9})MiB\s*\|")
_HEADER = "memory.used [MiB]"
_NUMBER = re.compile(r"\s*(\d{1,9})(?: MiB)?\s*$")


@dataclass
class Readings:
    """By GPU, bytes: the most that was in use, what it has, and the processes at the last table."""

    used: dict[int, int] = field(default_factory=dict)
    total: dict[int, int] = field(default_factory=dict)
    processes: dict[int, dict[int, int]] = field(default_factory=dict)
    _gpu: int | None = None
    _columns: list[str] = field(default_factory=list)

    @property
    def is_table(self) -> bool:
        """Return True if rows of a table were read."""
        return bool(self.used)

    @property
    def is_csv(self) -> bool:
        """Return True if a header of nvidia-smi's CSV was read: any line may be a row."""
        return bool(self._columns)

    def read(self, line: str) -> None:
        """Take one line; most are of something else."""
        if line.startswith("|"):
            self._read_table(line)
        elif _HEADER in line:
            self._columns = [name.strip() for name in line.split(",")]
        elif self._columns and line.count(",") == len(self._columns) - 1:
            self._read_csv(line)

    def _read_table(self, line: str) -> None:
        if process := _PROCESS.match(line):
            self.processes.setdefault(int(process[1]), {})[int(process[2])] = int(process[3]) * MIB
        elif memory := _MEMORY.match(line):
            if self._gpu is not None:
                self._note(self._gpu, int(memory[1]), int(memory[2]))
            self._gpu = None
        elif gpu := _GPU.match(line):
            self._gpu = int(gpu[1])
            self.processes.pop(self._gpu, None)

    def _read_csv(self, line: str) -> None:
        row = dict(zip(self._columns, line.split(","), strict=True))
        used, total = (_NUMBER.match(row.get(f"memory.{name} [MiB]", "")) for name in ("used", "total"))
        index = _NUMBER.match(row.get("index", "0"))
        if used and index:
            self._note(int(index[1]), int(used[1]), int(total[1]) if total else None)

    def _note(self, gpu: int, used_mib: int, total_mib: int | None) -> None:
        self.used[gpu] = max(self.used.get(gpu, 0), used_mib * MIB)
        if total_mib is not None:
            self.total[gpu] = total_mib * MIB
