"""Formulas: every way in which people estimate the memory of a fine-tuning run, each named, each with its source.

In: a CellSpec, as Facts. Out: bytes by cause whose sum is the formula's figure, or why it has nothing to say. Ours is
not among them (terms); how well each does on measured cells is literature/calibrate.py's. Stays this
side of the torch line.
"""

from vramprobe.literature.formulas.facts import CONSTANTS, MISSABLE, Estimate, Facts, Formula, facts_of
from vramprobe.literature.formulas.papers import PAPERS
from vramprobe.literature.formulas.rules import RULES
from vramprobe.literature.formulas.tables import TABLES
from vramprobe.literature.formulas.tools import TOOLS

FORMULAS = (*RULES, *PAPERS, *TOOLS, *TABLES)

__all__ = ["CONSTANTS", "FORMULAS", "MISSABLE", "Estimate", "Facts", "Formula", "facts_of"]
