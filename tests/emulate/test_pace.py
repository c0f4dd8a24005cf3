"""Memory that collectives keep does not depend on the pace of the emulation: torch's watchdog thread gives it back."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from emulated import require_emulation
from grids import exhaustive

from vramprobe.emulate.enter import entrance_for_command

PROGRAM = Path(__file__).with_name("pace_training.py")
#: Of a step: 16 layers, twice 100 MiB of lists and the 100 MiB of gradients that they were made from. The next step
#: gives them back with its first collective, so they are there in its backward, beside its gradients.
STEPS = [(464, 464)] + 4 * [(464, 576)]
#: 12.5 MiB more than what is left where the work itself is waited for: the last call's alone.
ROUNDS = {"reduce_scatter": 408, "all_gather": 408, "all_reduce": 408}
ROUNDS |= {f"{name}, wait": 395 for name in ROUNDS}


@contextmanager
def busy_loop() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while 1: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def seen(folder: Path, num_busy: int = 0) -> dict[str, list]:
    way = entrance_for_command(require_emulation(), "H100-SXM x2")
    with ExitStack() as stack:
        for _ in range(num_busy):
            stack.enter_context(busy_loop())
        ranks = [
            subprocess.Popen(
                [way.python, PROGRAM, str(folder / "store"), rank],
                env=way.environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in ("0", "1")
        ]
        said = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return ast.literal_eval(said[0].removeprefix("SEEN "))


def check(found: dict[str, list]) -> None:
    assert found.pop("steps") == STEPS
    assert found == {name: [mib] * 4 for name, mib in ROUNDS.items()}


def test_what_futures_keep_is_given_back_by_the_next_step(tmp_path: Path) -> None:
    check(seen(tmp_path))


@exhaustive
@pytest.mark.parametrize("num_busy", [1, 2])
def test_it_is_so_on_a_busy_machine(tmp_path: Path, num_busy: int) -> None:
    check(seen(tmp_path, num_busy))
