"""The registry of techniques and their emulated runs → a page of its own, with the plot, and the table in each format.

In: what ships (techniques/). Out: file name → content. Memory is emulated, step time predicted; nothing is run.
"""

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import Any

from vramprobe.report.columns import IN_GIB
from vramprobe.report.definition import Column, Document, Picture, Table
from vramprobe.report.formats import files_of
from vramprobe.report.page import Plot, part, picture, policy
from vramprobe.report.page.tables import Chapter, chapter_html
from vramprobe.report.plots.techniques import plot
from vramprobe.techniques.registry import KINDS, Technique, bases, techniques
from vramprobe.techniques.savings import Saving, runs, savings
from vramprobe.units import GIB

_TITLE = "What each memory-saving technique saves, and what it costs"
_ABOUT = (
    "Each technique was run by its own package on an emulated GPU, beside the same run without it. Memory is the "
    "allocated peak, emulated; step time is predicted by counting the step's kernels, and a difference below 3 % "
    "cannot be told. No GPU was measured.",
    "Savings do not add up: a technique that lowers a moment that is not the peak saves nothing by itself.",
)
_SCRIPTS = ("words.js", "tables.js")
_PICTURE = Picture("techniques", "GiB saved against predicted time lost, a panel per base; the frontier is named.")


def build(command: str) -> dict[str, bytes]:
    """index.html, techniques.svg, and the table as Markdown, CSV, LaTeX and HTML."""
    found, ran = savings(), [one for one in runs() if one.saved_bytes is not None]
    is_alone = set(found.values())
    alone = sorted((one for one in ran if one in is_alone), key=_order)
    others = [one for one in ran if one not in is_alone]
    with_number = {one.technique for one in alone}
    without = [_why(one, found.get(one.id)) for one in techniques().values() if one.id not in with_number]
    tables = [
        *(_beside(name, [one for one in alone if one.base == name]) for name in bases()),
        Table(title="Several together, and beside other runs", columns=_COLUMNS, rows=list(map(_row, others))),
        Table(title="Without a number", columns=_WHY_COLUMNS, rows=without),
    ]
    tables = [one for one in tables if one.rows]
    document = Document(
        name="techniques",
        title=_TITLE,
        about=_ABOUT,
        tables=tables,
        data=Table(title=_TITLE, columns=_COLUMNS, rows=list(map(_row, [*alone, *others]))),
        command=command,
        pictures=(_PICTURE,),
    )
    drawn = plot(alone)
    says = _PICTURE.says
    shown = Plot(title="The frontier", svg=drawn["techniques.svg"].decode(), caption=says, alt=says)
    chapters = [Chapter(title=one.title, about="", tables=[one]) for one in tables]
    return {"index.html": _page(chapters, shown, command).encode()} | files_of(document) | drawn


def _page(chapters: Sequence[Chapter], plot: Plot, command: str) -> str:
    """A page as index.html is, without the calculator: to sort and filter, offline; it runs its own scripts alone."""
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
            f'<title>{_TITLE}</title>\n<link rel="icon" href="data:,">\n<style>{style}</style>\n</head>\n<body>',
            f"<main>\n<h1>{_TITLE}</h1>",
            *(f"<p>{escape(text)}</p>" for text in _ABOUT),
            f'<nav aria-label="Contents"><ul>{contents}</ul></nav>',
            picture(plot),
            *(chapter_html(one, number) for number, one in enumerate(chapters, start=1)),
            f"</main>\n<footer><p>Rebuild this page:</p><pre>{escape(command)}</pre></footer>",
            f"<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


def _beside(name: str, found: list[Saving]) -> Table:
    """Table of the techniques that ran beside this base, which its title names."""
    of = bases()[name]
    base_bytes = found[0].base_bytes if found else None
    peak = f": {base_bytes / GIB:.2f} GiB" if base_bytes is not None else ""
    said = {"beside", "gpu"}
    columns = [replace(one, heading=None) if one.name in said else one for one in _COLUMNS]
    title, note = f"Beside {of.text}, {of.gpu}{peak}", f"In the plot: {name}."
    return Table(title=title, note=note, columns=columns, rows=list(map(_row, found)))


def _order(one: Saving) -> tuple[int, int]:
    """By kind, the largest saving first."""
    return KINDS.index(techniques()[one.technique].kind), -(one.saved_bytes or 0)


def _row(one: Saving) -> dict[str, Any]:
    parts = [techniques()[name] for name in one.technique.split(" + ")]
    saved, slower = one.saved_share, one.slower_share
    return {
        "technique": " + ".join(part.name for part in parts),
        "kind": " + ".join(dict.fromkeys(part.kind for part in parts)),
        "package": one.package,
        "beside": bases()[one.base].text,
        "gpu": one.gpu,
        "base_bytes": one.base_bytes,
        "peak_bytes": one.peak_bytes,
        "saved_bytes": one.saved_bytes,
        "saved_percent": None if saved is None else 100 * saved,
        "slower_percent": None if slower is None else 100 * slower,
        "host_bytes": one.host_bytes,
        "trl": " ".join(part.switch("trl") for part in parts).strip(),
        "remark": "; ".join(part.remark for part in parts if part.remark),
    }


def _why(one: Technique, ran: Saving | None) -> dict[str, Any]:
    why = one.left_out or (ran.outcome if ran else "") or "not run yet"
    return {"technique": one.name, "kind": one.kind, "package": one.package, "why": why}


_COLUMNS = [
    Column("technique", "technique"),
    Column("kind", "kind"),
    Column("beside", "beside", is_prose=True),
    Column("gpu", "GPU"),
    Column("base_bytes"),
    IN_GIB.amount("saved_bytes", "saved"),
    Column("saved_percent", "saved, %", text="{:.1f}".format, is_number=True),
    Column("slower_percent", "step, % longer", text="{:+.1f}".format, is_number=True),
    IN_GIB.amount("peak_bytes", "peak"),
    IN_GIB.amount("host_bytes", "host"),
    Column("package", "package", is_prose=True),
    Column("trl", "TRL", is_prose=True),
    Column("remark", "remark", is_prose=True),
]
_WHY_COLUMNS = [
    Column("technique", "technique"),
    Column("kind", "kind"),
    Column("package", "package"),
    Column("why", "why", is_prose=True),
]
