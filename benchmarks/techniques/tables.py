"""The journal of techniques as tables: Markdown, CSV, the table that ships, a picture.

In: the journal's entries by fingerprint. Out: files, written or compared. Runs nothing.
"""

from pathlib import Path
from typing import Any

from benchmarks.tables import as_csv, as_markdown, write_or_check
from benchmarks.techniques.commands import COMBINATIONS, LEFT_OUT
from benchmarks.techniques.runs import fingerprint
from vramprobe.report.plots.techniques import plot
from vramprobe.techniques.matrix import matrix, parts
from vramprobe.techniques.registry import (
    FRAMEWORKS,
    KINDS,
    Technique,
    bases,
    exclusions,
    of_kind,
    remarks_of,
    techniques,
)
from vramprobe.techniques.savings import saving_of
from vramprobe.units import GIB

HERE = Path(__file__).resolve().parent
SHIPPED = HERE.parents[1] / "vramprobe" / "data" / "techniques.csv"
COLUMNS = (
    "technique", "base", "gpu", "package", "outcome", "base_bytes", "peak_bytes", "reserved_bytes", "base_seconds",
    "seconds", "uncounted_share", "host_bytes",
)  # fmt: skip
Entries = dict[str, dict[str, Any]]
Row = dict[str, Any]


def write(entries: Entries, *, check: bool) -> None:
    """Write techniques.md, techniques.csv, techniques.svg and the table that ships."""
    rows = [row for one in techniques().values() if (row := row_of(entries, one.base, [one])) is not None]
    several = [
        row
        for one in COMBINATIONS
        if (row := row_of(entries, one.base, [techniques()[name] for name in one.techniques])) is not None
    ]
    made: dict[Path, str | bytes] = {
        HERE / "techniques.md": page(entries, rows, several),
        HERE / "techniques.csv": as_csv([*rows, *several], COLUMNS),
        SHIPPED: as_csv([*rows, *several], COLUMNS),
    }
    made |= {HERE / name: content for name, content in plot([saving_of(row) for row in rows]).items()}
    write_or_check(made, "techniques/techniques.py", check=check)


def row_of(entries: Entries, base: str, several: list[Technique]) -> Row | None:
    """A run beside its base's; None where it has not run."""
    if not base or any(one.left_out for one in several):
        return None
    own = entries.get(fingerprint(bases()[base], several))
    if own is None:
        return None
    of_base = entries.get(fingerprint(bases()[base], []))
    row: Row = {
        "technique": " + ".join(one.id for one in several),
        "base": base,
        "gpu": own["gpu"],
        "package": ", ".join(f"{one.package} {own['packages'].get(one.package) or '?'}" for one in several),
        "outcome": _outcome(own),
    }
    if own["outcome"] != "ok" or of_base is None or of_base["outcome"] != "ok":
        return row
    return row | {
        "base_bytes": of_base["peak"]["allocated_bytes"],
        "peak_bytes": own["peak"]["allocated_bytes"],
        "reserved_bytes": own["peak"]["reserved_bytes"],
        "base_seconds": _seconds(of_base),
        "seconds": _seconds(own),
        "uncounted_share": own.get("step", {}).get("unclaimed_share", ""),
        "host_bytes": own.get("host", {}).get("training", [""])[0],
    }


def _seconds(entry: dict[str, Any]) -> float | str:
    return round(entry["step"]["seconds"], 4) if entry.get("step") else ""


def peak_of(entries: Entries, base: str) -> int | None:
    """The base's own allocated peak, where it ended well."""
    own = entries.get(fingerprint(bases()[base], []))
    return own["peak"]["allocated_bytes"] if own and own["outcome"] == "ok" else None


def _outcome(entry: dict[str, Any]) -> str:
    why = entry["outcome"]
    if why == "ok":
        return "ok"
    if why["kind"] == "oom":
        return f"out of memory in {why['phase'] or 'load'}"
    if why["last_lines"][-1].startswith("Extension modules"):
        return "error: a fatal signal in native code"
    return f"error: {next((line for line in reversed(why['last_lines']) if 'Error' in line), why['last_lines'][-1])}"


