"""Rebuild data/claim_traces.csv, what the claims take from the simulation: ``python benchmarks/claims.py``.

The cells of claims whose family has no arithmetic, simulated (half a minute, with torch). What is published of the
claims is rebuilt with the other reports: ``python benchmarks/reports.py``.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from vramprobe import catalog
from vramprobe.claims.figures import Cells, is_formula
from vramprobe.claims.memory import is_traced, traced_conditions

ROOT = Path(__file__).resolve().parents[1]
TRACES = ROOT / "vramprobe" / "data" / "claim_traces.csv"
COLUMNS = ("fingerprint", "cell_id", "peak_allocated_bytes", "low_bytes", "high_bytes")


def traces() -> str:
    """The CSV of simulated peaks, in the order of the claims."""
    from vramprobe.simulate.engine import predict

    cells, rows = Cells(), {}
    for claim in catalog.list_claims():
        if claim.quantity != "peak" or not is_traced(claim):
            continue
        for one in traced_conditions(claim):
            spec = cells.spec(one.options)
            if not is_formula(spec) and spec.fingerprint not in rows:
                peak = predict(spec).peak_allocated_bytes
                rows[spec.fingerprint] = (spec.fingerprint, spec.cell_id, peak.value, peak.low, peak.high)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *rows.values()])
    return text.getvalue()


def main() -> None:
    TRACES.write_text(traces())


if __name__ == "__main__":
    main()
