"""Shown: what a result of the Python API has in common: HTML for notebooks, a DataFrame, a plot.

In: a result's headline, rows and remarks. Out: text, HTML, pandas, matplotlib; both are imported when they are asked
for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vramprobe.errors import VramprobeError, require_extra
from vramprobe.units import GIB, format_bytes

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_MAX_BARS = 20


class Shown:
    """Shows ``rows()``: the first column names a row; the first column that ends in ``_bytes`` is drawn."""

    def headline(self) -> str:
        """Return the answer in one sentence: the verdict for the GPU where there is one."""
        raise NotImplementedError

    def rows(self) -> list[dict[str, Any]]:
        """Return the table's rows; bytes are ints, unknown values None."""
        raise NotImplementedError

    def remarks(self) -> list[str]:
        """Return what a reader must know beside the table."""
        return []

    def to_frame(self) -> pd.DataFrame:
        """Return the rows as a DataFrame: bytes are Int64, unknown ones NA."""
        require_extra("report", "a DataFrame")
        import pandas as pd

        frame = pd.DataFrame(self.rows())
        return frame.astype({name: "Int64" for name in frame if str(name).endswith("_bytes")})

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the rows' bytes as bars in GiB and return the axes. Raises VramprobeError where there are none."""
        rows = self.rows()
        drawn = next((name for name in (rows[0] if rows else ()) if name.endswith("_bytes")), None)
        bars = [row for row in rows if drawn is not None and row[drawn] is not None][:_MAX_BARS]
        if drawn is None or not bars:
            raise VramprobeError(
                f"nothing to draw: this {type(self).__name__} has no bytes; print it, or use to_frame()"
            )
        if ax is None:
            require_extra("report", "a plot")
            from matplotlib.figure import Figure

            ax = Figure(figsize=(8, 1 + 0.3 * len(bars)), layout="constrained").add_subplot()
        name = next(iter(rows[0]))
        ax.barh([str(row[name]) for row in bars], [row[drawn] / GIB for row in bars])
        ax.invert_yaxis()
        ax.set_xlabel("GiB")
        ax.set_title(self.headline(), fontsize="small", loc="left", wrap=True)
        return ax

    def _repr_html_(self) -> str:
        from html import escape

        rows = self.rows()
        names = list(rows[0]) if rows else []
        titles = "".join(f"<th>{escape(name.removesuffix('_bytes').replace('_', ' '))}</th>" for name in names)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(_cell(name, row.get(name)))}</td>" for name in names) + "</tr>"
            for row in rows
        )
        remarks = "".join(f"<li>{escape(one)}</li>" for one in self.remarks())
        table = f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
        return f"<p><b>{escape(self.headline())}</b></p>{table}" + (f"<ul>{remarks}</ul>" if remarks else "")


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "–"
    return (
        format_bytes(value) if name.endswith("_bytes") else f"{value:.4g}" if isinstance(value, float) else str(value)
    )
