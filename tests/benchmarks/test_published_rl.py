"""Published GRPO figures: the parts of the loop's peaks that can be counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from vramprobe.units import GIB

PARAMETERS, VOCABULARY = 1_543_714_304, 151_936  # Qwen2.5-1.5B, tied head


def test_the_loops_peaks_are_their_parts(script: Callable[[str], ModuleType]) -> None:
    loop = script("rollouts.published_rl")
    resident, runs = loop.resident_bytes(), loop.steps()
    assert resident["1"] / GIB == pytest.approx(2 * PARAMETERS / GIB, abs=0.01)
    assert resident["5"] / GIB == pytest.approx(6 * PARAMETERS / GIB, abs=0.01)
    first, second = (runs["checkpointing", step] for step in ("0", "1"))
    assert first.length == round((9.49 - 6.19) * GIB / (2 * 10 * VOCABULARY)) == 1166
    assert loop.peak_bytes(first) / GIB == pytest.approx(8 * PARAMETERS / GIB, abs=0.02)  # the optimizer step
    checkpoints = 28 * 1536 * 2 * second.length
    logits = 18 * VOCABULARY * second.length
    assert loop.peak_bytes(second) / GIB == pytest.approx((8 * PARAMETERS + logits + checkpoints) / GIB, abs=0.05)
