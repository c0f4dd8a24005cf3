"""26 runs under the libraries of nine days: ``python benchmarks/versions/versions.py``.

Each run (runs.py) under each ``hf-*`` stack (stacks.py), unmodified, by ``vramprobe profile`` on an emulated
card, on empty checkpoints. What the journal (versions.jsonl) has is not run again; interrupted, it goes on where it
was. Then it writes versions.csv, the page versions.md and the picture versions.svg. ``--run "qwen2.5-0.5b lora *"``
and ``--stack hf-2025-06`` run these alone; ``--table`` runs none; ``--check`` says whether the table is what the
journal says. The journal also has the runs by which releases were found: a stack with other versions of some packages
(``changed``).
"""

import argparse
import signal
import statistics
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import journal
from benchmarks.frameworks.stacks import environment, fingerprint, home, pins, stacks
from benchmarks.tables import write_or_check
from benchmarks.versions import table
from benchmarks.versions.attempt import attempt
from benchmarks.versions.runs import Run, runs

JOURNAL, TABLE = (Path(__file__).resolve().with_suffix(suffix) for suffix in (".jsonl", ".csv"))
PREFIX = "hf-"


def dated_stacks() -> list[str]:
    """In the order of their days."""
    return [name for name in stacks() if name.startswith(PREFIX)]


def campaign(todo: list[tuple[str, Run]], *, path: Path, uv: str, limit_seconds: float) -> None:
    """Run them one after the other; each is in the journal when the next begins."""
    seconds = []
    for number, (stack, run) in enumerate(todo, start=1):
        python = environment(home() / stack, pins(stack), uv=uv)
        entry = {"stack": stack, **attempt(run, python, pins(stack), limit_seconds=limit_seconds)}
        journal.append(path, entry)
        seconds.append(entry["seconds"])
        left = statistics.mean(seconds) * (len(todo) - number) / 60
        said = f"{entry['peak_bytes']:,} B" if entry["outcome"] == "ok" else entry["outcome"]
        say(
            f"[{number}/{len(todo)}] {stack} {run.name}: {said}  {entry['seconds']:.0f} s  [about {left:.0f} min to go]"
        )


def is_done(stack: str, run: Run, entries: list[journal.Entry], *, errors_too: bool) -> bool:
    """Tell whether the journal has this very run under these very packages; an error counts unless ``errors_too``."""
    entry = table.latest(entries).get(table.key_of(run, fingerprint(stack)))
    return entry is not None and (entry["outcome"] == "ok" or not errors_too)


def current(path: Path) -> list[journal.Entry]:
    """The entries of the runs as they are now, in order."""
    known = {(one.name, one.fingerprint) for one in runs()}
    return [entry for entry in journal.read(path, "run") if (entry["run"], entry["fingerprint"]) in known]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="append", help="only runs of such names; * stands for anything")
    parser.add_argument("--stack", action="append", help="only these stacks")
    parser.add_argument("--errors", action="store_true", help="run again what did not end well")
    parser.add_argument("--limit", type=float, default=900, metavar="SECONDS", help="for one run")
    parser.add_argument("--journal", type=Path, default=JOURNAL)
    parser.add_argument("--uv", default="uv", help="uv's command, for stacks that are not there yet")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--check", action="store_true", help="say whether the table is what the journal says")
    given = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell's background has them ignored
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    if not (given.table or given.check):
        campaign(_asked(given, parser.error), path=given.journal, uv=given.uv, limit_seconds=given.limit)
    if given.journal == JOURNAL:
        made = table.files(current(JOURNAL), dated_stacks(), TABLE)
        write_or_check(made, "versions/versions.py --table", check=given.check)


def _asked(given: argparse.Namespace, refuse: Callable[[str], None]) -> list[tuple[str, Run]]:
    """Return what was asked for and is not in the journal, run by run through the stacks."""
    chosen = [one for one in runs() if not given.run or any(fnmatchcase(one.name, name) for name in given.run)]
    if not chosen:
        refuse(f"no run {', '.join(given.run)}; there are: {', '.join(one.name for one in runs())}")
    _known(given.stack or [], refuse)
    entries = journal.read(given.journal, "run")
    return [
        (stack, run)
        for run in chosen
        for stack in given.stack or dated_stacks()
        if not is_done(stack, run, entries, errors_too=given.errors)
    ]


def _known(names: list[str], refuse: Callable[[str], None]) -> None:
    unknown = sorted(set(names) - set(dated_stacks()))
    if unknown:
        refuse(f"no stack {', '.join(unknown)}; there are: {', '.join(dated_stacks())}")


if __name__ == "__main__":
    main()
