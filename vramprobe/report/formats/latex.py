"""A Document → LaTeX tables for a paper: booktabs, to be \\input as they stand.

In: a Document. Out: text that any LaTeX of the last years compiles: what it has no sign for is written in ASCII, what
means something to it is escaped, and a long table breaks over pages.
"""

import re
import unicodedata
from collections.abc import Sequence

from vramprobe.report.definition import Column, Document, Table

_PACKAGES = ("booktabs", "longtable", "array", "graphicx")
_MOST_ROWS = 40  # of a table that stays on one page
_LINE_LETTERS = {"scriptsize": 92, "tiny": 122}  # in a line of LaTeX's article, by the type of a long table
_SHORT = 12  # letters of a text that does not wrap
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
        parts.append(grid(table, f"{caption}.", f"tab:{name}-{number}"))
    return "\n".join(parts)


def grid(table: Table, caption: str, label: str) -> str:
    """One table with its caption, which is LaTeX: on one page where it is short, else over several."""
    texts = table.text_frame()
    letters = [max(map(len, [*heading.split(), *texts[heading]]), default=0) for heading in map(str, texts)]
    headings = [_heading(column) for column in table.shown]
    if len(texts) <= _MOST_ROWS and not any(column.is_prose for column in table.shown):
        form = "".join("r" if column.is_number else "l" for column in table.shown)
        shown = texts.map(escape).set_axis(headings, axis=1).style.hide(axis="index")
        tabular = shown.to_latex(column_format=f"@{{}}{form}@{{}}", hrules=True)
        return (
            f"\\begin{{table}}\n\\centering\\small\n\\caption{{{caption}}}\\label{{{label}}}\\vskip 4pt\n"
            f"\\resizebox{{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}}{{!}}{{%\n{tabular}}}\n\\end{{table}}\n"
        )
    size = "scriptsize" if sum(letters) <= _LINE_LETTERS["scriptsize"] else "tiny"
    form = _long_form(table.shown, letters, _LINE_LETTERS[size])
    shown = texts.map(_breakable).set_axis(headings, axis=1).style.hide(axis="index")
    long = shown.to_latex(
        column_format=f"@{{}}{form}@{{}}", environment="longtable", hrules=True, caption=caption, label=label
    )
    return f"{{\\{size}\\setlength{{\\tabcolsep}}{{2pt}}%\n{long}}}\n"


def _long_form(columns: Sequence[Column], letters: Sequence[int], line_letters: int) -> str:
    """Return the columns' specification; in a table wider than its line, columns of words share the space that the
    others leave.
    """
    is_wide = sum(letters) + len(columns) > line_letters
    wraps = [is_wide and not one.is_number and most > _SHORT for one, most in zip(columns, letters, strict=True)]
    roots = [most**0.5 if wrapped else 0.0 for most, wrapped in zip(letters, wraps, strict=True)]
    taken = sum(most for most, wrapped in zip(letters, wraps, strict=True) if not wrapped) + len(columns)
    left = max(1 - taken / line_letters, 0.2)
    return "".join(
        rf">{{\raggedright\arraybackslash}}p{{{left * root / sum(roots):.3f}\linewidth}}"
        if root
        else "r"
        if column.is_number
        else "l"
        for column, root in zip(columns, roots, strict=True)
    )


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
