"""A Document → LaTeX tables for a paper: booktabs, to be \\input as they stand.

In: a Document. Out: text that any LaTeX of the last years compiles: what it has no sign for is written in ASCII, what
means something to it is escaped, and a long table breaks over pages.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from vramprobe.report.definition import Column, Document, Table

_PACKAGES = ("booktabs", "longtable", "array", "graphicx")
_MOST_ROWS = 40  # of a table that stays on one page
_LINE_LETTERS = {"scriptsize": 92, "tiny": 122}  # in a line of LaTeX's article, by the type of a long table
_SIGNS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\ensuremath{<}", ">": r"\ensuremath{>}",
    "|": r"\ensuremath{|}", "`": r"\textasciigrave{}", '"': "''", "[": "{[}", "]": "{]}", "*": "{*}",
    "×": r"\ensuremath{\times}", "·": r"\ensuremath{\cdot}", "≤": r"\ensuremath{\le}", "≥": r"\ensuremath{\ge}",
    "≈": r"\ensuremath{\approx}", "±": r"\ensuremath{\pm}", "−": r"\ensuremath{-}", "→": r"\ensuremath{\to}",
    "²": r"\ensuremath{^2}", "–": "--", "—": "---", "…": r"\dots{}", "’": "'", "“": "``", "”": "''", "\u200b": "{}",
}  # fmt: skip


def tables(document: Document) -> str:
    """All tables, each with its caption and a label; comments say what they need and how to rebuild them."""
    name = re.sub(r"[^A-Za-z0-9-]+", "-", document.name)
    lines = [document.title, *document.origin, f"Rebuild: {document.command}"]
    comments = [f"% {' '.join(line.split())}" for line in lines]
    parts = ["\n".join([*comments, *(rf"% \usepackage{{{package}}}" for package in _PACKAGES), ""])]
    for number, table in enumerate((one for one in document.tables if one.rows), start=1):
        said = [document.title, table.title, table.caption, "; ".join(document.origin[:2])]
        caption = ". ".join(escape(text.rstrip(".")) for text in dict.fromkeys(said) if text)
        parts.append(grid(table, rf"\caption{{{caption}.}}\label{{tab:{name}-{number}}}"))
    return "\n".join(parts)


def grid(table: Table, caption: str) -> str:
    """One table below its caption, which is LaTeX: on one page where it is short, else over several."""
    if len(table.rows) > _MOST_ROWS or any(column.is_prose for column in table.shown):
        return _long(table, caption)
    form = "".join("r" if column.is_number else "l" for column in table.shown)
    head = " & ".join(map(_heading, table.shown)) + r" \\"
    body = "".join(" & ".join(map(escape, row)) + " \\\\\n" for row in table.texts())
    return (
        f"\\begin{{table}}\n\\centering\\small\n{caption}\\vskip 4pt\n"
        "\\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%\n"
        f"\\begin{{tabular}}{{@{{}}{form}@{{}}}}\n\\toprule\n{head}\n\\midrule\n{body}\\bottomrule\n\\end{{tabular}}}}\n"
        "\\end{table}\n"
    )


def _long(table: Table, caption: str) -> str:
    """In the width of a page: headings and columns of words wrap, in a type as small as it must be."""
    columns, texts = table.shown, table.texts()
    needs = [_Need(column, [row[index] for row in texts]) for index, column in enumerate(columns)]
    is_tight = sum(need.least for need in needs) > _LINE_LETTERS["scriptsize"] - len(columns)
    size = "tiny" if is_tight else "scriptsize"
    widths = _widths(needs, _LINE_LETTERS[size])
    form = "".join(
        ("r" if need.is_number else "l") if width is None
        else rf">{{\raggedright\arraybackslash}}p{{{width:.3f}\linewidth}}"
        for need, width in zip(needs, widths, strict=True)
    )  # fmt: skip
    head = " & ".join(map(_heading, columns)) + r" \\"
    body = "".join(
        " & ".join(escape(text) if width is None else _breakable(text) for text, width in zip(row, widths, strict=True))
        + " \\\\\n"
        for row in texts
    )
    return (
        f"{{\\{size}\\setlength{{\\tabcolsep}}{{2pt}}%\n"
        f"\\begin{{longtable}}{{@{{}}{form}@{{}}}}\n{caption}\\\\\n\\toprule\n{head}\n\\midrule\n\\endfirsthead\n"
        f"\\toprule\n{head}\n\\midrule\n\\endhead\n\\bottomrule\n\\endfoot\n{body}\\end{{longtable}}}}\n"
    )


class _Need:
    """What a column needs, in letters: its widest line, and at the ``least`` its longest word."""

    def __init__(self, column: Column, texts: Sequence[str]) -> None:
        self.is_number = column.is_number
        heading = max(map(len, (column.heading or "").split()), default=1)
        self.most = max(heading, *map(len, texts))
        words = (len(word) for text in texts for word in re.split(r"[-_+\s]+", text))
        self.least = self.most if self.is_number else min(max(heading, max(words) + 1), self.most)


def _widths(needs: Sequence[_Need], line_letters: int) -> list[float | None]:
    """For each column null, as wide as it is, or the share of the line in which its words wrap."""
    room = line_letters - len(needs)
    if sum(need.most for need in needs) <= room:
        return [None] * len(needs)
    spare = max(room - sum(need.least for need in needs), 0)
    wanting = sum((need.most - need.least) ** 0.5 for need in needs)
    return [
        (need.least + spare * (need.most - need.least) ** 0.5 / wanting) / line_letters
        if need.most > need.least
        else None
        for need in needs
    ]


def _heading(column: Column) -> str:
    """A word per line, at the bottom."""
    words = r"\\".join(map(escape, (column.heading or "").split()))
    return rf"\begin{{tabular}}[b]{{@{{}}{'r' if column.is_number else 'l'}@{{}}}}{words}\end{{tabular}}"


def _breakable(text: str) -> str:
    return escape(text).replace(r"\_", r"\_\allowbreak{}").replace("+", r"+\allowbreak{}")


def escape(text: str) -> str:
    """``text`` as it stands: two hyphens stay two; a letter that LaTeX may not know loses its accents, or is named."""
    return "".join(map(_sign, re.sub("-(?=-)", "-\u200b", " ".join(text.split()))))


def _sign(char: str) -> str:
    if char in _SIGNS:
        return _SIGNS[char]
    if " " <= char <= "~":
        return char
    plain = unicodedata.normalize("NFKD", char).encode("ascii", "ignore").decode()
    return "".join(_SIGNS.get(one, one) for one in plain) or f"(U+{ord(char):04X})"
