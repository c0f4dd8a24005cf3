"""A file is replaced whole, or stays as it was."""

from pathlib import Path

import pytest

from vramprobe.records.whole_file import replacing


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    file = tmp_path / "fit.json"
    file.write_text("old")
    with replacing(file) as part:
        part.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_what_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path, error: BaseException) -> None:
    file = tmp_path / "fit.json"
    file.write_text("old")

    def write() -> None:
        with replacing(file) as part:
            part.write_text("half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
