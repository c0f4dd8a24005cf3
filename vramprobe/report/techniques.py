"""The registry of techniques and their emulated runs → a page of its own, with the plot, and the table in each format.

In: what ships (techniques/). Out: file name → content. Memory is emulated, step time predicted; nothing is run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vramprobe.report.definition import Column, Document, Picture, Table
from vramprobe.report.formats import files_of
from vramprobe.report.page import Plot
from vramprobe.report.page.plain import plain_page
from vramprobe.report.page.tables import Chapter
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
    page = plain_page(_TITLE, _ABOUT, chapters, [shown], command)
    return {"index.html": page.encode()} | files_of(document) | drawn


def _beside(name: str, found: list[Saving]) -> Table:
    """Table of the techniques that ran beside this base, which its title names."""
    of = bases()[name]
    peak = f": {found[0].base_bytes / GIB:.2f} GiB" if found else ""
    said = {"beside", "gpu"}
    columns = [replace(one, heading=None) if one.name in said else one for one in _COLUMNS]
    title, note = f"Beside {of.text}, {of.gpu}{peak}", f"In the plot: {name}."
    return Table(title=title, note=note, columns=columns, rows=list(map(_row, found)))


def _order(one: Saving) -> tuple[int, int]:
    """By kind, the largest saving first."""
    return KINDS.index(techniques()[one.technique].kind), -one.saved_bytes


def _row(one: Saving) -> dict[str, Any]:
    parts = [techniques()[name] for name in one.technique.split(" + ")]
    slower = one.slower_share
    return {
        "technique": " + ".join(part.name for part in parts),
        "kind": " + ".join(dict.fromkeys(part.kind for part in parts)),
        "package": one.package,
        "beside": bases()[one.base].text,
        "gpu": one.gpu,
        "base_bytes": one.base_bytes,
        "peak_bytes": one.peak_bytes,
        "saved_bytes": one.saved_bytes,
        "saved_percent": 100 * one.saved_share,
        "slower_percent": None if slower is None else 100 * slower,
        "host_bytes": one.host_bytes,
        "trl": " ".join(part.switch("trl") for part in parts).strip(),
        "remark": "; ".join(part.remark for part in parts if part.remark),
    }


def _why(one: Technique, ran: Saving | None) -> dict[str, Any]:
    why = one.left_out or (ran.outcome if ran else "") or "not run yet"
    return {"technique": one.name, "kind": one.kind, "package": one.package, "why": why}


def _gib(name: str, heading: str) -> Column:
    return Column(name, heading, text=lambda value: f"{value / GIB:.2f}", is_number=True)


_COLUMNS = [
    Column("technique", "technique"),
    Column("kind", "kind"),
    Column("beside", "beside", is_prose=True),
    Column("gpu", "GPU"),
    Column("base_bytes"),
    _gib("saved_bytes", "saved, GiB"),
    Column("saved_percent", "saved, %", text="{:.1f}".format, is_number=True),
    Column("slower_percent", "step, % longer", text="{:+.1f}".format, is_number=True),
    _gib("peak_bytes", "peak, GiB"),
    _gib("host_bytes", "host, GiB"),
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
