"""The scripts of benchmarks/ as modules."""

from importlib import import_module
from types import ModuleType


def script(name: str) -> ModuleType:
    """Import one by its name under benchmarks/, as another script would: ``script("truth.claims")``."""
    return import_module(f"benchmarks.{name}")
