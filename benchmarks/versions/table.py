"""Memory by version: the journal's runs as a table, a page and a picture.

In: the journal's entries and the stacks in the order of their days. Out: versions.csv, one row for each run and stack,
with the change since the stack before and its cause; versions.md; versions.svg and .png.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import journal
from benchmarks.frameworks.stacks import PINS, fingerprint, pins
from benchmarks.tables import as_csv, as_markdown, filled, read_csv
from benchmarks.versions import picture
from benchmarks.versions.causes import UNEXPLAINED, list_causes, step_of
from benchmarks.versions.runs import CARD, Run, runs
from vramprobe.units import GIB

JUMP_PERCENT = 1.0
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes")
COLUMNS = (
    "run", "model", "num_layers", "method", "trainer", "stack", "day", *PACKAGES, "outcome", "peak_bytes",
    "reserved_bytes", "phase", "since", "change_bytes", "change_percent", "cause", "step_bytes", "error",
)  # fmt: skip
Row = dict[str, Any]
Entry = dict[str, Any]


def rows(entries: list[Entry], stacks: list[str]) -> list[Row]:
    """One for each run under each stack that the journal has, run by run in the order of the days."""
    found, known = [], latest(entries)
    for run in runs():
        before: Row | None = None
        for stack in stacks:
            entry = known.get(key_of(run, fingerprint(stack)))
            if entry is None:
                continue
            row = _row(run, stack, entry, before)
            found.append(row)
            before = row if row["outcome"] == "ok" else before
    return found


def latest(entries: list[Entry]) -> dict[tuple[str, ...], Entry]:
    """The entry that counts of each run under each set of packages, by :func:`key_of`."""
    return journal.latest(entries, "run", "fingerprint", "pins_fingerprint")


def key_of(run: Run, packages: str) -> tuple[str, ...]:
    return run.name, run.fingerprint, packages


def _row(run: Run, stack: str, entry: Entry, before: Row | None) -> Row:
    told = pins(stack)
    row: Row = {
        "run": run.name,
        "model": run.model,
        "num_layers": run.num_layers,
        "method": run.method,
        "trainer": run.trainer,
        "stack": stack,
        "day": day_of(stack),
        **{name: told[name] for name in PACKAGES},
        "outcome": entry["outcome"],
    }
    if entry["outcome"] != "ok":
        return row | {"error": last_error(entry)}
    row |= {name: entry[name] for name in ("peak_bytes", "reserved_bytes", "phase")}
    row["step_bytes"] = max(size for phase, size in entry["phases"].items() if phase != "load")
    if before is None:
        return row
    change = entry["peak_bytes"] - before["peak_bytes"]
    percent = 100 * change / before["peak_bytes"]
    row |= {"since": before["stack"], "change_bytes": change, "change_percent": f"{percent:.2f}"}
    if abs(percent) > JUMP_PERCENT:
        causes = [one.release for one in list_causes() if one.applies(run.name, before["stack"], stack)]
        row["cause"] = "; ".join(causes) or UNEXPLAINED
    return row


def day_of(stack: str) -> str:
    """The day whose newest packages it has."""
    return (PINS / f"{stack}.in").read_text().split("\n", 1)[0].strip("# ").split()[0]


def last_error(entry: Entry) -> str:
    """In one line."""
    found = re.findall(r"^\S*(?:Error|Exception)\b.*$", entry.get("said", ""), re.M)
    return found[-1][:160] if found else "no words of its own"


def files(entries: list[Entry], stacks: list[str], path: Path) -> dict[Path, str | bytes]:
    """The CSV, its page and its picture beside it."""
    found = as_read(rows(entries, stacks))
    made: dict[Path, str | bytes] = {path: as_csv(found, COLUMNS), path.with_suffix(".md"): page(found, entries)}
    return made | {path.with_name(name): content for name, content in picture.files(found).items()}


def as_read(found: Iterable[Row]) -> list[Row]:
    """Rows as read_csv gives them."""
    return [{name: "" if row.get(name) is None else str(row[name]) for name in COLUMNS} for row in found]


def page(found: list[Row], entries: list[Entry]) -> str:
    """The table as a page: peaks, jumps, causes, what does not run, and the stacks."""
    jumps = [row for row in found if row["cause"]]
    stacks = list(dict.fromkeys(row["stack"] for row in sorted(found, key=lambda row: row["day"])))
    recorded = read_csv(Path(__file__).with_name("recorded.csv"))
    return filled(
        Path(__file__).with_name("versions.md"),
        recorded=len(recorded),
        worst=f"{max(abs(float(row['percent'])) for row in recorded):.3f}",
        card=CARD,
        percent=f"{JUMP_PERCENT:g}",
        peaks=_peaks(found, stacks),
        jumps=_jumps(jumps),
        causes=_causes(jumps, entries),
        errors=_errors(found, stacks),
        stacks=_stacks(found, stacks),
    )


def _peaks(found: list[Row], stacks: list[str]) -> list[str]:
    """A line for each run, a column for each stack: GiB."""
    lines = []
    for name in dict.fromkeys(row["run"] for row in found):
        by_stack = {row["stack"]: row for row in found if row["run"] == name}
        lines.append([name, *(_peak(by_stack.get(stack)) for stack in stacks)])
    return as_markdown(["run, GiB allocated", *map(_short, stacks)], "l" + "r" * len(stacks), lines)


def _short(stack: str) -> str:
    return stack.removeprefix("hf-")


def _peak(row: Row | None) -> str:
    """Bold where it has jumped."""
    if row is None:
        return ""
    if row["outcome"] != "ok":
        return row["outcome"]
    size = f"{int(row['peak_bytes']) / GIB:.2f}"
    return f"**{size}**" if row["cause"] else size


def _jumps(jumps: list[Row]) -> list[str]:
    explained = sum(row["cause"] != UNEXPLAINED for row in jumps)
    lines = []
    for row in jumps:
        after = int(row["peak_bytes"])
        sizes = f"{(after - int(row['change_bytes'])) / GIB:.2f} → {after / GIB:.2f}"
        change = f"{float(row['change_percent']):+.1f}"
        lines.append([row["run"], _short(row["since"]), _short(row["stack"]), sizes, change, row["cause"]])
    said = f"{len(jumps)} changes of more than {JUMP_PERCENT:g} %, {explained} with a cause."
    return [said, "", *as_markdown(["run", "from", "to", "GiB", "change, %", "cause"], "lllrrl", lines)]


def _causes(jumps: list[Row], entries: list[Entry]) -> list[str]:
    """Those that some jump has, with what the bisection found."""
    lines = []
    for cause in list_causes():
        if not any(cause.applies(row["run"], row["since"], row["stack"]) for row in jumps):
            continue
        step = step_of(cause, entries)
        told = "no: read"
        if step is not None:
            version, before, after = step
            told = f"{cause.bisected}: {version} {before / GIB:.2f} GiB, then {after / GIB:.2f}"
        lines.append([cause.release, cause.why, cause.source, told])
    return as_markdown(["release", "what changed", "source", "bisected"], "llll", lines)


def _errors(found: list[Row], stacks: list[str]) -> list[str]:
    failed = [row for row in found if row["outcome"] != "ok"]
    made, every = len(found), len(runs()) * len(stacks)
    ended = f"{len(failed)} of them ended otherwise:" if failed else "all ended well."
    counts = {one.name: sum(row["run"] == one.name for row in found) for one in runs()}
    missing = [f"{name} ({len(stacks) - count})" for name, count in counts.items() if count < len(stacks)]
    lines = [f"Not run yet, under so many stacks: {', '.join(missing)}.", ""] if missing else []
    lines += [f"{made} of {every} were run; {ended}"]
    table = [[row["run"], row["stack"], f"{row['outcome']}: {row['error']}"] for row in failed]
    return [*lines, "", *as_markdown(["run", "stack", "ended with"], "lll", table)] if failed else lines


def _stacks(found: list[Row], stacks: list[str]) -> list[str]:
    rows_ = [next(row for row in found if row["stack"] == name) for name in stacks]
    table = [[row["stack"], *(row[package] for package in PACKAGES)] for row in rows_]
    return as_markdown(["stack", *PACKAGES], "l" * (1 + len(PACKAGES)), table)
