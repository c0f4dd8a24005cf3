"""Vision-language models small enough to train here, one of each family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Model type → config.json.
VISION: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "vision.json").read_text())
