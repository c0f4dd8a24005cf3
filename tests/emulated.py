"""The emulated environment, for the tests that need it: ``make test`` sets it up, elsewhere they are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from vramprobe.emulate.enter import installation_to_use
from vramprobe.errors import VramprobeError


def require_emulation() -> Path:
    """The interpreter with a CUDA build of torch; skips where there is none."""
    try:
        return installation_to_use().python
    except VramprobeError as error:
        pytest.skip(str(error))
