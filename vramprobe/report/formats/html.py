"""A Document → one HTML page that needs nothing else, for a browser or to copy a table from.

In: a Document. Out: text; all of it is escaped. Each table has a caption, headings with their scope, numbers to the
right, and can be scrolled with the keyboard where it is wider than the screen.
"""

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
.wide { overflow-x: auto; margin: 1.5rem 0 }
.wide:focus-visible { outline: 2px solid }
img { max-width: 100%; background: #fff }
pre { overflow-x: auto; padding: .6rem; border: 1px solid }
"""

_NUMBER = "text-align: end; font-variant-numeric: tabular-nums; white-space: nowrap"


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
        *(grid(table, f"table-{number}") for number, table in enumerate(document.tables, start=1)),
        *(f"<p>{escape(text)}</p>" for text in document.remarks),
        "</main>\n<footer>",
    ]
    if document.origin:
        parts += ["<ul>", *(f"<li>{escape(line)}</li>" for line in document.origin), "</ul>"]
    parts += [f"<p>Rebuild this page:</p>\n<pre>{escape(document.command)}</pre>", "</footer>\n</body>\n</html>\n"]
    return "\n".join(parts)


def grid(table: Table, name: str) -> str:
    """The table alone as ``name``, or the sentence that is said instead of one without rows."""
    import pandas as pd

    title = escape(table.title)
    if not table.rows:
        return f"<h2>{title}</h2>\n<p>{escape(table.otherwise)}</p>"
    first, *_ = texts = table.text_frame()
    texts = texts.set_index(first).rename_axis(index=None, columns=str(first))
    with pd.option_context("display.max_colwidth", None):
        head, body = texts.to_html(table_id=name, border=0, justify="unset").split("  <tbody>")
    head = head.replace("<th>", '<th scope="col">')
    head = head.replace("  <thead>", f"<caption><strong>{title}</strong> {escape(table.caption)}</caption>\n  <thead>")
    body = body.replace("<th>", '<th scope="row">')
    numbers = [f"#{name} tr :nth-child({at})" for at, one in enumerate(table.shown, start=1) if one.is_number]
    style = f"<style>{', '.join(numbers)} {{ {_NUMBER} }}</style>\n" if numbers else ""
    return f'{style}<div class="wide" role="region" aria-label="{title}" tabindex="0">\n{head}  <tbody>{body}\n</div>'
