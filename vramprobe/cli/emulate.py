"""``vramprobe emulate``: set up, look at and remove what an emulated GPU needs beside a CUDA build of torch.

In: a version of torch, packages. Out: lines on a terminal, or JSON. The verbs that use the card take ``--emulate GPU``.
"""

import json
import sys
from typing import Annotated, Any

import typer

from vramprobe.cli.options import Json
from vramprobe.emulate.enter import enter
from vramprobe.errors import SpecError, VramprobeError
from vramprobe.rules.sharding import ONE_GPU, SHARD_SIZE, SHARDINGS

app = typer.Typer(
    name="emulate",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Set up the emulated GPU: real CUDA software on a machine that has no GPU.",
)
Torch = Annotated[str | None, typer.Option(help="A version of torch, such as 2.13.0 (default: the pinned one).")]


@app.command()
def setup(
    torch: Torch = None,
    package: Annotated[
        list[str] | None, typer.Option(help="An extra requirement, or a replacement of a pinned one: trl==1.2.0.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Install torch's CUDA build without NVIDIA's packages, and build the stub driver."""
    from vramprobe.emulate.build import ensure_build
    from vramprobe.emulate.environment import set_up_environment
    from vramprobe.emulate.installation import find_installation

    python = set_up_environment(torch, package or (), say)
    build = ensure_build(find_installation(python), say)
    _print({"python": str(python), "driver": str(build.folder)}, json_output)


@app.command()
def status(json_output: Json = False) -> None:
    """Show which torch an emulated GPU would use; exit with 1 if something is missing."""
    from vramprobe.catalog.own import cache_folder
    from vramprobe.emulate.enter import installation_to_use
    from vramprobe.emulate.environment import list_environments
    from vramprobe.emulate.toolchain import find_compiler
    from vramprobe.emulate.version import emulator_version

    found: dict[str, Any] = {"cache": str(cache_folder()), "emulator": emulator_version()}
    found |= {"environments": list_environments(), "missing": None}
    try:
        found["compiler"] = find_compiler().identity
        used = installation_to_use()
        found |= {"python": str(used.python), "torch": used.torch_version}
    except VramprobeError as error:
        found["missing"] = str(error)
    _print(found, json_output)
    raise typer.Exit(0 if found["missing"] is None else 1)


@app.command()
def remove(torch: Torch = None, json_output: Json = False) -> None:
    """Remove an environment that setup made; exit with 1 if there is none."""
    from vramprobe.emulate.environment import list_environments, pinned_torch, remove_environment

    torch = torch or pinned_torch()
    if not remove_environment(torch):
        there = ", ".join(list_environments())
        raise VramprobeError(f"no environment for torch {torch} was set up; there is {there or 'none at all'}")
    _print({"torch": torch, "removed": True}, json_output)


def say(line: str) -> None:
    """One line to whoever waits, beside what is printed."""
    print(f"vramprobe: {line}", file=sys.stderr, flush=True)


def _print(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        if value not in (None, []):
            print(f"{name:12}  {', '.join(value) if isinstance(value, list) else value}")


def num_cards(cell: dict[str, Any]) -> int:
    """The cards that the ranks of a cell see, before it is known whether there can be such a cell."""
    if "only_rank" not in cell:
        return cell.get("num_gpus", 1)
    kind: Any = cell.get("sharding")  # any word
    rules = SHARDINGS.get(kind, ONE_GPU)
    return cell.get("shard_size", SHARD_SIZE) if rules.groups_are_machines else 1


def enter_emulated(cards: str | None, device: str | None, *, num_cards: int = 1) -> None:
    """With ``--emulate``, go on in a process that sees these cards; it comes here again.

    ``num_cards``: where ``cards`` says no number of them.
    """
    if cards is not None:
        if device == "cpu":
            raise SpecError(f"--emulate {cards} is for device cuda, and cpu was given; drop one of them")
        from vramprobe.emulate.cards import with_count

        enter(with_count(cards, max(num_cards, 1)), sys.argv[1:], say)
