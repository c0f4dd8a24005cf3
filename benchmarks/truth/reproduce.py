"""Published runs repeated by their own libraries on an emulated GPU: ``python benchmarks/truth/reproduce.py``.

Runs every row of vramprobe/data/published.csv that has a recipe (reproduction/rows.py) and that the journal
(reproduce.jsonl) has not, the smallest first, one at a time; interrupted, it goes on where it was. Then it writes
reproduce.csv, all published rows with the reason where one is not run, and the page reproduce.md. The stacks
(stacks.py) are set up as they are asked for. ``--line 22`` runs these lines, ``--again`` anew; ``--table`` runs none
and writes the table; ``--check`` says whether the table is what the journal says; ``--rerun 10`` runs ten of the
journal's rows again, of every stack and number of ranks in turn, and says whether each comes out as it did;
``--profile --line 22`` runs the source's own 100 steps under ``vramprobe profile``, which ends them when they repeat.
"""

import argparse
import itertools
import signal
import statistics
import sys
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import journal
from benchmarks.frameworks.stacks import fingerprint
from benchmarks.tables import read_csv
from benchmarks.truth.published_rows import PublishedRow, list_published
from benchmarks.truth.reproduction import table
from benchmarks.truth.reproduction.rows import NUM_STEPS, Recipe, num_params, recipe_of
from benchmarks.truth.reproduction.run import profile, run

JOURNAL, TABLE = (Path(__file__).resolve().with_suffix(suffix) for suffix in (".jsonl", ".csv"))
PUBLISHED_STEPS = 100
Key = tuple[int, str, str]
SPARE_BYTES = 3 << 30  # of this machine's memory, beside what a run's weights take


def recipes(num_steps: int = NUM_STEPS) -> list[Recipe]:
    """Every run that there is, the smallest first."""
    found = [one for row in list_published() if isinstance(one := recipe_of(row, num_steps), Recipe)]
    return sorted(found, key=lambda one: (one.host_bytes > 0, one.num_ranks * num_params(one), one.stack, one.line))


def campaign(todo: list[Recipe], *, path: Path, uv: str, limit_seconds: float) -> None:
    """Run them one after the other; each is in the journal when the next begins."""
    seconds = {entry["line"]: entry["seconds"] for entry in journal.read(path) if "seconds" in entry}
    published = {row.line: row for row in list_published()}
    for number, recipe in enumerate(todo, start=1):
        at = f"[{number}/{len(todo)}] line {recipe.line}"
        if not _has_room(recipe):
            say(f"{at}: left for later, it takes {recipe.host_bytes >> 30} GiB of this machine's memory")
            continue
        try:
            entry = run(recipe, uv=uv, limit_seconds=limit_seconds, say=say)
        except RuntimeError as error:
            entry = {"line": recipe.line, "fingerprint": recipe.fingerprint, "outcome": "error", "said": str(error)}
        journal.append(path, entry)
        seconds[recipe.line] = entry.get("seconds", 0.0)
        left = statistics.mean(seconds.values()) * (len(todo) - number) / 60
        told = _in_words(published[recipe.line], recipe, entry)
        say(f"{at}: {told}  {seconds[recipe.line]:.0f} s  [about {left:.0f} min to go]")


def _in_words(row: PublishedRow, recipe: Recipe, entry: journal.Entry) -> str:
    """Say what was run, and how far off it is."""
    what = f"{recipe.model} {row.method} {row.framework_config} {row.batch_size} × {row.seq_len} on {recipe.num_ranks}"
    if entry["outcome"] != "ok" or row.memory_bytes is None:
        return f"{what}, {recipe.stack}: {entry['outcome']}"
    less = entry["peak_bytes"] - row.memory_bytes
    settled = f" (settled {entry['settled_bytes'] - row.settled_bytes:+,} B)" if row.settled_bytes else ""
    return f"{what}, {recipe.stack}: {100 * less / row.memory_bytes:+.4f} %, {less:+,} B{settled}"


