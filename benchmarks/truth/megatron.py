"""NVIDIA's functional tests of Megatron-LM, emulated: ``python benchmarks/truth/megatron.py CLONE [CASE ...]``.

CLONE is a clone of Megatron-LM whose ``megatron/core/datasets`` is built; PATH begins with an environment that can run
it (docs/megatron.md). Each case (megatron_cases.py) runs three steps on eight emulated A100s under ``vramprobe
profile``, all ranks or one, minutes each, and replaces its row in megatron.csv; then the page megatron.md is made.
``--check`` says whether the page is what the csv says. Published is what NVIDIA's own runs wrote into the test:
mem-max-allocated-bytes of the last rank, after 50 or 100 steps. Neither figure is a prediction.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import journal
from benchmarks.tables import as_csv, as_markdown, filled, read_csv, write_or_check
from benchmarks.truth.megatron_cases import CASES, Case

TABLE = Path(__file__).resolve().with_suffix(".csv")
STAND_INS = TABLE.parent / "megatron" / "apex_stand_ins.py"
_CAUSES = ("weights", "master_weights", "gradients", "optimizer_state", "saved_activations", "temporaries", "other")
#: What NVIDIA's test sets in the environment.
_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


def run(case: Case, clone: Path) -> dict[str, Any]:
    """One row, of ``vramprobe profile`` and the case under torchrun."""
    began = time.monotonic()
    words = ["--emulate", "A100-80GB-SXM x8", "--steps-only"]
    if case.rank is not None:
        words += ["--only-rank", str(case.rank), "--world-size", "8"]
    launched = [str(STAND_INS)] if case.stand_ins else []
    command = ["torchrun", "--nproc-per-node", "8", *launched, *case.words(clone)]
    record = journal.profiled(words, command, cwd=clone, environment=_ENVIRONMENT | {"PYTHONPATH": str(clone)})
    return row_of(case, clone, record, time.monotonic() - began)


def row_of(case: Case, clone: Path, record: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The row of a run's record: of the last rank that ran."""
    last = max(record["ranks"], key=lambda rank: rank["rank"])
    peak, step = last["peak"], record["step_time"]
    peaks = sorted({rank["peak"]["allocated_bytes"] for rank in record["ranks"]})
    return {
        "case": case.name,
        "ranks": "all" if case.rank is None else case.rank,
        "ended": record["outcome"]["kind"],
        "steps": last["num_steps"],
        "allocated_bytes": peak["allocated_bytes"],
        "requested_bytes": peak["requested_bytes"],
        "phase": peak["phase"],
        **{f"{name}_bytes": last["at_peak"].get(f"{name}_bytes", 0) for name in _CAUSES},
        "rank_peaks_bytes": " ".join(map(str, peaks)),
        "step_seconds": f"{step['seconds']:.4f}" if step else "",
        "published_step_seconds": case.seconds(clone),
        "published_bytes": json.dumps(case.published(clone)),
        "host_bytes": (record["host"] or {}).get("peak_bytes", ""),
        "seconds": f"{seconds:.0f}",
    }


def page(rows: list[dict[str, str]]) -> str:
    """The page of these rows."""
    cases = {case.name: case for case in CASES}
    bytes_lines, cause_lines, causes = [], [], []
    for row in rows:
        case, own = cases[row["case"]], int(row["allocated_bytes"])
        published = json.loads(row["published_bytes"])
        near = min(published, key=lambda key: abs(published[key] - own))
        bytes_lines.append(
            [
                case.name,
                row["ranks"] if row["ranks"] != "all" else "all, 7",
                _libraries(case),
                f"{published[near]:,} ({near})",
                f"{own:,}",
                f"{own - published[near]:+,}",
                f"{100 * (own / published[near] - 1):+.4f} %",
                f"{min(published.values()):,} to {max(published.values()):,}",
            ]
        )
        cause_lines.append(
            [
                case.name,
                row["phase"],
                *(f"{int(row[f'{name}_bytes']) / 2**20:,.0f}" for name in _CAUSES),
                f"{float(row['step_seconds']) * 1e3:.0f}" if row["step_seconds"] else "–",
                f"{float(row['published_step_seconds']) * 1e3:.0f}",
                row["seconds"],
            ]
        )
        if case.cause:
            causes.append(f"- {case.name}: {case.cause}")
    head = ["case", "ranks run", "libraries", "nearest published", "emulated", "difference, bytes", "difference"]
    names = [name.replace("_", " ") for name in _CAUSES]
    columns = ["case", "peak in", *names, "step, ms", "published, ms", "took, s"]
    alls = [row for row in rows if row["ranks"] == "all"]
    peaks = [[f"{int(one):,}" for one in row["rank_peaks_bytes"].split()] for row in alls]
    return filled(
        TABLE.with_suffix(".md"),
        bytes=as_markdown([*head, "all published"], "lllrrrrr", bytes_lines),
        peaks=as_markdown(columns, "ll" + "r" * (len(names) + 3), cause_lines),
        ranks=[f"- {row['case']}: {', '.join(own)} bytes" for row, own in zip(alls, peaks, strict=True)],
        causes=causes,
    )


def _libraries(case: Case) -> str:
    own = "stand-ins for Apex" if case.stand_ins else "none, as published"
    return f"{own}; published with Transformer Engine" if case.engine else own


def main() -> None:
    check = "--check" in sys.argv
    kept = {row["case"]: row for row in read_csv(TABLE)}
    if not check:
        clone, only = Path(sys.argv[1]).resolve(), sys.argv[2:]
        kept |= {case.name: run(case, clone) for case in CASES if not only or case.name in only}
    rows = [kept[case.name] for case in CASES if case.name in kept]
    text = [{key: str(value) for key, value in row.items()} for row in rows]
    made = {TABLE: as_csv(text), TABLE.with_suffix(".md"): page(text)}
    write_or_check(made, "truth/megatron.py CLONE", check=check)


if __name__ == "__main__":
    main()
