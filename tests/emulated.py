"""The emulated environment, for the tests that need it: ``make test`` sets it up, elsewhere they are skipped."""

from pathlib import Path
from typing import Any

import pytest
from command_line import flags, vramprobe

from vramprobe import api
from vramprobe.catalog import Gpu
from vramprobe.emulate.enter import installation_to_use
from vramprobe.errors import VramprobeError
from vramprobe.recipe.packed import unpack
from vramprobe.recipe.recipe import Recipe
from vramprobe.recipe.recorder import record_packed
from vramprobe.records import store
from vramprobe.records.record import RankRecord, RunRecord
from vramprobe.spec import CellSpec


def require_emulation() -> Path:
    """The interpreter with a CUDA build of torch; skips where there is none."""
    try:
        return installation_to_use().python
    except VramprobeError as error:
        pytest.skip(str(error))


def swept(folder: Path, sweep: str, *, cards: str) -> list[RunRecord]:
    """The records of a sweep's cells on emulated cards; skips where there are none."""
    require_emulation()
    (folder / "sweep.yaml").write_text(sweep)
    done = vramprobe("run", "sweep.yaml", "--emulate", cards, "--out", "out", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return store.read(folder / "out").records


def measured(folder: Path, cards: str, **options: object) -> RunRecord:
    """The record of a cell on emulated cards; its options by their names, ``True`` for a flag."""
    require_emulation()
    done = vramprobe("measure", "--emulate", cards, *flags(options), "--json", cwd=folder)
    assert done.stdout, done.stderr
    return RunRecord.model_validate_json(done.stdout)


def recorded_recipe(spec: CellSpec, gpu: Gpu, **options: Any) -> Recipe:
    """Return a cell's recipe, recorded here and now; skips where there is no emulated GPU."""
    require_emulation()
    return unpack(record_packed(spec, gpu, lambda words: None, **options), "test")


def require_predicted(record: RunRecord, gpu: str, *, allocated: float, reserved: float) -> None:
    """A cell on a card took what is predicted of it, within these shares."""
    words = record.spec.model_dump(exclude={"architecture"}, exclude_none=True, exclude_defaults=True)
    found = api.predict(gpu=gpu, **words)
    assert found.peak_allocated_bytes.value == pytest.approx(record.peak.allocated_bytes, rel=allocated)
    assert found.reserved_bytes.value == pytest.approx(record.peak.reserved_bytes, rel=reserved)


def counted(rank: RankRecord) -> list[dict]:
    """Return the allocator's counters, phase by phase; the host's and the whole card's are not one rank's alone."""
    return [phase.model_dump(exclude={"rss_end_bytes", "device_used_bytes"}) for phase in rank.phases]


def assert_alone_as_among_all(records: list[RunRecord], *, num_alone: int) -> None:
    """Those of one rank have what that rank has in the same cell of all of them."""
    together = {record.cell_id: record for record in records if record.spec.only_rank is None}
    alone = [record for record in records if record.spec.only_rank is not None]
    assert len(alone) == num_alone
    for record in alone:
        (rank,) = record.ranks
        same = together[record.cell_id.removesuffix(f"_rank{rank.rank}")].ranks[rank.rank]
        assert counted(rank) == counted(same), record.cell_id
        assert (rank.ledger, rank.host_tensors_bytes) == (same.ledger, same.host_tensors_bytes), record.cell_id
        assert rank.traffic == same.traffic, record.cell_id
