"""The errors a user can meet. Each message says what was given, what is allowed and what to do.

The command line prints them without a traceback and exits with 1; a bug in vramprobe itself is an AssertionError.
"""

import difflib
from collections.abc import Iterable


class VramprobeError(Exception):
    """Base of every error that is the user's to mend."""


class UnknownName(VramprobeError):
    """A model, GPU, claim or file that does not exist; the message holds the nearest names."""

    def __init__(
        self, kind: str, given: str, known: Iterable[str], advice: str = "", near: list[str] | None = None
    ) -> None:
        if near is None:
            by_lower = {name.lower(): name for name in sorted(known)}
            near = [by_lower[name] for name in difflib.get_close_matches(given.lower(), by_lower, n=4, cutoff=0.55)]
        did_you_mean = f" Nearest: {', '.join(near)}." if near else ""
        super().__init__(f"unknown {kind} {given!r}.{did_you_mean}{' ' + advice if advice else ''}")
        self.near = near


class SpecError(VramprobeError, ValueError):
    """A cell or sweep that cannot be: an unknown key, a bad value, an impossible combination."""


class MissingDependency(VramprobeError):
    """A package, a device or a hub that this cell needs and this machine lacks."""


#: The modules that an extra of pyproject.toml brings, each checked before the work that needs it.
EXTRAS = {
    "report": ("pandas", "matplotlib", "jinja2", "tabulate"),
    "hub": ("pyarrow", "huggingface_hub"),
    "ray": ("ray",),
    "slurm": ("submitit",),
    "mcp": ("mcp",),
}


def require_extra(extra: str, purpose: str, *also: str) -> None:
    """Raise MissingDependency, with the line to type, where a module that one of these extras brings is missing."""
    import importlib.util

    missing = {}
    for name in (extra, *also):
        for module in EXTRAS[name]:
            try:
                found = importlib.util.find_spec(module)
            except (ImportError, ValueError):
                found = None
            if found is None:
                missing.setdefault(name, module)
    if missing:
        raise MissingDependency(
            f"{purpose} needs {' and '.join(missing.values())}, not installed here: "
            f"pip install 'vramprobe[{','.join(missing)}]'"
        )


class StoreError(VramprobeError):
    """A results file that cannot be read or written; nothing already written is touched."""


class StaleReport(VramprobeError):
    """Published files that are not what the records give; the message names each."""


class IncomparableRecords(VramprobeError):
    """Records that must not be mixed in one table or fit; the message names the key and both values."""


class FitError(VramprobeError):
    """Too few records, or a file that is no fit."""
