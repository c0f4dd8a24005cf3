"""A Log in a file: written whole or not at all, read back as it was.

In: a Log, or the path of one. Out: the file, or the Log. Raises StoreError for a file that is none.
"""

import json
import zipfile
from dataclasses import asdict
from pathlib import Path

import numpy as np

from vramprobe.errors import StoreError
from vramprobe.log.log import LayerMark, Log, PhaseMark
from vramprobe.records.whole_file import replacing

_ARRAYS = ("size_bytes", "blocks", "causes", "streams")


def write_log(log: Log, path: Path) -> None:
    """Write ``log`` to ``path``."""
    marks = [asdict(mark) | {"events": [mark.events.start, mark.events.stop]} for mark in log.marks]
    words = json.dumps({"marks": marks, "layers": [list(mark) for mark in log.layers]})
    with replacing(path) as part, part.open("wb") as file:
        np.savez(
            file,
            words=np.array(words),
            **{name: array for name in _ARRAYS if (array := getattr(log, name)) is not None},
        )


def read_log(path: Path) -> Log:
    """Return the Log in ``path``. Raises StoreError for a missing, torn or other file."""
    try:
        with path.open("rb") as whole, np.load(whole, allow_pickle=False) as file:
            words = json.loads(str(file["words"]))
            return Log(
                **{name: file[name] for name in _ARRAYS if name != "streams" or name in file},
                marks=tuple(PhaseMark(**mark | {"events": range(*mark["events"])}) for mark in words["marks"]),
                layers=tuple(LayerMark(*mark) for mark in words["layers"]),
            )
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise StoreError(f"{path} is no log of vramprobe's ({type(error).__name__}); record it again") from error
