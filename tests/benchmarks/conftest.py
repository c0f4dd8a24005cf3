"""The scripts of benchmarks/ as modules."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def script() -> Callable[[str], ModuleType]:
    """Imports one by its name under benchmarks/, as another script would: ``script("truth.claims")``."""
    return lambda name: importlib.import_module(f"benchmarks.{name}")
