"""``vramprobe merge``, ``contribute`` and ``export``: records of several machines or people in one file.

In: journals. Out: a new one, and who gave what, or what was stripped, as text or JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vramprobe.cli.options import Json, print_json
from vramprobe.units import plural

if TYPE_CHECKING:
    from vramprobe.check.contribute import Contribution
    from vramprobe.check.merge import Merged


def merge(
    sources: Annotated[list[Path], typer.Argument(help="Results folders or .jsonl files, of shards or contributors.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The new .jsonl file.")],
    json_output: Json = False,
) -> None:
    """Join journals into a new one, each attempt once; refuse records that contradict themselves or each other."""
    from vramprobe import api

    merged = api.merge(sources, out)
    if json_output:
        shares = [share._asdict() for share in merged.shares]
        warnings = [finding.model_dump(mode="json") for finding in merged.warnings]
        print_json(merged._asdict() | {"journal": str(merged.journal), "shares": shares, "warnings": warnings})
    else:
        _print_merged(merged)


def contribute(
    results: Annotated[Path, typer.Argument(help="A results folder or .jsonl file.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The new file (default contribution-<hash>.jsonl).")
    ] = None,
    strip: Annotated[list[str] | None, typer.Option(help="Also strip this word, such as a project's name.")] = None,
    json_output: Json = False,
) -> None:
    """Write checked records to one file to send, without what identifies a machine or a person."""
    from vramprobe import api

    made = api.contribute(results, out, strip=strip or ())
    if json_output:
        print_json(made._asdict() | {"file": str(made.file), "report": made.report.model_dump(mode="json")})
    else:
        _print_contribution(made)


def export(
    results: Annotated[Path, typer.Argument(help="A results folder or .jsonl file.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The new .parquet file; with --receipt, a .md or .json file.")
    ] = None,
    receipt: Annotated[
        bool, typer.Option("--receipt", help="Show each record as others publish: bytes, GPU, command, versions, hash.")
    ] = False,
    cell: Annotated[str | None, typer.Option(help="With --receipt: this cell alone, by id or fingerprint.")] = None,
    json_output: Json = False,
) -> None:
    """Write all records to one Parquet file, which `vramprobe.load` and DuckDB read in seconds, or show receipts."""
    from vramprobe import api
    from vramprobe.cli import display

    if receipt:
        _write_receipts(results, out, cell, json_output=json_output)
        return
    if cell is not None:
        raise typer.BadParameter("--cell is read with --receipt only: add it, or drop --cell")
    if out is None:
        raise typer.BadParameter("give the new file (-o records.parquet), or --receipt")
    with display.working("reading records"):
        num_rows = api.export(results, out)
    if json_output:
        print_json({"file": str(out), "records": num_rows})
    else:
        print(f"{num_rows:,} records → {out}")


def _write_receipts(results: Path, out: Path | None, cell: str | None, *, json_output: bool) -> None:
    import json

    from vramprobe import api
    from vramprobe.report.receipt import as_text

    if out is not None and out.suffix not in (".md", ".json"):
        raise typer.BadParameter(f"-o {out}: a receipt is a .md or a .json file")
    found = api.receipts(results, cell)
    if out is None:
        print_json(found) if json_output else print(as_text(found))
        return
    text = json.dumps(found, indent=2) + "\n" if out.suffix == ".json" else as_text(found)
    out.write_text(text, encoding="utf-8")
    said = {"file": str(out), "receipts": len(found)}
    print_json(said) if json_output else print(f"{plural(len(found), 'receipt')} → {out}")


def _print_merged(merged: Merged) -> None:
    from vramprobe.report.formats import terminal

    titles = ("source", "instrument", "device", "torch", "vramprobe", "records", "cells")
    rows = (["?" if value is None else str(value) for value in share] for share in merged.shares)
    terminal.show_whole(titles, rows, left=titles[:5])
    repeated = f"; {merged.num_repeated} stood in several files, kept once" if merged.num_repeated else ""
    print(f"{merged.num_records} records → {merged.journal}{repeated}")
    if merged.warnings:
        print(f"{len(merged.warnings)} warnings; `vramprobe check {merged.journal}` lists them")


def _print_contribution(made: Contribution) -> None:
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(made.report.instruments.items()))
    print(f"{made.num_records} records ({kinds}) → {made.file}")
    for field, count in sorted(made.stripped.items()):
        print(f"  stripped in {count}: {field}")
    warnings = len(made.report.findings)
    if warnings:
        print(f"{warnings} warnings of `vramprobe check`: a reader should know them")
    print("read the file before you send it: what it does not strip is public then")