def _has_room(recipe: Recipe, patience_seconds: float = 300) -> bool:
    """Tell whether this machine has the memory, now or soon."""
    until = time.monotonic() + patience_seconds
    while recipe.host_bytes and psutil.virtual_memory().available < recipe.host_bytes + SPARE_BYTES:
        if time.monotonic() > until:
            return False
        time.sleep(10)
    return True


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--line", type=int, action="append", help="only these lines of published.csv")
    parser.add_argument("--stack", action="append", help="only rows of these stacks")
    parser.add_argument("--again", action="store_true", help="run rows anew that the journal has")
    parser.add_argument("--errors", action="store_true", help="run rows again that ended with an error")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="for one row")
    parser.add_argument("--journal", type=Path, help="another than the published one; no table is written then")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--uv", default="uv", help="uv's command, for stacks that are not there yet")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--check", action="store_true", help="say whether the table is what the journal says")
    parser.add_argument("--rerun", type=int, metavar="N", help="run N rows again; exit code 1 where one differs")
    parser.add_argument("--profile", action="store_true", help="run the lines' own commands under vramprobe profile")
    given = parser.parse_args()
    if given.check:
        sys.exit(stale(given.journal or JOURNAL))
    if given.rerun:
        sys.exit(rerun(given.rerun, given.journal or JOURNAL, uv=given.uv, limit_seconds=given.limit))
    if given.profile:
        for recipe in recipes(PUBLISHED_STEPS):
            if recipe.line in (given.line or ()):
                say(profile(recipe, uv=given.uv, say=say))
        return
    if not given.table:
        run_what_is_left(given)
    if given.journal is None:
        table.write(table.rows(current(JOURNAL)), TABLE)


def run_what_is_left(given: argparse.Namespace) -> None:
    """Every row that was asked for and that the journal has not."""
    path = given.journal or JOURNAL
    done = latest(path)
    todo = [
        one
        for one in recipes(given.steps)
        if (not given.line or one.line in given.line)
        and (not given.stack or one.stack in given.stack)
        and (given.again or not _is_done(one, done, given.errors))
    ]
    say(f"{len(todo)} rows to run")
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell's background has them ignored
        signal.signal(number, _interrupted)
    campaign(todo, path=path, uv=given.uv, limit_seconds=given.limit)


def rerun(number: int, path: Path, *, uv: str, limit_seconds: float) -> str | None:
    """Run ``number`` rows again; name those that differ from the journal by a byte or more. None where none does."""
    entries = {line: entry for line, entry in current(path).items() if entry["outcome"] == "ok"}
    differ = []
    for at, recipe in enumerate(chosen := sample(number, entries), start=1):
        fresh, known = run(recipe, uv=uv, limit_seconds=limit_seconds, say=say), entries[recipe.line]
        same = all(fresh.get(key) == known[key] for key in ("peak_bytes", "settled_bytes", "rank_peak_bytes"))
        if not same:
            differ.append(recipe.line)
        what = f"{recipe.model} {recipe.num_ranks} × GPU, {recipe.stack}"
        found = "as it was" if same else f"{fresh['outcome']}: {fresh.get('peak_bytes')}, was {known['peak_bytes']}"
        say(f"[{at}/{len(chosen)}] line {recipe.line}: {what}: {found}  {fresh['seconds']:.0f} s")
    return f"lines {', '.join(map(str, differ))} are not as the journal has them" if differ else None


def sample(number: int, entries: dict[int, journal.Entry]) -> list[Recipe]:
    """Choose the quickest row of each stack and number of ranks, then the next, that this machine has memory for."""
    kinds: dict[tuple[str, int], list[Recipe]] = {}
    for one in sorted(recipes(), key=lambda one: entries.get(one.line, {}).get("seconds", 0.0)):
        if one.line in entries and one.host_bytes < SPARE_BYTES:
            kinds.setdefault((one.stack, one.num_ranks), []).append(one)
    turns = itertools.zip_longest(*(kinds[kind] for kind in sorted(kinds)))
    return [one for turn in turns for one in turn if one is not None][:number]


def current(path: Path) -> dict[int, journal.Entry]:
    """The last entry of each row's recipe as it is now, with the stack's packages as they are now."""
    known = latest(path)
    return {one.line: known[key_of(one)] for one in recipes() if key_of(one) in known}


def latest(path: Path) -> dict[Key, journal.Entry]:
    """The entry that counts of each run under each set of packages, by :func:`key_of`."""
    return journal.latest(journal.read(path), "line", "fingerprint", "stack_fingerprint")


def key_of(recipe: Recipe) -> Key:
    return recipe.line, recipe.fingerprint, fingerprint(recipe.stack)


def stale(path: Path) -> str | None:
    """Say where the table is not as the journal, or the page not as the table, says; none of it is run."""
    found = read_csv(TABLE)
    if TABLE.with_suffix(".md").read_text() != table.page(found):
        return "reproduce.md is not what reproduce.csv says: python benchmarks/truth/reproduce.py --table"
    entries = current(path)
    told = {int(row["line"]): int(row["emulated_bytes"]) for row in found if row["emulated_bytes"]}
    if told != {line: entry["peak_bytes"] for line, entry in entries.items() if entry["outcome"] == "ok"}:
        return "reproduce.csv is not what reproduce.jsonl says: python benchmarks/truth/reproduce.py --table"
    return None


def _interrupted(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _is_done(recipe: Recipe, done: dict[Key, journal.Entry], again: bool) -> bool:
    entry = done.get(key_of(recipe))
    return entry is not None and (entry["outcome"] == "ok" or not again)


if __name__ == "__main__":
    main()
