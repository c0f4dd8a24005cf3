"""From a card's name to a process that sees it: which interpreter, which driver, which machine, which variables.

In: ``H100-SXM`` or ``RTX-4090 x2``. Out: an Entrance, for exec or subprocess; a verb that is told ``--emulate`` starts
itself anew through it. This process stays what it is: nothing is loaded into it.
"""

import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from vramprobe.emulate import MACHINE_VARIABLE, machine_folder
from vramprobe.errors import SpecError

#: The process that made the machine's folder, and takes it away when it ends.
OWNER_VARIABLE = "VRAMPROBE_EMULATED_BY"
#: The cards that were asked for, in the words of ``--emulate``.
CARDS_VARIABLE = "VRAMPROBE_EMULATED_CARDS"
#: What values that nobody computed are taken for, as JSON (emulate/values/policy.py).
VALUES_VARIABLE = "VRAMPROBE_VALUES_POLICY"
#: The most that an emulated card may have. A recording runs on such a one, so that nothing ends it: what a card holds
#: is the replay's question.
MOST_BYTES = 1 << 40


class Entrance(NamedTuple):
    """An interpreter whose torch is a CUDA build, and the environment in which it sees the emulated machine."""

    python: Path
    environment: dict[str, str]
    machine: Path

    def command(self, *words: str) -> list[str]:
        """This package's command line in there."""
        return [str(self.python), "-m", "vramprobe", *words]


def entrance(
    cards: str,
    *,
    policy: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
    total_bytes: int | None = None,
    python: Path | None = None,
) -> Entrance:
    """A new machine with ``cards``, and how to start a process that sees it.

    ``policy``: what values that nobody computed are taken for (emulate/values/policy.py). ``say`` hears of what takes
    seconds. ``total_bytes``: of each card, in place of its own. ``python``: an interpreter in place of
    :func:`installation_to_use`'s. Raises UnknownName or SpecError for the cards,
    NotEmulatable where no CUDA build of torch is at hand, NoCompiler, BuildError.
    """
    from vramprobe.emulate.values.hook import unwatched

    used, machine, environment = _new_machine(cards, python, policy, say, total_bytes=total_bytes)
    environment = unwatched(environment)
    # This very package, whichever interpreter runs it, and before what the working folder has.
    searched = filter(None, [str(package_home(machine)), environment["PYTHONPATH"]])
    environment |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(searched)}
    # The host only fills adapters; a forked cell's pool of threads made that four times as long.
    environment.setdefault("OMP_NUM_THREADS", "1")
    return Entrance(python=used, environment=environment, machine=machine)


