"""Reading records for what counts with their architectures: one that no model can have is named with its record.

In: a results file or folder. Out: what store.read gives of it, or a StoreError with file, line and attempt. What was
measured and whose parameters are not known passes; nothing is left out.
"""

import json
from pathlib import Path

from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.errors import StoreError, VramprobeError
from vramprobe.records import store
from vramprobe.records.record import RunRecord


def read_whole(path_or_folder: str | Path, *, allow_empty: bool = False) -> store.StoreContents:
    """As :func:`store.read`. Raises StoreError also for an architecture with a value that no such model can have."""
    contents = store.read(path_or_folder, allow_empty=allow_empty)
    seen: set[str] = set()
    for record in contents.records:
        config = json.dumps(record.spec.architecture, sort_keys=True)
        if config in seen:
            continue
        seen.add(config)
        try:
            architecture(record.spec.architecture)
        except UnsupportedArchitecture:
            pass  # it was measured all the same
        except VramprobeError as error:
            raise StoreError(
                f"{_place(contents, record)}: {error}. That is the architecture in attempt {record.attempt_id} of "
                f"{record.cell_id}; restore the file from a copy, or move that one line elsewhere"
            ) from None
    return contents


def _place(contents: store.StoreContents, record: RunRecord) -> str:
    """File and line of a record."""
    for file in contents.files:
        for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
            if line.strip() and store.is_whole(line) and not store.is_profile(line):
                entry = store.read_line(line, file, number)
                if isinstance(entry, RunRecord) and entry.attempt_id == record.attempt_id:
                    return f"{file}, line {number}"
    raise AssertionError(f"attempt {record.attempt_id} was read and is in none of its files")
