"""The emulated environment, for the tests that need it: ``make test`` sets it up, elsewhere they are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import vramprobe

from vramprobe.emulate.enter import installation_to_use
from vramprobe.errors import VramprobeError
from vramprobe.records import store
from vramprobe.records.record import RankRecord, RunRecord


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
    given = [(f"--{name.replace('_', '-')}", value) for name, value in options.items()]
    words = [word for name, value in given for word in ((name,) if value is True else (name, str(value)))]
    done = vramprobe("measure", "--emulate", cards, *words, "--json", cwd=folder)
    assert done.stdout, done.stderr
    return RunRecord.model_validate_json(done.stdout)


def counted(rank: RankRecord) -> list[dict]:
    """Return the allocator's counters, phase by phase; the host's and the whole card's are not one rank's alone."""
    return [phase.model_dump(exclude={"rss_end_bytes", "device_used_bytes"}) for phase in rank.phases]
