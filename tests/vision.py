"""Vision-language models small enough to train here, one of each family."""

import json
from pathlib import Path
from typing import Any

from vramprobe.catalog.profiled import list_profiled

#: Model type → config.json.
VISION: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "vision.json").read_text())


def profiled_config(slug: str) -> dict[str, Any]:
    """The published config.json of a model that only a profile knows, or that has images."""
    return json.loads(next(one for one in list_profiled() if one.name == slug).config.read_text())
