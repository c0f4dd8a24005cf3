"""Any command's memory: a hook in its processes writes raw files, and what they hold becomes a profile.

In: a command, or the folder of a run. Out: a ProfileRecord (records/profile.py): peaks by rank and phase, what was
alive by cause, line and module, verdicts for other cards. ``hook/`` is loaded into others' processes; all else here
reads files and knows no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vramprobe.records.profile import ProfileRecord


def analyse(folder: str | Path) -> ProfileRecord:
    """The profile of the run whose raw files lie in ``folder``. Raises StoreError for files that are no run's."""
    from vramprobe.profile.analysis import analyse

    return analyse(Path(folder))
