"""Terms: a spec and its architecture -> bytes per physical cause, by arithmetic alone.

In: a CellSpec. Out: the ledger and the moments of a step (step/moments.py), and what a run asks of its allocator
(step/requests.py). Read in this order: tape/, cell/, models/, step/. Never imports the workload (the
independence line) or torch.
"""

from __future__ import annotations

from vramprobe.terms.step.moments import (
    Course,
    Moment,
    batch_bytes,
    course_of,
    ledger_terms,
    moments,
    moments_of,
)
from vramprobe.terms.tape.graph import CAUSES

__all__ = [
    "CAUSES",
    "Course",
    "Moment",
    "batch_bytes",
    "course_of",
    "ledger_terms",
    "moments",
    "moments_of",
]
