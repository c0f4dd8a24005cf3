"""A Document → one HTML page that needs nothing else, for a browser or to copy a table from.

In: a Document. Out: text; all of it is escaped. Each table has a caption, headings with their scope, numbers to the
right, and can be scrolled with the keyboard where it is wider than the screen.
"""

from __future__ import annotations

from html import escape

from vramprobe.report.definition import Document, Table

_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-size: .875rem; line-height: 1.35; border-block: 2px solid }
caption { text-align: start; padding: 0 0 .5rem }
caption strong { display: block; font-size: 1.1rem }
thead { border-bottom: 1px solid }
th, td { padding: .2rem .6rem; text-align: start; vertical-align: top; font-weight: normal }
thead th { vertical-align: bottom; font-weight: bold }
tbody tr:nth-child(even) { background: color-mix(in srgb, currentColor 6%, transparent) }
.n { text-align: end; font-variant-numeric: tabular-nums; white-space: nowrap }
.wide { overflow-x: auto; margin: 1.5rem 0 }
.wide:focus-visible { outline: 2px solid }
img { max-width: 100%; background: #fff }
pre { overflow-x: auto; padding: .6rem; border: 1px solid }
"""


def page(document: Document) -> str:
    """The whole page; the last lines say where it comes from and how to rebuild it."""
    title = escape(document.title)
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>",
        *(f"<p>{escape(text)}</p>" for text in document.about),
        *(
            f'<p><img src="{escape(picture.file)}.svg" alt="{escape(picture.says)}"></p>'
            for picture in document.pictures
        ),
        *(grid(table) for table in document.tables),
        *(f"<p>{escape(text)}</p>" for text in document.remarks),
        "</main>\n<footer>",
    ]
    if document.origin:
        parts += ["<ul>", *(f"<li>{escape(line)}</li>" for line in document.origin), "</ul>"]
    parts += [f"<p>Rebuild this page:</p>\n<pre>{escape(document.command)}</pre>", "</footer>\n</body>\n</html>\n"]
    return "\n".join(parts)


def grid(table: Table) -> str:
    """The table alone, or the sentence that is said instead of one without rows."""
    title = escape(table.title)
    if not table.rows:
        return f"<h2>{title}</h2>\n<p>{escape(table.otherwise)}</p>"
    columns = table.shown
    numbers = [' class="n"' if column.is_number else "" for column in columns]
    head = "".join(
        f'<th scope="col"{kind}>{escape(column.heading or "")}</th>'
        for column, kind in zip(columns, numbers, strict=True)
    )
    lines = [
        f'<div class="wide" role="region" aria-label="{title}" tabindex="0">\n<table>',
        f"<caption><strong>{title}</strong> {escape(table.caption)}</caption>",
        f"<thead><tr>{head}</tr></thead>\n<tbody>",
    ]
    for first, *others in table.texts():
        cells = "".join(f"<td{kind}>{escape(text)}</td>" for text, kind in zip(others, numbers[1:], strict=True))
        lines.append(f'<tr><th scope="row"{numbers[0]}>{escape(first)}</th>{cells}</tr>')
    return "\n".join([*lines, "</tbody>\n</table>\n</div>"])