def page(entries: Entries, rows: list[Row], several: list[Row]) -> str:
    """techniques.md."""
    by_id = {row["technique"]: row for row in rows}
    num = sum(row["outcome"] == "ok" for row in rows)
    lines = [
        "# What each technique saves, and what it costs",
        "",
        f"{num} techniques, each run by its own package on an emulated GPU beside the same run without it. Memory",
        "is the allocated peak, *emulated*; step time is *predicted* by counting the step's kernels, and a difference",
        "below 3 % cannot be told. No GPU was measured. `python benchmarks/techniques/techniques.py --check` compares",
        "this page with its [journal](techniques.jsonl).",
        "",
        "![GiB saved against predicted time lost](techniques.svg)",
    ]
    for kind in KINDS:
        for base in dict.fromkeys(one.base for one in of_kind(kind) if one.base):
            lines += _section(
                kind, base, [by_id[one.id] for one in of_kind(kind) if one.base == base and one.id in by_id], entries
            )
    lines += _together(several, entries)
    lines += _matrix()
    lines += _published(by_id)
    lines += ["", "## How each is switched on", ""]
    head = ["technique", "package", "TRL", "Axolotl", "LLaMA-Factory", "torchtune"]
    lines += as_markdown(head, "llllll", [_switches(one) for one in techniques().values()])
    lines += ["", "## What was not run, and why", ""]
    failed = [(row["technique"], row["outcome"]) for row in rows if row["outcome"].startswith("error")]
    why = {one.id: one.left_out for one in techniques().values() if one.left_out}
    why |= {
        one.id: "not run yet" for one in techniques().values() if one.base and not one.left_out and one.id not in by_id
    }
    why |= {name: f"it ended in `{said.removeprefix('error: ')[:200]}`" for name, said in failed}
    found = [
        [techniques()[name].name, techniques()[name].package, said.replace("|", "\\|")] for name, said in why.items()
    ]
    found += [[f"`{name}`", group, said] for group, names in LEFT_OUT.items() for name, said in names.items()]
    return "\n".join([*lines, *as_markdown(["technique", "package", "why"], "lll", found), ""])


def _switches(one: Technique) -> list[str]:
    return [f"[{one.name}]({one.docs})", one.package, *(_code(one.switch(name)) for name in FRAMEWORKS)]


def _section(kind: str, base: str, rows: list[Row], entries: Entries) -> list[str]:
    """One kind beside one base, the largest saving first; out of memory last."""
    shown = [row for row in rows if not row["outcome"].startswith("error")]
    if not shown:
        return []
    of, own = bases()[base], entries.get(fingerprint(bases()[base], []))
    peak = f": {own['peak']['allocated_bytes'] / GIB:.2f} GiB" if own and own["outcome"] == "ok" else ""
    seconds = f", {own['step']['seconds']:.3g} s a step (predicted)" if own and own.get("step") else ""
    shown.sort(key=lambda row: (row["outcome"] != "ok", row.get("peak_bytes", 0)))
    head = ["technique", "package", "peak, GiB", "saved, GiB", "saved, %", "step, predicted", "host, GiB"]
    return [
        "",
        f"## {kind.capitalize()}, beside {of.text}, {of.gpu}{peak}{seconds}",
        "",
        *as_markdown(head, "llrrrrr", [_shown(row) for row in shown]),
        *_remarks(shown),
        *_more_at_first(shown, own, entries),
    ]


def _more_at_first(rows: list[Row], own: dict[str, Any] | None, entries: Entries) -> list[str]:
    """List what holds more than the base before its first step: adapters' decompositions, copies of weights."""
    found = []
    for row in rows:
        entry = entries.get(fingerprint(bases()[row["base"]], [techniques()[row["technique"]]]))
        peak = entry["phases"]["load"][0] if entry and entry["outcome"] == "ok" else 0
        if own and own["outcome"] == "ok" and peak > 1.01 * own["phases"]["load"][0]:
            found.append(f"{techniques()[row['technique']].name} {peak / GIB:.2f}")
    before = own["phases"]["load"][0] / GIB if own and own["outcome"] == "ok" else 0
    return ["", f"Peak before the first step, in GiB (without them {before:.2f}): {', '.join(found)}."] if found else []


