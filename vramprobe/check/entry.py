"""Entry: a record and its place, which every rule of check looks at, and what a rule has against it.

In: journals' records. Out: small tuples. Knows no rule.
"""

from pathlib import Path
from typing import Literal, NamedTuple

from vramprobe.records.record import RunRecord

Severity = Literal["error", "warning"]
Doubt = tuple[Severity, str]  # what one rule has against one record
PlacedDoubt = tuple[Severity, str, str]  # the same with its place, from rules that look at several records


class Entry(NamedTuple):
    """A record and the file it stands in."""

    file: Path
    record: RunRecord

    @property
    def where(self) -> str:
        """The file, the cell and the attempt."""
        return f"{self.file}: {self.record.cell_id}, attempt {self.record.attempt_id}"
