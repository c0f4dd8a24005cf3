"""``vramprobe recipes``: recordings at hand, written to a file for another machine, merged from one.

In: the user's cache, a file of recipes. Out: lines on a terminal, or JSON.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vramprobe.cli.options import Json, print_json
from vramprobe.units import plural

if TYPE_CHECKING:
    from vramprobe.log.shapes import Shape

app = typer.Typer(
    name="recipes",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="List the recordings at hand, write them to a file for another machine, or merge such a file.",
)
Model = Annotated[str | None, typer.Option(help="Of this model alone, by its short name.")]


@app.command("list")
def list_all(model: Model = None, json_output: Json = False) -> None:
    """List the recipes that were recorded here, that were merged, and that ship."""
    from vramprobe import api

    found = api.list_recipes(model)
    if json_output:
        print_json([asdict(one) for one in found])
        return
    for one in found:
        print(f"{one.source:<9} {one.label}  {_shapes(one.shapes)}  {one.libraries}  {one.num_bytes:,} bytes")
    print(f"{plural(len(found), 'recipe')}")


@app.command()
def export(
    out: Annotated[Path, typer.Argument(help="The new file, such as recipes.zip.")],
    model: Model = None,
    json_output: Json = False,
) -> None:
    """Write what was recorded or merged here to one file, for a machine that cannot emulate a GPU."""
    from vramprobe import api

    shared = api.export_recipes(out, model)
    if json_output:
        print_json(asdict(shared) | {"file": str(shared.file)})
        return
    print(f"{plural(shared.num_new, 'recipe')} of {plural(len(shared.labels), 'cell')} in {shared.file}")
    if shared.num_unnamed:
        print(
            f"{plural(shared.num_unnamed, 'older recording')} left out, which do not name their cell: one that is "
            "asked for again does."
        )
    print(f"There: vramprobe recipes merge {shared.file.name}")


@app.command()
def merge(
    file: Annotated[Path, typer.Argument(help="A file that vramprobe recipes export wrote.")], json_output: Json = False
) -> None:
    """Add the recipes of a file to those that this machine answers from where it cannot record."""
    from vramprobe import api

    shared = api.merge_recipes(file)
    if json_output:
        print_json(asdict(shared) | {"file": str(shared.file)})
        return
    print(f"{plural(len(shared.labels), 'cell')}, {plural(shared.num_new, 'new recipe')}, in {shared.file}")


def _shapes(shapes: tuple[Shape, ...]) -> str:
    """Rows and lengths, each once, and the ranks where several were recorded."""
    from vramprobe.log.shapes import has_ranks

    said = dict.fromkeys(f"{rows} x {length:,}" for rows, length, *_ in shapes)
    ranks = sorted({rank for _, _, *of_one in shapes for rank in of_one}) if has_ranks(shapes) else []
    return ", ".join(said) + (f"; rank {', '.join(map(str, ranks))}" if ranks else "")
