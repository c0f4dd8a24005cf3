"""Programs of users' trials, verbatim in ``inputs/``, each with its right answer, through the command."""

import re
from pathlib import Path

from grids import exhaustive
from run_command import require_emulation
from run_verb import Left, Verb

INPUTS = Path(__file__).parent / "inputs"
ONE_RANK = ("--only-rank", "7", "--world-size", "8")


def left_by(
    folder: Path, name: str, *words: str, gpu: str = "A100-80GB-SXM x1", ranks: int = 0, options: tuple[str, ...] = ()
) -> Left:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks else []
    command = [str(require_emulation()), *launcher, str(INPUTS / name), *words]
    folder.mkdir(exist_ok=True)
    left = Verb(folder, command, "--emulate", gpu, *options).left(240)
    assert left.running == []
    return left


def flat(left: Left) -> str:
    return " ".join(left.out.split())


def test_a_flag_that_an_absent_rank_would_send_is_said_and_no_result(tmp_path: Path) -> None:
    options = (*ONE_RANK, "--max-allocated", "10GiB")
    left = left_by(tmp_path, "broadcast_flag.py", ranks=8, options=options)
    assert left.status == 1
    assert "no training step was seen" in flat(left)
    assert "broadcast_flag.py:8 reads what rank 0 would have broadcast" in flat(left)
    assert "what training allocates is not known" in left.err


#: MiB after each of five rounds: a future's wait keeps the last call's tensors, a work's keeps none.
KEPT = {"future": [43] * 5, "work": [31] * 5}


@exhaustive
def test_what_collectives_keep(tmp_path: Path) -> None:
    """On a machine that is as busy as the other tests make it: tests/emulate/test_pace.py has busy loops beside it."""
    left = left_by(tmp_path, "collectives.py", gpu="H100-SXM x2", ranks=2, options=("--whole",))
    found = dict(re.findall(r"^COLL (.+): (\[.+\])$", left.out, re.MULTILINE))
    assert len(found) == 13
    assert found == {name: str(KEPT["future" if "get_future" in name else "work"]) for name in found}


@exhaustive
def test_a_loop_of_futures_is_as_large_in_every_step(tmp_path: Path) -> None:
    left = left_by(tmp_path, "futures_loop.py", gpu="H100-SXM x2", ranks=2, options=("--whole",))
    found = re.findall(r"^step \d (\d+) MiB (\d+)$", left.out, re.MULTILINE)
    assert found == [("464", "464")] + 5 * [("464", "576")]


@exhaustive
def test_27_operators_run_and_no_signal_ends_one(tmp_path: Path) -> None:
    left = left_by(tmp_path, "operators.py")
    found = dict(re.findall(r"^OP (\w+): (.+)$", left.out, re.MULTILINE))
    assert len(found) == 27
    assert set(found.values()) == {"ok"}
