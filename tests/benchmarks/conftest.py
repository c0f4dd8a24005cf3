"""The scripts of benchmarks/ as modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> Iterator[Callable[[str], ModuleType]]:
    """Imports one by its name under benchmarks/, as another script would: ``script("truth.claims")``."""
    sys.path.insert(0, str(ROOT))
    yield lambda name: importlib.import_module(f"benchmarks.{name}")
    sys.path.remove(str(ROOT))
