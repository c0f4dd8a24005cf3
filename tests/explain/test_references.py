"""Messages that the installed libraries themselves print are read with their figures: torch's, NumPy's and Python's."""

import io
import traceback
from collections import defaultdict
from collections.abc import Callable

import numpy
import pytest
import torch

from vramprobe.explain.log import read
from vramprobe.explain.report import Report, report_of
from vramprobe.units import GIB, MIB

_BYTES = 2**47  # more than a process may address


def failed(run: Callable[[], object]) -> Report:
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        run()
    text = "".join(traceback.format_exception(raised.value))
    return report_of(io.BytesIO(text.encode()))


@pytest.mark.parametrize(
    ("run", "program", "requested"),
    [
        (lambda: torch.empty(_BYTES, dtype=torch.uint8), "PyTorch", _BYTES),
        (lambda: numpy.empty(_BYTES, dtype="u1"), "NumPy", _BYTES),
        (lambda: bytearray(2**62), "Python", None),
    ],
)
def test_the_hosts_memory(run: Callable[[], object], program: str, requested: int | None) -> None:
    found = failed(run)
    assert (found.oom.program, found.oom.owner, found.explanation.cause) == (program, "host", "host")
    assert found.oom.requested == requested


def test_the_table_that_torch_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    stats: dict[str, int] = defaultdict(int)
    stats |= {"num_ooms": 2, "num_alloc_retries": 7}
    sizes = {"allocated_bytes": 40 * GIB, "reserved_bytes": 70 * GIB, "inactive_split_bytes": 900 * MIB}
    for name, size in sizes.items():
        stats |= {f"{name}.all.peak": size, f"{name}.all.current": size // 4, f"{name}.large_pool.peak": size - 5 * MIB}
    monkeypatch.setattr(torch.cuda.memory, "memory_stats", lambda device=None: stats)
    monkeypatch.setattr(torch.cuda.memory, "_get_device_index", lambda device, optional: 3)
    (table,) = read(io.BytesIO(torch.cuda.memory_summary().encode())).summaries.tables.values()
    assert (table.device, table.num_ooms, table.num_retries) == (3, 2, 7)
    assert table.peak["Allocated memory"] == 40 * GIB
    assert table.peak["Allocated memory from large pool"] == 40 * GIB - 5 * MIB
    assert table.peak["GPU reserved memory"] == 70 * GIB
    assert table.now["GPU reserved memory"] == 70 * GIB // 4
    assert table.peak["Non-releasable memory"] == 900 * MIB
