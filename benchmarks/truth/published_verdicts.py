"""Verdicts on published runs, for oom.md: what ran, what ran out, and what ``predict --gpu`` and its peers say of each.

In: the reports of oom/reports.toml, t4_published.csv, the A100 rows of published.csv, and this project's own measured
cell at the edge of a GPU. ``python benchmarks/truth/published_verdicts.py --peer fitcheck=PYTHON`` asks a peer again,
in an environment of its own (``python3 -m venv ENV && ENV/bin/pip install fitcheck-llm==0.3.1``; peers/estimate.py has
their names), and writes published_verdicts.csv; a peer that is not asked keeps what it said. Formulas that tools print
are applied here (vramprobe/literature).
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, read_csv
from benchmarks.truth import t4
from benchmarks.truth.kept_predictions import predicted_on
from benchmarks.truth.published_rows import cell_of, list_published
from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.catalog import find_gpu, gpu_seen
from vramprobe.catalog.gpus import Gpu
from vramprobe.errors import VramprobeError
from vramprobe.literature.formulas import FORMULAS, Formula, FormulaEstimate, facts_of
from vramprobe.predict.unknowns import deciding, unknowns, with_unknowns
from vramprobe.predict.verdict import Verdict, verdict
from vramprobe.records.whole import read_whole
from vramprobe.spec import CellSpec
from vramprobe.units import GIB, format_bytes

#: Measured by this project on an H200 of which a ballast left 16 GiB.
EDGE = Path(__file__).resolve().parents[1] / "gpu" / "h200" / "boundary.jsonl.xz"
PEERS = Path(__file__).with_suffix(".csv")
ESTIMATE = Path(__file__).parent / "peers" / "estimate.py"
SAID = ("fits", "tight", "does not fit")
#: Tools whose formula is transcribed: memory of tensors, held against the whole card.
_TOOLS = ("accelerate", "gpu_poor", "vram-calculator", "llama-factory-table", "unsloth-table", "deepspeed-zero3")


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One run; ``is_again``: one that is judged under another loop, too; ``loop_is_told``: a Trainer's, say."""

    source: str
    name: str
    gpu: Gpu
    spec: CellSpec
    ran: bool
    is_again: bool = False
    loop_is_told: bool = False
    why: str = ""  # why a wrong verdict is wrong, as far as it is known


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A run and its verdict."""

    run: PublishedRun
    said: Verdict


def card_of(name: str) -> Gpu | None:
    """The card of the catalog that a source means; None where it has none."""
    try:
        return gpu_seen(name) or find_gpu(name)
    except VramprobeError:
        return None


def runs_of_others() -> Iterator[PublishedRun]:
    """The cells of t4_published.csv, as predict assumes their loop and as it is, and those of published.csv."""
    card, rows = find_gpu("T4"), {}
    for row in read_csv(t4.PUBLISHED):
        if row["model"] not in t4.NOT_IN_CATALOG:
            rows[t4.cell_of(row), row["outcome"] == "completed"] = row
    for source, loop in (("a T4, fitcheck-llm's", "trainer"), (f"the same, `--loop {t4.LOOP}`", t4.LOOP)):
        why = "the loop keeps its outputs, a Trainer's does not" if loop == "trainer" else ""
        for (name, ran), row in rows.items():
            words = {"name": name, "gpu": card, "ran": ran, "is_again": loop != "trainer", "why": why}
            words["loop_is_told"] = words["is_again"]
            yield PublishedRun(source=source, spec=t4.spec_of(row, loop), **words)
    for one in list_published():
        spec, card = cell_of(one), card_of(one.gpu or "")
        if spec is not None and card is not None:
            name = run_name(spec)
            words = {"name": name, "gpu": card, "spec": spec, "ran": True, "loop_is_told": True}
            yield PublishedRun(source="an A100, fms-acceleration's", **words)
    for record in read_whole(EDGE).records:
        gpu = replace(find_gpu("H200"), total_bytes=record.spec.limit_vram_bytes)
        spec, ran = record.spec.model_copy(update={"limit_vram": None}), record.outcome.kind == "ok"
        name = f"{run_name(spec)}, limited to {format_bytes(gpu.total_bytes)}"
        words = {"name": name, "gpu": gpu, "spec": spec, "ran": ran, "loop_is_told": True}
        yield PublishedRun(source="an H200, measured here", **words)


def run_name(spec: CellSpec) -> str:
    """The cell in a few words."""
    ranks = f", {spec.sharding} × {spec.num_gpus}" if spec.num_gpus > 1 else ""
    return f"{spec.model_label} {spec.method}, {spec.batch_size} × {spec.seq_len}{ranks}"


def judged(runs: Sequence[PublishedRun]) -> Iterator[Judged]:
    """Judge each run; those that cannot be recorded (a P100 or a V100 has no kernels in torch 2.13) are left out."""
    for run in runs:
        try:
            yield Judged(run=run, said=_verdict(run))
        except VramprobeError:
            continue


def _verdict(run: PublishedRun) -> Verdict:
    found = predicted_on(run.spec, run.gpu)
    by = unknowns(run.spec, found, ["loop"] if run.loop_is_told else [])
    return verdict(with_unknowns(found, deciding(by)), run.gpu)


def section(found: Sequence[Judged]) -> list[str]:
    """Markdown: counts by source, then by tool, then each run whose verdict is wrong or open."""
    counts = []
    for source in dict.fromkeys(one.run.source for one in found):
        for ran in (True, False):
            rows = [one for one in found if one.run.source == source and one.run.ran == ran]
            if rows:
                counts.append([source, "ran" if ran else "ran out", len(rows), *_counted(rows)])
    lines = [*as_markdown(["runs", "on the GPU", "number", *SAID], "llrrrr", counts), ""]
    once = [one for one in found if not one.run.is_again]
    lines += [*_beside_peers(once), ""]
    table = [
        [
            *(one.run.source, one.run.name, one.run.gpu.short_name, "ran" if one.run.ran else "ran out"),
            f"{one.said.needed_bytes.value / GIB:.2f} ({one.said.needed_bytes.high / GIB:.2f})",
            *(f"{one.said.verdict}, {one.said.usable_bytes / GIB:.2f}", one.run.why),
        ]
        for one in found
        if one.said.verdict != ("fits" if one.run.ran else "does not fit")
    ]
    head = ["runs", "run", "card", "on the GPU", "needed (up to), GiB", "verdict, of GiB", "why"]
    return [*lines, *as_markdown(head, "llllrrl", table)]


def _counted(rows: Sequence[Judged]) -> list[int]:
    counts = Counter(one.said.verdict for one in rows)
    return [counts[said] for said in SAID]


def _beside_peers(found: Sequence[Judged]) -> list[str]:
    """Tabulate the same runs by each tool, without an answer where the tool gives none or is not asked."""
    said: dict[str, dict[str, str]] = {"vramprobe predict": {key(one.run): one.said.verdict for one in found}}
    for row in read_csv(PEERS):
        said.setdefault(f"{row['peer']} {row['version']}", {})[row["run"]] = row["verdict"]
    for formula in FORMULAS:
        if formula.name in _TOOLS:
            said[f"{formula.name}, its formula"] = {key(one.run): _by_formula(formula, one.run) for one in found}
    lines = []
    for tool, verdicts in said.items():
        line: list[object] = [tool]
        for ran in (True, False):
            words = [verdicts.get(key(one.run), "") for one in found if one.run.ran == ran]
            line += [*(words.count(one) for one in SAID), words.count("")]
        lines.append(line)
    head = ["tool"]
    for ran, word in ((True, "ran"), (False, "ran out")):
        number = sum(one.run.ran == ran for one in found)
        head += [f"{number} {word}: {SAID[0]}", *SAID[1:], "no answer"]
    return as_markdown(head, "lrrrrrrrr", lines)


def key(run: PublishedRun) -> str:
    """The run's name in published_verdicts.csv."""
    return f"{run.name} on {run.gpu.short_name}, {'ran' if run.ran else 'ran out'}"


