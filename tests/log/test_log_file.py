"""A log in a file: read back as it was written, or one clear line."""

from pathlib import Path

import numpy as np
import pytest

from vramprobe.errors import StoreError
from vramprobe.log.file import read_log, write_log
from vramprobe.log.log import LayerMark, Log, PhaseMark


def example() -> Log:
    return Log(
        size_bytes=np.array([512, 1024, -512, -1024]),
        blocks=np.array([1, 2, 1, 2]),
        causes=np.array([4, 5, 4, 5], dtype=np.int8),
        marks=(PhaseMark("forward", 1, 1, range(0, 2)), PhaseMark("backward", 1, 1, range(2, 4))),
        layers=(LayerMark(0, 0, 3, "forward"), LayerMark(2, 0, 3, "backward")),
        streams=np.array([0, 1, 0, 1], dtype=np.int8),
    )


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    log = example()
    write_log(log, tmp_path / "a.npz")
    read = read_log(tmp_path / "a.npz")
    for name in ("size_bytes", "blocks", "causes", "streams"):
        assert np.array_equal(getattr(read, name), getattr(log, name))
    assert (read.marks, read.layers) == (log.marks, log.layers)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "a.npz"]


@pytest.mark.parametrize("damage", ["missing", "torn", "other"])
def test_a_damaged_log_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.npz"
    write_log(example(), path)
    if damage == "missing":
        path.unlink()
    elif damage == "torn":
        path.write_bytes(path.read_bytes()[:200])
    else:
        np.savez(path, other=np.zeros(3))
    with pytest.raises(StoreError, match=r"a\.npz is no log"):
        read_log(path)
