"""A count of one step as emulate/values/count wrote it → a Count, whose time counted.py tells."""

from collections.abc import Mapping, Sequence
from typing import Any

from vramprobe.errors import StoreError
from vramprobe.records.traffic import KINDS, link_bytes
from vramprobe.speed.counted import Count, CountRow


def count_of(content: Mapping[str, Any]) -> Count:
    """The count as the hook wrote it. Raises StoreError for anything else."""
    try:
        return Count(
            step=int(content["step"]),
            num_launches=int(content["num_launches"]),
            num_claimed=int(content["num_claimed"]),
            unclaimed=tuple((str(where), int(number)) for where, number in content["unclaimed"].items()),
            link_bytes=tuple(
                (KINDS[kind], link_bytes(KINDS[kind], ranks, size), ranks) for kind, ranks, _, size in content["moved"]
            ),
            message_bytes=tuple(size / calls for _, _, calls, size in content["moved"]),
            rows=tuple(_row(row) for row in content["rows"]),
            num_sharing=int(content.get("num_sharing", 1)),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise StoreError(f"a count of a step is not whole: {type(error).__name__}: {error}") from None


def _row(fields: Mapping[str, Any]) -> CountRow:
    line: Sequence[Any] | None = fields.get("line")
    return CountRow(**{**fields, "line": None if line is None else (str(line[0]), int(line[1]), str(line[2]))})
