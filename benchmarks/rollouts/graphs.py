"""Learn what instances of CUDA graphs hold outside torch from half of the published logs; hold it against the other.

Needs nothing but this package and takes a second; the counts of graphs.csv are of emulated runs of the same rows:

    python benchmarks/rollouts/graphs.py            # rebuilds graphs.md
    python benchmarks/rollouts/graphs.py --check    # fails if it is stale, or the emulated GPU charges something else
"""

import sys
from pathlib import Path

import numpy as np

from vramprobe.emulate.machine import ASSUMED_GRAPH_BYTES, ASSUMED_GRAPH_NODE_BYTES
from vramprobe.units import GIB, KIB

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from tables import as_markdown, filled, read_csv, write_or_check  # noqa: E402

PAGE = HERE / "graphs.md"
HEAD = ("row", "half", "model", "instances", "nodes", "torch's pool", "graphs", "error")


def counted() -> list[dict[str, str]]:
    """graphs.csv, each row with its published ``graph_gib``."""
    published = {row["row"]: row["graph_gib"] for row in read_csv(HERE / "published_vllm.csv")}
    return [{**row, "graph_gib": published[row["row"]]} for row in read_csv(HERE / "graphs.csv")]


def is_learnt_from(row: dict[str, str]) -> bool:
    return int(row["row"]) % 2 == 0


def learnt(rows: list[dict[str, str]]) -> tuple[int, int]:
    """Bytes of an instance and of a node, in whole KiB: least squares on the even rows."""
    used = [row for row in rows if is_learnt_from(row)]
    counts = np.array([[int(row["num_instances"]), int(row["num_nodes"])] for row in used], float)
    outside = np.array([(float(row["graph_gib"]) - float(row["pool_gib"])) * GIB for row in used])
    of_instance, of_node = np.linalg.lstsq(counts, outside, rcond=None)[0]
    return round(of_instance / KIB) * KIB, round(of_node / KIB) * KIB


def predicted_gib(row: dict[str, str], of_instance: int, of_node: int) -> float:
    """The pool and what all instances hold."""
    held = int(row["num_instances"]) * of_instance + int(row["num_nodes"]) * of_node
    return float(row["pool_gib"]) + held / GIB


def page(rows: list[dict[str, str]], of_instance: int, of_node: int) -> str:
    """graphs.md: published / with the charge."""
    lines, errors = [], {}
    for row in rows:
        told, found = float(row["graph_gib"]), predicted_gib(row, of_instance, of_node)
        if not is_learnt_from(row):
            errors[row["row"]] = abs(found - told)
        lines.append([
            row["row"], "learnt from" if is_learnt_from(row) else "held out", row["model"],
            f"{int(row['num_instances']):,}", f"{int(row['num_nodes']):,}", f"{float(row['pool_gib']):.2f}",
            f"{told:.2f} / {found:.2f}", f"{found - told:+.2f}",
        ])  # fmt: skip
    worst = max(errors, key=errors.__getitem__)
    result = (
        f"with the charge, {len(errors)} held out logs have their graphs within {errors[worst]:.2f} GiB (row {worst})."
    )
    table = as_markdown(HEAD, "rllrrrrr", lines)
    return filled(PAGE, result=result, graph=of_instance // KIB, node=of_node // KIB, table=table)


def main() -> None:
    """Write the page, or say that it is stale."""
    rows = counted()
    found = learnt(rows)
    if found != (ASSUMED_GRAPH_BYTES, ASSUMED_GRAPH_NODE_BYTES):
        sys.exit(f"the rows give {found} bytes, vramprobe/emulate/machine.py has others: put these there")
    write_or_check({PAGE: page(rows, *found)}, "rollouts/graphs.py", check="--check" in sys.argv)


if __name__ == "__main__":
    main()
