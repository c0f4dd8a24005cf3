"""Define a table once: columns over rows, a caption with its conditions; a Document is a page of tables.

In: values of any kind. Out: frozen Tables and Documents, which formats/ turns into Markdown, CSV, LaTeX, HTML and a
terminal's text. All texts here are plain: each format escapes for itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vramprobe.units import published, word_for

if TYPE_CHECKING:
    import pandas as pd

UNKNOWN = "–"
#: Stands first on each page that is made of emulated records.
EMULATED = "Emulated: the real CUDA software over a CUDA driver of our own; no GPU was there."
_MEASURED = re.compile(r"\b(measured|measurement(s?))\b", re.IGNORECASE)


def worded(text: str, word: str) -> str:
    """A text of ours about numbers that are ``word`` (records.record.word_for): only what was measured is called so."""
    if word == "measured":
        return text

    def other(found: re.Match) -> str:
        said = word if found[0].lower() == "measured" else f"{word} run{found[2]}"
        return said.capitalize() if found[0][0].isupper() else said

    return _MEASURED.sub(other, text)


@dataclass(frozen=True)
class Column:
    """``name`` is that of its CSV and, without a ``value``, of a row; ``text`` writes it for people, under ``heading``.

    Programs read :meth:`published`: bytes exactly, other numbers with the digits that any processor gives; ``text``
    has fewer digits, and is of the value itself, as a number that is rounded twice may be wrong.
    """

    name: str  # the unit is its last word
    heading: str | None = None  # null: in the CSV only
    value: Callable[[Any], Any] | None = None  # of a row that is no mapping
    text: Callable[[Any], str] = str
    is_number: bool = False
    is_condition: bool = False  # said in the caption where it is the same in every row
    is_prose: bool = False  # sentences, which wrap

    def published(self, row: Any) -> Any:
        """The value as programs read it."""
        return published(self.of(row))

    def of(self, row: Any) -> Any:
        """The value in a row."""
        return row.get(self.name) if self.value is None else self.value(row)

    def shown(self, row: Any) -> str:
        """The cell for people: one line, a dash where the value is not known."""
        value = self.published(row) if self.text is str else self.of(row)
        return UNKNOWN if value is None or value == "" else " ".join(self.text(value).split())


@dataclass(frozen=True, kw_only=True)
class Table:
    """``note`` says further conditions; ``otherwise`` is said instead of a table without rows."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Any]
    note: str = ""
    otherwise: str = ""

    @property
    def shown(self) -> list[Column]:
        """The columns for people: those of the CSV alone and conditions that all rows share are left out."""
        common = {column.name for column in self._common()}
        return [column for column in self.columns if column.heading is not None and column.name not in common]

    @property
    def caption(self) -> str:
        """The conditions: what all rows share, then the note."""
        shared = [f"{column.heading} {column.shown(self.rows[0])}" for column in self._common()]
        said = [f"In every row: {'; '.join(shared)}."] if shared else []
        return " ".join([*said, *([self.note] if self.note else [])])

    def texts(self) -> list[list[str]]:
        """The shown cells, row by row."""
        columns = self.shown
        return [[column.shown(row) for column in columns] for row in self.rows]

    def text_frame(self) -> pd.DataFrame:
        """The shown cells as text, under their headings."""
        import pandas as pd

        return pd.DataFrame(self.texts(), columns=[one.heading for one in self.shown], dtype=object)

    def about(self, word: str) -> Table:
        """Reword a table for numbers that are ``word``; columns keep their names, and records their own words."""
        columns = [replace(one, heading=one.heading and worded(one.heading, word)) for one in self.columns]
        title, note, otherwise = (worded(text, word) for text in (self.title, self.note, self.otherwise))
        return replace(self, title=title, columns=columns, note=note, otherwise=otherwise)

    def _common(self) -> list[Column]:
        if len(self.rows) < 2:
            return []
        conditions = [column for column in self.columns if column.is_condition and column.heading is not None]
        return [one for one in conditions if all(one.shown(row) == one.shown(self.rows[0]) for row in self.rows)]


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a DataFrame as a Table has them: whole numbers stay whole, and what is NA is None."""
    found: Any = frame.astype(object)  # pandas' types know neither None for a cell nor a column's name
    return found.where(frame.notna(), None).to_dict("records")


@dataclass(frozen=True)
class Picture:
    """A plot beside the page, as FILE.svg and FILE.png; ``says`` is its text for who cannot see it."""

    file: str
    says: str

    def about(self, word: str) -> Picture:
        """Reword a picture's caption for numbers that are ``word``."""
        return replace(self, says=worded(self.says, word))


@dataclass(frozen=True, kw_only=True)
class Document:
    """One page. ``data`` are the rows of its CSV, all columns; ``origin`` are lines on where the numbers come from.

    ``name`` is that of its files, without an ending; ``command`` rebuilds them.
    """

    name: str
    title: str
    about: Sequence[str]  # paragraphs
    tables: Sequence[Table]
    data: Table
    command: str
    origin: Sequence[str] = ()
    remarks: Sequence[str] = ()  # paragraphs below the tables
    pictures: Sequence[Picture] = ()

    def of(self, instrument: str) -> Document:
        """Reword a document for numbers of this instrument: no text calls them measured if they were not."""
        word = word_for(instrument)
        if word == "measured":
            return self
        said = {name: [worded(text, word) for text in getattr(self, name)] for name in ("about", "origin", "remarks")}
        if word == "emulated" and EMULATED not in said["about"]:
            said["about"].insert(0, EMULATED)
        return replace(
            self,
            title=worded(self.title, word),
            tables=[table.about(word) for table in self.tables],
            data=self.data.about(word),
            pictures=[picture.about(word) for picture in self.pictures],
            **said,
        )

    def with_pictures(self, *pictures: Picture) -> Document:
        """Return the document with these plots on it."""
        return replace(self, pictures=(*self.pictures, *pictures))
