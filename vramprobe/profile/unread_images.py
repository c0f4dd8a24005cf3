"""A note where the images of a replaced data set never reach the model.

In: a run's replacements, the tokens and samples of its counted step. Out: a line, or none. A program that reads its
rows in another form drops the images without an error, and its model then trains on text alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_COUNTED = re.compile(r"([\d,]+) for (.+ pixels), counted by")


def unread_images(replaced: Iterable[Mapping[str, Any]], tokens: int | None, samples: int | None) -> list[str]:
    """Say that a sample has fewer tokens than the image of its row; nothing where either number is unknown."""
    replaced = list(replaced)
    counts = [_COUNTED.match(str(one.get("by"))) for one in replaced if one.get("kind") == "image tokens"]
    has_images = any(one.get("kind") == "dataset" and "; one image of" in str(one.get("by")) for one in replaced)
    if not has_images or not tokens or not samples or not counts or counts[0] is None:
        return []
    of_image, of_sample = int(counts[0][1].replace(",", "")), tokens // samples
    if of_sample >= of_image:
        return []
    return [
        f"the images did not reach the model: a sample has {of_sample:,} tokens, an image of {counts[0][2]} alone "
        f"{of_image:,}; the program reads its rows in another form than the replaced ones have, so give it a file of "
        "your own rows, with any pictures"
    ]
