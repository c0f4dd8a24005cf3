"""docs/words.md explains the causes and phases that profiles print; terms: tests/predict/test_reasons.py."""

import csv
import re
from pathlib import Path

from vramprobe.profile import causes
from vramprobe.records.phase_memory import TRAINING_PHASES

ROOT = Path(__file__).parents[2]
WORDS = (ROOT / "docs" / "words.md").read_text()
#: Read in a profiled process alone.
FUNCTIONS = ROOT / "vramprobe" / "data" / "phase_functions.csv"


def explained(section: str) -> set[str]:
    """The names in code in the first column of a section's table."""
    body = WORDS.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return {name for row in re.findall(r"^\| (`.+?) \|", body, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}


def test_every_cause_of_a_profile_is_explained() -> None:
    assert set(causes.CAUSES) <= explained("Terms")


def test_every_phase_of_a_profile_is_explained() -> None:
    """Those of a step, and those of the functions that the hook watches."""
    with FUNCTIONS.open(newline="") as file:
        named = {row["phase"] for row in csv.DictReader(file)}
    assert len(named) > 10
    assert {*TRAINING_PHASES, *named, "load", "other", "serving"} == explained("Phases")