def _by_formula(formula: Formula, run: PublishedRun) -> str:
    try:
        found = formula.apply(facts_of(run.spec))
    except (UnsupportedArchitecture, VramprobeError):
        return ""
    if not isinstance(found, FormulaEstimate) or run.gpu.total_bytes is None:
        return ""
    return "fits" if found.allocated_bytes <= run.gpu.total_bytes else "does not fit"


def ask_peer(name: str, python: str, cells: list[tuple[CellSpec, Gpu]]) -> tuple[str, list[dict[str, Any]]]:
    """(version, one estimate for each cell on its card) of a peer in its own environment."""
    asked = [
        {
            "architecture": spec.architecture,
            "num_params": architecture(spec.architecture).num_params,
            "spec": spec.model_dump(mode="json", exclude={"architecture"}),
            "gpu_bytes": gpu.total_bytes,
            "gpu": gpu.short_name,
        }
        for spec, gpu in cells
    ]
    done = subprocess.run([python, ESTIMATE, name], input=json.dumps(asked), capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["version"], answer["estimates"]


def ask(peers: dict[str, str], runs: Sequence[PublishedRun]) -> str:
    """The CSV of what these peers say now, and of what the others said."""
    once = [run for run in runs if not run.is_again]
    single = [run for run in once if run.spec.num_gpus == 1]  # no peer is told of several GPUs
    rows = [row for row in read_csv(PEERS) if row["peer"] not in peers]
    for name, python in peers.items():
        version, answers = ask_peer(name, python, [(run.spec, run.gpu) for run in single])
        for run, said in zip(single, answers, strict=True):
            row = {"peer": name, "version": version, "run": key(run), "verdict": said.get("verdict", "")}
            rows.append(row | {"total_bytes": said.get("total_bytes", ""), "why": said.get("why", "")})
    return as_csv(rows)


def main() -> None:
    from benchmarks.truth.oom import published_runs

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--check", action="store_true", help="exit with 1 where the CSV has other runs than today's")
    options = parser.parse_args()
    runs = [*published_runs(), *runs_of_others()]
    if options.check:
        asked = {key(run) for run in runs if not run.is_again and run.spec.num_gpus == 1}
        sys.exit(f"stale: {PEERS.name}" if {row["run"] for row in read_csv(PEERS)} != asked else 0)
    PEERS.write_text(ask(dict(one.split("=", 1) for one in options.peer), runs), encoding="utf-8")


if __name__ == "__main__":
    main()