def _remarks(rows: list[Row]) -> list[str]:
    found = remarks_of([techniques()[row["technique"]] for row in rows])
    return ["", *(f"- {', '.join(names)}: {remark}." for remark, names in found.items())] if found else []


def _shown(row: Row) -> list[str]:
    names = " + ".join(techniques()[name].name for name in row["technique"].split(" + "))
    if row["outcome"] != "ok":
        return [names, row["package"], row["outcome"], "", "", "", ""]
    saved = row["base_bytes"] - row["peak_bytes"]
    step = "unknown"
    if row["seconds"] != "" and row["base_seconds"] != "":
        step = f"{row['seconds'] / row['base_seconds'] - 1:+.1%}"
        if row["uncounted_share"] and row["uncounted_share"] >= 0.01:
            step += f" ({row['uncounted_share']:.0%} of launches not counted)"
    host = "" if row["host_bytes"] == "" else f"{row['host_bytes'] / GIB:.2f}"
    cells = [f"{row['peak_bytes'] / GIB:.2f}", f"{saved / GIB:.2f}", f"{saved / row['base_bytes']:.1%}"]
    return [names, row["package"], *cells, step, host]


def _together(several: list[Row], entries: Entries) -> list[str]:
    shown = [row for row in several if not row["outcome"].startswith("error")]
    if not shown:
        return []
    head = ["together", "package", "peak, GiB", "saved, GiB", "saved, %", "step, predicted", "host, GiB", "beside"]
    found = [[*_shown(row), f"`{row['base']}`"] for row in shown]
    lines = ["", "## Several together, as far as run", "", *as_markdown(head, "llrrrrrl", found), ""]
    for name in dict.fromkeys(row["base"] for row in shown):
        own = peak_of(entries, name)
        peak = f": {own / GIB:.2f} GiB" if own else ""
        lines.append(f"- `{name}`: {bases()[name].text}, {bases()[name].gpu}{peak}")
    return lines


def _matrix() -> list[str]:
    """Parts by parts, and what is refused; from the table that ships, as ``vramprobe techniques --matrix`` has it."""
    names, cells = parts(), {frozenset((one.part, one.other)): one.short for one in matrix()}
    rows = [[part, *("one" if part == other else cells[frozenset((part, other))] for other in names)] for part in names]
    refused = [[", ".join(one.techniques), ", ".join(one.others), one.why] for one in exclusions()]
    return [
        "",
        "## What combines with what",
        "",
        "Pairs of techniques that ran together, by the part that each takes. One: one at a time. No: every pair is",
        "refused. ·: none ran, which says nothing of whether it works. `vramprobe techniques --matrix` prints it.",
        "",
        *as_markdown(["", *names], "l" + "r" * len(names), rows),
        "",
        *as_markdown(["not", "with", "because"], "lll", refused),
    ]


def _published(rows: dict[str, Row]) -> list[str]:
    """Tabulate what a package's own documentation claims beside what its run gave here."""
    claimed = [one for one in techniques().values() if one.published]
    if not claimed:
        return []
    head = ["technique", "its own documentation says", "here, allocated peak", "why they differ"]
    found = [
        [one.name, f"[{one.published}]({one.published_at})", _here(rows.get(one.id)), one.difference or "unexplained"]
        for one in claimed
    ]
    return ["", "## Published savings beside ours", "", *as_markdown(head, "llll", found)]


def _here(row: Row | None) -> str:
    if row is None or row["outcome"] != "ok":
        return "no number"
    saved = row["base_bytes"] - row["peak_bytes"]
    return f"{saved / GIB:.2f} GiB less, {saved / row['base_bytes']:.1%} ({row['base']}, emulated)"


def _code(words: str) -> str:
    return f"`{words}`".replace("|", "\\|") if words else "–"
