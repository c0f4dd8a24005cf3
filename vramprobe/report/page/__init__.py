"""Tables, plots and the recipes → one HTML page that needs no server, no network and nothing beside it.

In: a Content. Out: the page as text, the same bytes each time. Everything that came from a record, a config or a claim
is escaped; a content security policy lets the page run its own scripts and reach nothing. Never computes a number;
stays this side of the torch line.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from importlib import resources
from string import Template
from typing import Any

from vramprobe.errors import VramprobeError
from vramprobe.report.page import page_data
from vramprobe.report.page.tables import Chapter, chapter_html

#: The largest page that opens at once on a phone, in bytes.
MAX_BYTES = 3_000_000
#: Of a chapter's rows, as many are shown where the whole page would be larger.
_FEWER_ROWS = (1000, 300, 100, 30)
#: In the order in which they need each other.
SCRIPTS = (
    "words.js", "tables.js", "growth.js", "answer.js", "state.js", "form.js", "chart.js", "result.js", "cards.js",
    "page.js",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A picture with what it shows; ``alt`` is for those who cannot see it."""

    title: str
    svg: str
    caption: str
    alt: str


@dataclass(frozen=True, kw_only=True)
class Content:
    """Content of the page. ``data``: what its scripts read as JSON (page_data.py); ``book``: its recipes.

    ``predictor`` says what the calculator's numbers rest on; ``provenance`` where those of the records come from, a
    line each, and ``word`` what they are called; ``command`` rebuilds the page.
    """

    chapters: Sequence[Chapter]
    plots: Sequence[Plot]
    provenance: Sequence[str]
    command: str
    word: str = "measured"
    data: Mapping[str, Any] = field(default_factory=page_data.data)
    book: bytes = field(default_factory=page_data.BOOK.read_bytes)
    predictor: str = field(default_factory=page_data.predictor)


def page(content: Content) -> str:
    """Return the whole page. Its tables are cut where it would be larger than MAX_BYTES; raises VramprobeError where
    that is not enough.
    """
    text = _text(content)
    for most in _FEWER_ROWS:
        if len(text.encode()) <= MAX_BYTES:
            return text
        text = _text(replace(content, chapters=[one.cut(most) for one in content.chapters]))
    if (size := len(text.encode())) > MAX_BYTES:
        raise VramprobeError(
            f"the page would be {size:,} bytes, more than the {MAX_BYTES:,} that open at once on a phone; report fewer "
            "results, a folder at a time"
        )
    return text


def _text(content: Content) -> str:
    """The page, however large."""
    script, style = "\n".join(map(part, SCRIPTS)), part("page.css")
    assert "</script" not in script.lower(), "a script ends its own element"
    assert "</style" not in style.lower(), "the style ends its own element"
    return Template(part("page.html")).substitute(
        style=style,
        script=script,
        policy=policy([script], style, compiles=True),
        page_data=json_for_html(content.data),
        allocator=base64.b64encode(page_data.ALLOCATOR.read_bytes()).decode(),
        book=base64.b64encode(content.book).decode(),
        predictor=escape(content.predictor),
        word=escape(content.word.capitalize()),
        chapters="\n".join(chapter_html(one, number) for number, one in enumerate(content.chapters, start=1)),
        contents="".join(
            f'<li><a href="#chapter-{number}">{escape(one.title)}</a></li>'
            for number, one in enumerate(content.chapters, start=1)
        ),
        plots="\n".join(map(picture, content.plots)),
        has_plots="" if content.plots else "hidden",
        provenance="".join(f"<li>{escape(line)}</li>" for line in content.provenance),
        command=escape(content.command),
    )


def json_for_html(value: Any) -> str:
    """JSON that cannot end or comment out the ``<script>`` around it: no ``<``, ``>`` or ``&`` is left in it."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def part(name: str) -> str:
    return resources.files("vramprobe.report.page").joinpath(name).read_text(encoding="utf-8")


def policy(scripts: Sequence[str], style: str, *, compiles: bool = False) -> str:
    """Nothing but the page's own scripts, style and pictures; no connection, no form, no frame. ``compiles``: its
    scripts may compile WebAssembly.
    """
    digests = " ".join(f"'{_digest(script)}'" for script in scripts) + (" 'wasm-unsafe-eval'" if compiles else "")
    return (
        f"default-src 'none'; script-src {digests}; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def picture(plot: Plot) -> str:
    """As an image: two plots may use the same ids, and what is in an image runs no script."""
    data = base64.b64encode(plot.svg.encode()).decode()
    return (
        f'<figure><h3>{escape(plot.title)}</h3><img src="data:image/svg+xml;base64,{data}" alt="{escape(plot.alt)}">'
        f"<figcaption>{escape(plot.caption)}</figcaption></figure>"
    )
