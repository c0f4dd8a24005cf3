"""docs/words.md explains the causes and phases that profiles print; terms: tests/predict/test_reasons.py."""

import ast
import re
from pathlib import Path

from vramprobe.profile import causes
from vramprobe.records.phase_memory import TRAINING_PHASES

ROOT = Path(__file__).parents[2]
WORDS = (ROOT / "docs" / "words.md").read_text()
#: Loaded in a profiled process alone.
SCOPES = ROOT / "vramprobe" / "profile" / "hook" / "scopes.py"


def explained(section: str) -> set[str]:
    """The names in code in the first column of a section's table."""
    body = WORDS.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return {name for row in re.findall(r"^\| (`.+?) \|", body, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}


def test_every_cause_of_a_profile_is_explained() -> None:
    assert set(causes.CAUSES) <= explained("Terms")


def test_every_phase_of_a_profile_is_explained() -> None:
    """Those of a step, and the last word of each row of the hook's tables of functions."""
    tables = [node.value for node in ast.parse(SCOPES.read_text()).body if isinstance(node, ast.Assign)]
    rows = [ast.literal_eval(row) for table in tables if isinstance(table, ast.Tuple) for row in table.elts]
    named = {row[3] for row in rows if len(row) == 4 and row[3].isidentifier()}
    assert len(named) > 10
    assert {*TRAINING_PHASES, *named, "load", "other", "serving"} == explained("Phases")
