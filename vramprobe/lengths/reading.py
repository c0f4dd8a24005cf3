"""Reading: the text of ``--lengths`` -> one length in tokens per row of the data set.

In: a file with one length per line, a column of a CSV or JSONL file (``FILE:column``), a histogram with the columns
``length,count``, quantiles such as ``p50=600 p99=3000 max=8192``, or the name of a histogram that ships. Out: lengths,
in the file's order. It never tokenizes: a column of text is refused.
"""

import csv
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

from vramprobe.errors import SpecError

#: Rows made of quantiles where ``rows=`` is not given.
ROWS = 10_000
_FORMS = (
    "give a file with one length per line, FILE.csv:column, FILE.jsonl:column, a CSV with the columns length,count, "
    "quantiles such as 'p50=600 p99=3000 max=8192', or a histogram that ships: azure-chat"
)
#: Histograms that ship, by name; docs/lengths.md says where each comes from.
SHIPPED = {"azure-chat": Path(__file__).parents[1] / "data" / "lengths_azure_chat.csv"}


def read_lengths(text: str) -> list[int]:
    """Lengths in tokens, all at least 1. Raises SpecError for what cannot be read."""
    if "=" in text and not Path(text).exists():
        return _of_quantiles(text)
    name, column = str(SHIPPED.get(text, text)), None
    if not Path(name).exists() and ":" in name:
        name, column = name.rsplit(":", 1)
    path = Path(name)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            suffix = path.suffix.lower()
            if suffix in (".jsonl", ".ndjson"):
                found = list(_of_jsonl(file, path, column))
            elif suffix == ".csv":
                found = list(_of_csv(file, path, column))
            else:
                found = [_length(line, path, number) for number, line in enumerate(file, 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"--lengths {text}: {name} cannot be read ({error}); {_FORMS}") from error
    if not found:
        raise SpecError(f"--lengths {text}: {name} has no rows; {_FORMS}")
    return found


def _of_csv(file: Iterator[str], path: Path, column: str | None) -> Iterator[int]:
    rows = csv.DictReader(file)
    names = rows.fieldnames or []
    if column is None and "length" in names:
        column = "length"
    if column is None and len(names) == 1:
        column = names[0]
    if column not in names:
        raise SpecError(f"--lengths {path}: name a column, {path}:COLUMN; the file has {', '.join(names)}")
    is_histogram = column == "length" and "count" in names
    for row in rows:
        count = _length(row["count"], path, rows.line_num, least=0) if is_histogram else 1
        for _ in range(count):
            yield _length(row[column], path, rows.line_num)


def _of_jsonl(file: Iterator[str], path: Path, column: str | None) -> Iterator[int]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise SpecError(f"--lengths {path}: line {number} is not JSON: {error}") from error
        if isinstance(row, dict):
            given = column or next((name for name in ("length", "input_ids") if name in row), None)
            if given not in row:
                raise SpecError(f"--lengths {path}: name a column, {path}:COLUMN; line {number} has {', '.join(row)}")
            row = row[given]
        yield _length(len(row) if isinstance(row, list) else row, path, number)


def _length(value: object, path: Path, line: int, least: int = 1) -> int:
    text = str(value).strip()
    if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < least:
        shown = text if len(text) <= 40 else f"{text[:40]}…"
        raise SpecError(
            f"--lengths {path}: line {line} has {shown!r}, where a whole number of at least {least} should be; text "
            "has to be tokenized first"
        )
    return int(text)


def _of_quantiles(text: str) -> list[int]:
    """Lengths at even steps of the rank, the logarithm of the length linear between the quantiles that are given."""
    given: dict[str, float] = {}
    for word in re.split(r"[\s,]+", text.strip()):
        if not re.fullmatch(r"(p[0-9]+(\.[0-9]+)?|min|max|rows)=[0-9]+", word):
            raise SpecError(f"--lengths {text!r}: {word!r} is not p50=600, min=8, max=8192 or rows=10000; {_FORMS}")
        name, _, value = word.partition("=")
        given[name] = int(value)
    num_rows = int(given.pop("rows", ROWS))
    given.setdefault("min", 1)
    if "max" not in given:
        raise SpecError(f"--lengths {text!r}: the longest row decides the peak; add max=, in tokens")
    points = sorted((_rank(name), value) for name, value in given.items())
    values = [value for _, value in points]
    if num_rows < 1 or values != sorted(values) or values[0] < 1 or points[-1][0] > 1:
        raise SpecError(
            f"--lengths {text!r}: quantiles are p0 to p100, at least 1, and may not fall from one to the next"
        )
    ranks = [rank for rank, _ in points]
    found = []
    for row in range(num_rows):
        at = row / max(num_rows - 1, 1) if num_rows > 1 else 1.0
        right = min(max(bisect_right(ranks, at), 1), len(points) - 1)
        (low, first), (high, last) = points[right - 1], points[right]
        share = (at - low) / (high - low) if high > low else 1.0
        found.append(round(math.exp(math.log(first) + share * (math.log(last) - math.log(first)))))
    return found


def _rank(name: str) -> float:
    ends = {"min": 0.0, "max": 1.0}
    return ends[name] if name in ends else float(name[1:]) / 100
