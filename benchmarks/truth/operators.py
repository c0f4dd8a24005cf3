"""torch's own table of operators on an emulated GPU: ``python benchmarks/truth/operators.py``.

Each operator of ``op_db`` (torch's tests go through it) runs with its first four inputs, forward and backward, in a
process of its own: about ten minutes. Written: operators.csv and .md. ``--check`` makes the page anew from the csv;
``--only NAME …`` runs these operators anew and keeps the other rows. Emulated: no result was computed, so the table
says which operators run, not that they are right.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, filled, read_csv, write_or_check

FOLDER = Path(__file__).resolve().parent
TABLE = FOLDER / "operators.csv"
CARD = "A100-80GB"
RUNS = ("forward and backward", "forward")
COLUMNS = ("operator", "outcome", "dtype", "on_the_cpu", "error")


def run(names: Sequence[str], card: str = CARD) -> Iterator[dict[str, str]]:
    """A row for each of torch's operators with these names (none: all) on an emulated ``card``."""
    from vramprobe.emulate.enter import entrance_for_command, installation_to_use

    python = installation_to_use().python
    way = entrance_for_command(python, card)
    # Before the children are forked no GPU may be used: NVML says whether there is one.
    environment = way.environment | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "1"}
    try:
        command = [str(python), str(FOLDER / "operators_run.py")]
        done = subprocess.run(
            command, env=environment, input=json.dumps(list(names)), stdout=subprocess.PIPE, text=True, check=True
        )
    finally:
        shutil.rmtree(way.machine, ignore_errors=True)
    yield from (dict.fromkeys(COLUMNS, "") | json.loads(line) for line in done.stdout.splitlines())


def page(rows: Sequence[dict[str, str]]) -> str:
    """The page of these rows: how many run, and each that does not."""
    counts = Counter(row["outcome"] for row in rows)
    signals = sum(number for outcome, number in counts.items() if outcome.startswith("signal"))
    failed = [row for row in rows if row["outcome"] not in RUNS]
    both, forward = (counts[outcome] for outcome in RUNS)
    own = [row for row in failed if row["on_the_cpu"] not in RUNS]
    lines = [(row["operator"], row["outcome"], row["on_the_cpu"], _cell(row["error"])) for row in failed]
    return filled(
        TABLE.with_suffix(".md"),
        rows=len(rows),
        both=both,
        forward=forward,
        failed=len(failed),
        signals=signals,
        own=len(own),
        table=as_markdown(("operator", "outcome", "on the CPU", "message"), "llll", lines),
    )


def _cell(text: str) -> str:
    text = text.replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= 160 else text[:157] + "…"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", nargs="+", default=[])
    options = parser.parse_args()
    rows = read_csv(TABLE)
    if not options.check:
        found = {row["operator"]: row for row in run(options.only)}
        rows = [found.pop(row["operator"], row) for row in rows if row["operator"] in found or options.only]
        rows += found.values()
    made = {TABLE: as_csv(rows, COLUMNS), TABLE.with_suffix(".md"): page(rows)}
    write_or_check(made, "truth/operators.py", check=options.check)


if __name__ == "__main__":
    main()
