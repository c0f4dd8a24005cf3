"""vramprobe: how much GPU memory does this fine-tuning run need, and why?

``vramprobe.predict(model, args, peft_config, gpu="RTX-4090")`` and the other verbs take transformers' own objects; one
call per stage is in :mod:`vramprobe.api`, and the command line is ``vramprobe --help``. Each folder is a room on the
data's way, and says in its first lines what comes in and what goes out. Two lines nobody crosses, and a test says so:
the torch line (only workload/ and parts of measure/ load torch; importing this does not), and the process line
(runner and worker exchange a spec and a record as JSON, nothing else).
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pandas as pd

    from vramprobe.api import diff, explain, predict, profile, recommend, techniques
    from vramprobe.interop.callback import VramprobeCallback
    from vramprobe.interop.watch import watch

__version__ = "0.1.0"
__all__ = [
    "VramprobeCallback", "diff", "explain", "load", "predict", "profile", "recommend", "techniques", "watch",
]  # fmt: skip

#: Verbs of the API that a package is named after: ``vramprobe.predict`` is both, and can be called.
_PACKAGES = ("explain", "predict", "profile", "recommend", "techniques")
_IN_THEIR_ROOMS = {
    "VramprobeCallback": "vramprobe.interop.callback",
    "diff": "vramprobe.api",
    "watch": "vramprobe.interop.watch",
}


class _CallablePackage(ModuleType):
    """A package that is called as the function of its name in vramprobe.api."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def __signature__(self) -> Any:
        import inspect

        return inspect.signature(self._function)

    @property
    def _function(self) -> Any:
        return getattr(importlib.import_module("vramprobe.api"), self.__name__.rpartition(".")[2])


class _Package(ModuleType):
    """This package, whose import of a part that is a verb makes that part one."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PACKAGES and type(value) is ModuleType:
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"vramprobe.{name}")
    if name not in _IN_THEIR_ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_IN_THEIR_ROOMS[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__", "api", "load_ipython_extension"})


def load(path: str | Path = "results", of: Literal["records", "phases", "ranks"] = "records") -> pd.DataFrame:
    """Return the results in a .jsonl file or folder, or an exported .parquet file, as a pandas DataFrame.

    ``of="records"``: one row per record of a cell, failures included. ``of="phases"``: one row per
    record, rank and phase. ``of="ranks"``: one row per rank. Phases and ranks of profiled commands are rows, too.

    Bytes are Int64 in columns that end in ``_bytes``, seconds Float64 in ``_seconds``; unknown values are NA, never 0.
    docs/dataframes.md lists every column, and so does ``vramprobe.records.columns``. Raises StoreError for a place
    without records.
    """
    from vramprobe.errors import require_extra

    require_extra("report", "a DataFrame")
    from vramprobe.records import frames, parquet

    return parquet.load(Path(path), of) if Path(path).suffix == parquet.SUFFIX else frames.load(path, of)


def load_ipython_extension(shell):
    """``%load_ext vramprobe`` in a notebook: its kernel is profiled from now on, and ``%vramprobe`` shows it so far."""
    from vramprobe.cli.notebook import load

    load(shell)
