"""Names that people type for a GPU, of none in the catalog: other makers' chips, machines of clouds, providers.

In: the name. Out: a sentence that says what it is, or an empty one.
"""

import re
from functools import cache

from vramprobe.catalog.shipped import csv_rows


def gpu_hint(name: str) -> str:
    """Return what ``name`` is, where a row knows it; letters' case and separators do not count."""
    words = " ".join(re.findall(r"[a-z0-9]+", name.lower()))
    return next((hint for pattern, hint in _hints() if pattern.fullmatch(words)), "")


@cache
def _hints() -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(row["pattern"]), row["hint"]) for row in csv_rows("gpu_hints.csv")]
