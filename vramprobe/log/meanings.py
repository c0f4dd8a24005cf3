"""Meanings of a memory table's terms in a few words: the command line, the page and docs/words.md say these.

In: data/meanings.csv. Out: MEANINGS, by the term's name.
"""

from vramprobe.catalog.shipped import csv_rows

_ROWS = csv_rows("meanings.csv")
MEANINGS: dict[str, str] = {row["term"]: row["meaning"] for row in _ROWS}
#: These need no word below a table.
PLAIN = tuple(row["term"] for row in _ROWS if row["is_plain"])
