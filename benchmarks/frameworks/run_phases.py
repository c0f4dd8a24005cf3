"""Peaks by phase of a run, under FSDP and ZeRO-3: ``python benchmarks/frameworks/run_phases.py --python PYTHON``.

Each command of phases/runs.toml trains a Llama of 134 million parameters (phases/; TRL, LLaMA-Factory, Axolotl and
ms-swift: SmolLM2-135M by its name; torchtune: Llama 3.2 1B) on emulated RTX 4090, two unless the row says otherwise, as
its users start it, and goes once through evaluation, save and what follows. A resumed run reads a checkpoint of two
steps, a merge an adapter, that a command before it has written. PYTHON is the interpreter of an environment with torch,
transformers, accelerate, peft, trl and deepspeed, or, with ``--environment NAME``, of LLaMA-Factory
(runs/llamafactory.txt, with deepspeed), Axolotl (runs/axolotl.txt), ms-swift (4.6.0, with torch 2.11 and deepspeed) or
torchtune (runs/hf.txt). Peaks are allocated bytes of the rank that has the most, *emulated*; none was compared with a
real GPU here. Training: the highest of three steps. Resume: from the first read of the checkpoint to the first step.
Save: a checkpoint and the final model. Host: CPU tensors and pinned memory of all ranks, each at its highest. Rows that
the table has are kept; ``--only NAME`` runs these anew. About 30 s of CPU a run. Launchers of several ranks take port
29500: let no other run have it.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import journal
from benchmarks.tables import as_csv, as_markdown, read_csv, write_or_check

ROOT = Path(__file__).resolve().parents[2]
FILES = Path(__file__).resolve().parent / "phases"
TABLE = FILES.parent / "run_phases.csv"
WORK = ROOT / "out" / "run_phases"
PHASES = ("load", "resume", "training", "evaluation", "save", "load_best", "merge", "after_training")
_EXPECTED = ("was shortened", "no two steps were alike")  # ranks do not wait for steps that repeat
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One entry of runs.toml."""

    name: str
    command: str
    environment: str = "trl"
    num_gpus: int = 2
    before: str = ""

    @property
    def is_empty(self) -> bool:
        """Return True if it names a model and data that are not there (``--empty-weights``)."""
        return self.command.split()[0] in ("trl", "llamafactory-cli", "axolotl", "swift")


RUNS = {one["name"]: Run(**one) for one in tomllib.loads((FILES / "runs.toml").read_text())["run"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="the interpreter of an environment with all libraries")
    kinds = sorted({run.environment for run in RUNS.values()})
    parser.add_argument("--environment", choices=kinds, default="trl", help="which one it is (default: trl)")
    parser.add_argument("--only", metavar="NAME", action="append", help="run these anew")
    parser.add_argument("--check", action="store_true", help="say whether the page is what the CSV says")
    given = parser.parse_args()
    if given.check:
        write_or_check({TABLE.with_suffix(".md"): page(read_csv(TABLE))}, "frameworks/run_phases.py", check=True)
    if given.python is None:
        parser.error("give the interpreter of an environment: --python FOLDER/bin/python")
    for name, run in RUNS.items():
        found = read_csv(TABLE)
        if name not in given.only if given.only else any(row["name"] == name for row in found):
            continue
        if run.environment != given.environment:
            continue
        rows = [*(row for row in found if row["name"] != name), measured(name, run, given.python)]
        rows.sort(key=lambda row: list(RUNS).index(row["name"]))
        TABLE.write_text(as_csv(rows))
        TABLE.with_suffix(".md").write_text(page(read_csv(TABLE)))


def measured(name: str, run: Run, python: Path) -> Row:
    """One command's peaks by phase, bytes."""
    shutil.rmtree(WORK, ignore_errors=True)
    shutil.copytree(FILES, WORK)
    write_rows(WORK / "data")
    if run.before:
        profiled(name, run, run.before, python, "--whole", "--no-speed", "--trace=none")
    record = profiled(name, run, run.command, python)
    by_rank = [{one["name"]: one["allocated_bytes"] for one in rank["run_phases"]} for rank in record["ranks"]]
    highest = {phase: max((one[phase] for one in by_rank if phase in one), default="") for phase in PHASES}
    told = [one.replace(str(Path.home()), "~") for one in record["warnings"]]
    print(name, highest, told, file=sys.stderr, flush=True)
    return {
        "name": name,
        **{f"{phase}_bytes": size for phase, size in highest.items()},
        "ranks_differ": "yes" if any(one != by_rank[0] for one in by_rank) else "no",
        "host_bytes": record["host"]["peak_bytes"],
        "host_phase": record["host"]["peak_phase"],
        "notes": "; ".join(one for one in told if not any(said in one for said in _EXPECTED)),
        "versions": " ".join(f"{key} {value}" for key, value in sorted(record["environment"]["versions"].items())),
        "command": run.command,
        "before": run.before,
    }


def profiled(name: str, run: Run, command: str, python: Path, *options: str) -> dict[str, Any]:
    """Return the record of ``vramprobe profile`` of a command in WORK."""
    environment = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    if run.num_gpus > 1:
        environment |= {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(run.num_gpus)}
    words = ["--emulate", f"RTX-4090 x{run.num_gpus}", *options, *(["--empty-weights"] if run.is_empty else [])]
    record = journal.profiled(words, shlex.split(command), cwd=WORK, environment=environment, quiet=True)
    if record["outcome"]["kind"] != "ok":
        sys.exit(f"{name}: {record['outcome']} of {command}")
    return record


def write_rows(folder: Path) -> None:
    """LLaMA-Factory's data set: rows that are all longer than its limit."""
    folder.mkdir()
    row = {
        "instruction": "Say the alphabet as often as it fits.",
        "input": "",
        "output": "abcdefghijklmnopqrstuvwxyz " * 200,
    }
    (folder / "rows.json").write_text(json.dumps([row] * 256))
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))


def page(found: list[dict[str, str]]) -> str:
    """The table as a page."""
    head = ["run", *(phase.replace("_", " ") for phase in PHASES), "peak of the run", "ranks differ", "host", "notes"]
    shown = []
    for row in found:
        sizes = {phase: int(row[f"{phase}_bytes"]) for phase in PHASES if row.get(f"{phase}_bytes")}
        shown.append(
            [
                row["name"],
                *(f"{sizes[phase] / 2**20:,.1f}" if phase in sizes else "" for phase in PHASES),
                max(sizes, key=lambda phase, sizes=sizes: sizes[phase]),
                row["ranks_differ"],
                f"{int(row['host_bytes']) / 2**20:,.1f} in {row['host_phase']}",
                row["notes"],
            ]
        )
    lines = [
        "# Peaks by phase of a run, under FSDP and ZeRO-3",
        "",
        *(__doc__ or "").split("\n\n", 1)[1].strip().splitlines(),
    ]
    lines += ["", "MiB allocated, of the rank that has the most; host: MiB of all ranks.", ""]
    lines += [*as_markdown(head, "l" + "r" * len(PHASES) + "llll", shown), "", "Commands:", ""]
    lines += [
        f"- {row['name']}: `{row['command']}`" + (f", after `{row['before']}`" if row.get("before") else "")
        for row in found
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
