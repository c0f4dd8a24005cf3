"""A folder of results holds one kind of record: an emulated run is not added to measured ones, nor the reverse."""

from pathlib import Path

import pytest
from factories import make_record, make_spec

from vramprobe.emulate import MACHINE_VARIABLE
from vramprobe.errors import StoreError
from vramprobe.records import store, writing
from vramprobe.sweep import runner
from vramprobe.sweep.definition import Sweep


@pytest.mark.parametrize("is_emulated", [True, False], ids=["emulated after measured", "measured after emulated"])
def test_another_kind_is_refused_before_anything_runs(
    is_emulated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = ("cuda", "emulated") if is_emulated else ("emulated", "cuda")
    writing.append(tmp_path / runner.JOURNAL, make_record(make_spec(device="cuda"), instrument=there))
    if is_emulated:
        monkeypatch.setenv(MACHINE_VARIABLE, str(tmp_path))
    else:
        monkeypatch.delenv(MACHINE_VARIABLE, raising=False)
    cells = (make_spec(device="cuda", seq_len=32),)
    sweep = Sweep(name="s", description="", cells=cells, held_out=frozenset(), notes=())
    with pytest.raises(StoreError, match=rf"of the instrument {there}, and these would be of {here}, .* --out"):
        runner.run(sweep, tmp_path)
    assert len(store.read(tmp_path).records) == 1