def entrance_for_command(
    python: Path,
    cards: str,
    *,
    policy: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
    also: Iterable[tuple[str, str, str]] = (),
    total_bytes: int | None = None,
) -> Entrance:
    """As :func:`entrance`, for somebody else's command under the interpreter ``python`` and what that starts.

    Each of its processes that imports torch leaves ``values-<pid>.json`` in the machine's folder (values/hook.py). What
    the command imports from is left as it is, but for one folder before all else, with the hooks ``also`` in it
    (values/hook.py, site_folder). Raises NotEmulatable
    for ``python``.
    """
    from vramprobe.emulate.values import hook

    python, machine, environment = _new_machine(cards, python, policy, say, total_bytes=total_bytes)
    searched = [hook.site_folder(machine, also=also), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(searched)
    return Entrance(python=python, environment=environment, machine=machine)


def _new_machine(
    cards: str,
    python: Path | None,
    policy: Mapping[str, Any] | None,
    say: Callable[[str], None],
    *,
    total_bytes: int | None = None,
) -> tuple[Path, Path, dict[str, str]]:
    """An interpreter (None: the one to use), a machine's folder, this process's environment changed so as to see it."""
    from vramprobe.catalog.own import cache_folder
    from vramprobe.emulate.activate import emulated_environment
    from vramprobe.emulate.build import ensure_build
    from vramprobe.emulate.cards import context_bytes, parse_cards
    from vramprobe.emulate.installation import find_installation
    from vramprobe.emulate.machine import MachinePolicy, write_machine

    card, count = parse_cards(cards)
    if total_bytes is not None:
        card = replace(card, total_bytes=total_bytes, nvml_total_bytes=total_bytes)
    installation = installation_to_use() if python is None else find_installation(python)
    build = ensure_build(installation, say)
    folder = _new_folder(cache_folder() / "machines")
    machine = write_machine(folder, [card] * count, MachinePolicy(context_bytes=context_bytes(card)))
    _write_programs(machine, installation.python)
    return (
        installation.python,
        machine,
        emulated_environment(build, machine)
        | {OWNER_VARIABLE: str(os.getpid()), CARDS_VARIABLE: cards, VALUES_VARIABLE: json.dumps(dict(policy or {}))},
    )


def _write_programs(machine: Path, python: Path) -> None:
    """``nvidia-smi`` (nvidia_smi.py, under ``python``), in the folder that processes of the machine find first."""
    from vramprobe.emulate.activate import programs_folder

    folder = programs_folder(machine)
    folder.mkdir()
    program = folder / "nvidia-smi"
    words = shlex.join([str(python), "-I", "-S", str(Path(__file__).with_name("nvidia_smi.py"))])
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
    program.chmod(0o755)


def package_home(machine: Path, package: Path = Path(__file__).parents[1]) -> Path:
    """The folder to search so that another interpreter imports ``package`` (default: this one).

    A checkout, as it is: records name its commit. An environment's site-packages would bring all that is beside it, its
    torch first: instead a folder in ``machine`` with a link to the package alone.
    """
    home = package.parent
    if home.name not in ("site-packages", "dist-packages"):
        return home
    alone = machine / "package"
    alone.mkdir(exist_ok=True)
    (alone / package.name).symlink_to(package)
    return alone


def _new_folder(home: Path) -> Path:
    """A folder for a machine that this process owns; those of processes that were killed go."""
    from vramprobe.emulate.version import cache_errors

    with cache_errors(home):
        home.mkdir(parents=True, exist_ok=True)
        for left in home.iterdir():
            pid = left.name.split("-")[0]
            if pid.isdecimal() and not Path("/proc", pid).exists():
                shutil.rmtree(left, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=home))


def installation_to_use() -> Any:
    """This interpreter's torch where it is a CUDA build, else the environment that was set up for it.

    Raises NotEmulatable, which names the command that sets one up.
    """
    from vramprobe.emulate.environment import find_environment
    from vramprobe.emulate.installation import NotEmulatable, find_installation

    try:
        return find_installation()
    except NotEmulatable:
        ready = find_environment()
        if ready is None:
            raise
        return find_installation(ready)


def enter(cards: str, words: list[str], say: Callable[[str], None], policy: Mapping[str, Any] | None = None) -> None:
    """Become a process that sees ``cards`` and runs this package's command line with ``words``.

    Returns only in that process, which has come here again. Raises what :func:`entrance` does, and SpecError where the
    process sees other emulated cards already.
    """
    if machine_folder() is not None:
        seen = os.environ.get(CARDS_VARIABLE, "machine")
        if seen != cards:
            raise SpecError(
                f"--emulate {cards}: this process sees an emulated {seen} already ({MACHINE_VARIABLE} is set); start "
                "it elsewhere, or drop --emulate to use that one"
            )
        return
    way = entrance(cards, policy=policy, say=say)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(way.python, way.command(*words), way.environment)
    finally:  # reached only where that failed, or a signal came before
        shutil.rmtree(way.machine, ignore_errors=True)


@contextmanager
def leaving() -> Iterator[None]:
    """Afterwards the machine's folder goes, if this process is the one that it was made for."""
    try:
        yield
    finally:
        folder = machine_folder()
        if folder is not None and os.environ.get(OWNER_VARIABLE) == str(os.getpid()):
            shutil.rmtree(folder, ignore_errors=True)
