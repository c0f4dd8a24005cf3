"""``vramprobe techniques``: what each memory-saving technique saves, what it costs, and how it is switched on.

In: a kind, or a cell and a GPU. Out: the registry with its emulated savings, or a ranking for the cell: text, JSON or a
page.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from vramprobe.cli.emulate import say
from vramprobe.cli.options import Check, Json, flag, print_json, show, takes_a_cell
from vramprobe.options import MEASURED_OPTIONS, RANK_OPTIONS

_NEEDED = ("model", "method", "batch_size", "seq_len")
_KINDS = "weights | training | optimizer | adapter | activations | trainer"


@takes_a_cell(optional=_NEEDED, without=(*RANK_OPTIONS, *MEASURED_OPTIONS, "loop"))
def techniques(
    cell: dict[str, Any],
    gpu: Annotated[str | None, typer.Option(help="A GPU of `vramprobe gpus`, with --model.")] = None,
    kind: Annotated[str | None, typer.Option(help=f"Only techniques of this kind: {_KINDS}.")] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Of a cell: record each technique without a recipe at hand, seconds each.")
    ] = False,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Which techniques combine: what ran together, and what is refused.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the tables, the plot and a page into this folder.")
    ] = None,
    check: Check = False,
    json_output: Json = False,
) -> None:
    """List what each memory-saving technique saves, or rank them for a cell: --model, --method, …, --gpu."""
    from vramprobe.cli import display_techniques

    if out is not None or check:
        if out is None or cell or gpu or kind or matrix:
            raise typer.BadParameter(
                "-o and --check are of all techniques: give -o FOLDER, and nothing else beside it."
            )
        _write(out, check=check, as_json=json_output)
        return
    if matrix:
        if cell or gpu or kind:
            raise typer.BadParameter("--matrix is of all techniques: leave --kind, --gpu and the cell's options out.")
        if json_output:
            print_json(display_techniques.matrix_json())
        else:
            display_techniques.print_matrix()
        return
    from vramprobe import api
    from vramprobe.techniques.savings import TechniqueList

    if gpu is None and not cell:
        found = api.techniques(kind=kind)
        assert isinstance(found, TechniqueList)
        if json_output:
            print_json(display_techniques.as_json(found.listed))
        else:
            display_techniques.print_techniques(found.listed)
        return
    missing = [name for name in _NEEDED if name not in cell]
    flags = [*map(flag, missing), *([] if gpu else ["--gpu"])]
    if gpu is None or missing:
        raise typer.BadParameter(f"a ranking is for one cell on one GPU: give {', '.join(flags)}, too.")
    found = api.techniques(gpu=gpu, kind=kind, records=record, say=say, **cell)
    show(found, display_techniques.print_ranking, as_json=json_output)


def _write(out: Path, *, check: bool, as_json: bool) -> None:
    from vramprobe import api

    written = api.techniques_report(out, check=check)
    if as_json:
        print_json([str(path) for path in written])
    elif check:
        print(f"fresh: {len(written)} files are what the techniques' table gives")
    else:
        print(f"{len(written)} files in {out}; open {out / 'index.html'} in a browser")
