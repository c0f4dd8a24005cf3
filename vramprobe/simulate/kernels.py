"""What an operator's own kernel takes while it runs, where the operator's result does not show it; by device."""

from __future__ import annotations

from typing import Any


def cpu_scratch(func: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    """Sizes in bytes of what a CPU kernel allocates and frees within one call."""
    return []
