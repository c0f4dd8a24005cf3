"""The stages that plan, read and predict start fast: importing them loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "peft", "bitsandbytes", "huggingface_hub", "pandas", "matplotlib", "scipy", "yaml")
LIGHT = (
    "catalog",
    "spec",
    "api",
    "interop.questions",
    "interop.training_file",
    "interop.watch",
    "interop.callback",
    "sweep.definition",
    "records.record",
    "records.store",
    "records.table",
    "check",
    "report",
    "report.timeline_file",
    "sweep.resume",
    "sweep.duration",
    "sweep.skip",
    "sweep.plan",
    "literature.formulas",
    "literature.recalibrate",
    "literature.calibrate",
    "literature.claims",
)


@pytest.mark.parametrize("module", LIGHT)
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, vramprobe.{module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
