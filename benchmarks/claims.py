"""Rebuild results/claims and what it takes from the simulation: ``python benchmarks/claims.py``.

First data/claim_traces.csv: the cells of claims whose family has no arithmetic, simulated (half a minute, with torch);
``--tables`` leaves it. Then the published tables. ``--check`` changes nothing and fails when a table is stale.
"""

from __future__ import annotations

import csv
import io
import os
import sys
import tempfile
from pathlib import Path

from vramprobe import api, catalog
from vramprobe.claims.figures import Cells, is_formula
from vramprobe.claims.memory import is_traced, traced_conditions

ROOT = Path(__file__).resolve().parents[1]
TRACES, TABLES = ROOT / "vramprobe" / "data" / "claim_traces.csv", "results/claims"
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
    os.chdir(ROOT)
    if "--check" in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            api.claims(results="results", out=folder)
            stale = [
                path.name for path in sorted(Path(folder).iterdir())
                if path.read_text().replace(folder, TABLES) != (ROOT / TABLES / path.name).read_text()
            ]  # fmt: skip
        sys.exit(f"stale: {', '.join(stale)}; rebuild them: python benchmarks/claims.py" if stale else 0)
    if "--tables" not in sys.argv:
        TRACES.write_text(traces())
    api.claims(results="results", out=TABLES)


if __name__ == "__main__":
    main()
