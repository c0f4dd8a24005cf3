"""A Document → Markdown as GitHub and the Hugging Face hub read it.

In: a Document or a Table. Out: text in which no model's name, note or error message can be anything but itself.
"""

import re

from vramprobe.report.definition import Document, Table

#: An underscore within a word is one; ``$`` begins a formula on GitHub.
_SPECIAL = re.compile(r"[\\`*\[\]|$~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def page(document: Document, more: str = "") -> str:
    """The whole page, ``more`` (Markdown) above its last lines; those say how to rebuild it."""
    parts = [f"# {escape(document.title)}\n", *(f"{escape(text)}\n" for text in document.about)]
    parts += [f"![{escape(picture.says)}]({picture.file}.svg)\n" for picture in document.pictures]
    for table in document.tables:
        parts.append(f"## {escape(table.title)}\n")
        parts += [f"{escape(table.caption)}\n"] if table.rows and table.caption else []
        parts.append(grid(table) if table.rows else f"{escape(table.otherwise)}\n")
    parts += [f"{escape(text)}\n" for text in document.remarks]
    parts += [more] if more else []
    origin = "".join(f"- {escape(line)}\n" for line in document.origin)
    parts.append(f"---\n\n{origin}{chr(10) if origin else ''}Rebuild this page:\n\n```\n{document.command}\n```\n")
    return "\n".join(parts)


def grid(table: Table) -> str:
    """The table alone: numbers stand right."""
    aligned = ["right" if column.is_number else "left" for column in table.shown]
    texts = table.text_frame().rename(columns=escape).map(escape)
    return texts.to_markdown(index=False, colalign=aligned, disable_numparse=True) + "\n"


def escape(text: str) -> str:
    """``text`` as it stands, on one line."""
    text = re.sub("[&<>]", lambda sign: _HTML[sign.group()], " ".join(text.split()))
    return _SPECIAL.sub(r"\\\g<0>", text)
