"""Rules: which combinations of a cell's options can run, and why others cannot.

In: a cell. Out: reasons in words, none where it can run: of one GPU (cell.py), and of several, with the table of what
each kind of sharding does and takes (sharding.py). spec.py, the command line, predict, recommend, measure and the page
read them here. Never raises, never predicts. No torch here.
"""

from typing import Any

#: A CellSpec, which these rules check, and which therefore imports them.
Cell = Any
