"""A drawn figure → a picture that says what it shows: the same from every processor, and comparable with any other.

In: a figure, or the bytes of SVGs and PNGs. Out: a stamp for a picture's metadata, an SVG with the digits that are
published, and what is wrong with a published file beside its due content. Never draws or writes, and never compares the
bytes of a PNG: they hang on matplotlib, freetype and zlib.
"""

import base64
import hashlib
import io
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vramprobe.units import published

_EMBEDDED = re.compile(rb"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)")
_STAMP = re.compile(rb"shows ([0-9a-f]{16}) \((matplotlib [\w.+-]+, freetype [\w.+-]+)\)")
_TAG = re.compile(r"<[^!?][^>]*>")
_DECIMAL = re.compile(r"(?<![\w#.])-?\d+\.\d+")
_ID = re.compile(r'(?<=id=")(?:[a-z]|C[0-9a-f]+_[0-9a-f]+_)[0-9a-f]{10}(?=")')  # matplotlib's: a hash of all digits
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_POINTS = 0.01  # two coordinates this near are one
_PIXEL_VALUE = 0.1  # of 1: two pixels that differ by less look alike
_PIXELS = 0.01  # of all: so many may differ where an edge fell to the other side of a pixel


class Stamp(NamedTuple):
    """Stamp of a picture: a fingerprint of its data, and the library that drew it."""

    shows: str
    drawn_by: str


def stamp_of(figure: Any) -> str:
    """The text for the picture's metadata, which :func:`read_stamp` finds."""
    import matplotlib
    from matplotlib import ft2font

    shows = hashlib.sha256(json.dumps(contents(figure)).encode()).hexdigest()[:16]
    return f"shows {shows} (matplotlib {matplotlib.__version__}, freetype {ft2font.__freetype_version__})"


def read_stamp(picture: bytes) -> Stamp | None:
    """From the bytes of an SVG or a PNG; None where it has none."""
    found = _STAMP.search(picture)
    return Stamp(found[1].decode(), found[2].decode()) if found else None


def contents(figure: Any) -> list[Any]:
    """Texts, lines, bars and limits in the data's own numbers, with colours, markers and hatches; no layout."""
    from matplotlib.ticker import FixedLocator

    found: list[Any] = [_numbers(figure.get_size_inches()), *_texts(figure.texts), *_legends(figure.legends)]
    for axes in figure.axes:
        found += [axes.get_xscale(), axes.get_yscale(), _numbers(axes.get_xlim()), _numbers(axes.get_ylim())]
        found += [axes.get_title(loc) for loc in ("left", "center", "right")] + [axes.get_xlabel(), axes.get_ylabel()]
        found += [
            [
                line.get_marker(),
                line.get_linestyle(),
                _colours(line.get_color()),
                _colours(line.get_markerfacecolor()),
                *map(_numbers, line.get_data(orig=False)),
            ]
            for line in axes.lines
        ]
        for patch in axes.patches:
            vertices = patch.get_patch_transform().transform(patch.get_path().vertices)
            found.append([_colours(patch.get_facecolor()), patch.get_hatch(), _numbers(vertices.ravel())])
        for drawn in axes.collections:
            paths = [_numbers(path.vertices.ravel()) for path in drawn.get_paths()]
            found.append([_colours(drawn.get_edgecolor()), *paths])
        for axis in (axes.xaxis, axes.yaxis):  # ticks that matplotlib chose are layout
            if isinstance(locator := axis.get_major_locator(), FixedLocator):
                ticks = vars(locator)["locs"]
                found += [_numbers(ticks), axis.get_major_formatter().format_ticks(ticks)]
        found += _texts(axes.texts) + _legends([axes.get_legend()] if axes.get_legend() else [])
    return found


def _texts(texts: Sequence[Any]) -> list[Any]:
    return [[one.get_text(), _numbers(getattr(one, "xy", one.get_position()))] for one in texts]


def _legends(legends: Sequence[Any]) -> list[Any]:
    return [[one.get_title().get_text(), *(text.get_text() for text in one.get_texts())] for one in legends]


def _numbers(values: Any) -> list[Any]:
    return [published(float(value)) for value in values]


def _colours(colour: Any) -> list[str]:
    from matplotlib.colors import to_hex, to_rgba_array

    return [to_hex(one, keep_alpha=True) for one in to_rgba_array(colour)]


def settled_svg(svg: bytes) -> bytes:
    """Round an SVG's numbers to the published digits, and number its ids, which otherwise depend on the last digits.

    What is 0.015625 stays that: digits are significant ones.
    """
    text = svg.decode()
    for number, name in enumerate(dict.fromkeys(_ID.findall(text)), start=1):
        text = text.replace(f'"{name}"', f'"d{number}"').replace(f"#{name}", f"#d{number}")
    return _TAG.sub(lambda tag: _DECIMAL.sub(lambda found: _short(float(found[0])), tag[0]), text).encode()


def _short(number: float) -> str:
    return f"{published(number):.6f}".rstrip("0").rstrip(".")


def what_is_wrong(path: Path, content: bytes) -> str | None:
    """With the file at ``path``, beside its due ``content``."""
    try:
        there = path.read_bytes()
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if there == content:
        return None
    (rest, then), (same_rest, now) = _apart(path, there), _apart(path, content)
    if rest == same_rest and len(then) == len(now) and all(map(is_same_picture, then, now)):
        return None
    return "differs from what the records give"


def _apart(path: Path, content: bytes) -> tuple[bytes, list[bytes]]:
    """Return a file's content without its pictures, and its pictures."""
    if path.suffix in (".svg", ".png"):
        return b"", [content]
    if path.suffix != ".html":
        return content, []
    return _EMBEDDED.sub(b"", content), [base64.b64decode(found) for found in _EMBEDDED.findall(content)]


def is_same_picture(there: bytes, now: bytes) -> bool:
    """Return True if a picture shows the same data as a fresh one and, if one library drew both, is drawn alike."""
    if there == now:
        return True
    old, new = read_stamp(there), read_stamp(now)
    if old is None or new is None or old.shows != new.shows or _is_png(there) != _is_png(now):
        return False
    alike = _are_alike_png if _is_png(now) else _are_alike_svg
    return alike(there, now, is_same_library=old.drawn_by == new.drawn_by)


def _is_png(picture: bytes) -> bool:
    return picture.startswith(b"\x89PNG")


def _are_alike_svg(there: bytes, now: bytes, *, is_same_library: bool) -> bool:
    """By the same library: equal but for numbers that differ by a hundredth of a point; by another: a whole SVG."""
    if not is_same_library:
        return there.rstrip().endswith(b"</svg>")
    (rest, numbers), (other_rest, others) = (
        (_NUMBER.sub("#", text), [float(one) for one in _NUMBER.findall(text)])
        for text in map(bytes.decode, (there, now))
    )
    return rest == other_rest and all(
        math.isclose(one, other, rel_tol=0, abs_tol=_POINTS) for one, other in zip(numbers, others, strict=True)
    )


def _are_alike_png(there: bytes, now: bytes, *, is_same_library: bool) -> bool:
    """Return True if both have one size and, drawn by the same library, nearly every pixel alike."""
    import numpy as np
    from matplotlib.image import imread

    try:
        one, other = (imread(io.BytesIO(picture), format="png") for picture in (there, now))
    except (OSError, SyntaxError):  # Pillow's of a damaged file
        return False
    if one.shape != other.shape:
        return False
    return not is_same_library or float((np.abs(one - other).max(axis=2) > _PIXEL_VALUE).mean()) <= _PIXELS
