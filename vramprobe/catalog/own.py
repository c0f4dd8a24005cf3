"""The user's own folder of what vramprobe made or measured here: builds, environments, recipes, contexts of GPUs.

In: $VRAMPROBE_CACHE_DIR, else the user's cache folder. Out: its path. Makes nothing there.
"""

import os
import sys
from pathlib import Path

CACHE_VARIABLE = "VRAMPROBE_CACHE_DIR"


def cache_folder() -> Path:
    """Return the folder of files that vramprobe can make again: $VRAMPROBE_CACHE_DIR, else the user's cache folder."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "vramprobe"
    base = os.environ.get("XDG_CACHE_HOME", "")  # the XDG base directory specification: a relative one is ignored
    return Path(base if os.path.isabs(base) else Path.home() / ".cache") / "vramprobe"
