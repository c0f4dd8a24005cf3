"""Chapters of tables and plots → one HTML page without the calculator, as index.html is: to sort and filter, offline.

In: a title, chapters, plots. Out: the page as text, the same bytes each time; it runs its own scripts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from vramprobe.report.page import Plot, part, picture, policy
from vramprobe.report.page.tables import Chapter, chapter_html

_SCRIPTS = ("words.js", "tables.js")


def plain_page(
    title: str, about: Sequence[str], chapters: Sequence[Chapter], plots: Sequence[Plot], command: str
) -> str:
    """The whole page; ``command`` rebuilds it."""
    script, style = "\n".join([*map(part, _SCRIPTS), "tables.start();"]), part("page.css")
    contents = "".join(
        f'<li><a href="#chapter-{number}">{escape(one.title)}</a></li>' for number, one in enumerate(chapters, start=1)
    )
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy([script], style)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n<style>{style}</style>\n</head>\n<body>',
            f"<main>\n<h1>{escape(title)}</h1>",
            *(f"<p>{escape(text)}</p>" for text in about),
            f'<nav aria-label="Contents"><ul>{contents}</ul></nav>',
            *map(picture, plots),
            *(chapter_html(one, number) for number, one in enumerate(chapters, start=1)),
            f"</main>\n<footer><p>Rebuild this page:</p><pre>{escape(command)}</pre></footer>",
            f"<script>{script}</script>\n</body>\n</html>\n",
        ]
    )
