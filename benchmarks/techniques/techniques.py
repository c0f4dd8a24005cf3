"""What each technique saves: ``python benchmarks/techniques/techniques.py --python ENVIRONMENT/bin/python``.

Runs what the journal lacks (techniques.jsonl), each technique of vramprobe/data/techniques.toml on an
emulated GPU by its own package, then writes techniques.md, techniques.csv, techniques.svg and the table that ships with
the package. Memory is *emulated*, step time *predicted*. A run takes half a minute to two minutes on two cores.
"""

import argparse
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import journal
from benchmarks.techniques.commands import COMBINATIONS
from benchmarks.techniques.runs import attempt, fingerprint
from vramprobe.techniques.registry import KINDS, Technique, bases, of_kind, techniques

JOURNAL = Path(__file__).with_suffix(".jsonl")


def todo() -> list[tuple[str, list[Technique]]]:
    """Every run: each base, each technique by itself, a kind after the other, each combination."""
    by_kind = [[one for one in of_kind(kind) if one.base and not one.left_out] for kind in KINDS]
    alone = [(one.base, [one]) for turn in zip_longest(*by_kind) for one in turn if one is not None]
    several = [(one.base, [techniques()[name] for name in one.techniques]) for one in COMBINATIONS]
    return [*((name, []) for name in bases()), *alone, *several]


def entries() -> dict[str, dict[str, Any]]:
    """The journal's last entry of each run, by fingerprint."""
    return journal.latest(journal.read(JOURNAL, "fingerprint"), "fingerprint")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="the interpreter of an environment with every package")
    parser.add_argument("--only", metavar="TECHNIQUE", action="append", help="run these anew, and no others")
    parser.add_argument("--base", choices=bases(), action="append", help="run what lacks beside these, and no others")
    parser.add_argument("--check", action="store_true", help="say which files are not what the journal says")
    given = parser.parse_args()
    unknown = [name for name in given.only or () if name not in (*techniques(), *bases())]
    if unknown:
        parser.error(f"no technique {', '.join(unknown)}: there are {', '.join(techniques())}")
    if given.python:
        run(given.python, given.only, given.base or list(bases()))
    from benchmarks.techniques import tables

    tables.write(entries(), check=given.check)


def run(python: Path, only: list[str] | None, beside: list[str]) -> None:
    """Run what the journal lacks beside these bases, or ``only`` these techniques."""
    done = entries()
    for base, several in todo():
        names = [one.id for one in several] or [base]
        mark = fingerprint(bases()[base], several)
        is_wanted = mark not in done if only is None else bool(set(names) & set(only))
        if not is_wanted or base not in beside:
            continue
        print(f"{base}: {' + '.join(names)}", file=sys.stderr, flush=True)
        entry = attempt(bases()[base], several, python)
        journal.append(JOURNAL, entry)
        said = entry["outcome"] if entry["outcome"] != "ok" else f"{entry['peak']['allocated_bytes'] / 2**30:.2f} GiB"
        print(f"  {said}, {entry['seconds']} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
