"""One rank of a world that runs alone, against the same rank among all of them: the same bytes, and nobody waits."""

import json
from pathlib import Path

import pytest
from grids import exhaustive, grid
from run_command import require_emulation
from run_verb import Left, Verb

from vramprobe.emulate.values import one_rank
from vramprobe.errors import SpecError
from vramprobe.profile.command import _one_rank, profiled

TRAINING = str(Path(__file__).with_name("ranks_training.py"))
LAUNCHER = ["-m", "torch.distributed.run", "--nproc-per-node"]
KINDS = ["fsdp2", "fsdp1", "ddp"]


def left_by(folder: Path, words: list[str], *options: str, cards: int = 1) -> Left:
    folder.mkdir()
    options = ("--emulate", f"H100-SXM x{cards}", "--whole", "--folder", str(folder / "run"), *options)
    return Verb(folder, [str(require_emulation()), *words], *options).left(240)


def alone(folder: Path, rank: int, num_ranks: int, *words: str) -> Left:
    return left_by(folder, [*words], "--only-rank", str(rank), "--world-size", str(num_ranks))


def phases(folder: Path) -> dict[int, list[dict[str, object]]]:
    """By rank what the allocator counted, phase by phase, and what each step asked of NCCL.

    In loading they talk in objects, which are answered without it to a rank that is alone.
    """
    found = {}
    for path in (folder / "run").glob("*.jsonl"):
        process, *lines = map(json.loads, path.read_text().splitlines())
        found[process["rank"]] = [
            {
                name: value
                for name, value in line.items()
                if name in ("name", "step", "micro_step", "phase", "counts") or "peak" in name or "end_b" in name
            }
            for line in lines
            if line["line"] == "phase" or (line["line"] == "moved" and line["step"] is not None)
        ]
    return found


@pytest.mark.parametrize("num_ranks", grid([2, 4], 2))
def test_the_bytes_of_a_rank_among_all(tmp_path: Path, num_ranks: int) -> None:
    left_by(tmp_path / "all", [*LAUNCHER, str(num_ranks), TRAINING, *KINDS], cards=num_ranks).check(0)
    together = phases(tmp_path / "all")
    assert sorted(together) == list(range(num_ranks))
    for rank in (0, num_ranks - 1) if num_ranks > 2 else (1,):
        left = alone(tmp_path / str(rank), rank, num_ranks, TRAINING, *KINDS)
        left.check(0)
        assert f"rank {rank} of {num_ranks} ran alone" in " ".join(left.out.split())
        assert phases(tmp_path / str(rank)) == {rank: together[rank]}


@exhaustive
def test_a_launchers_other_ranks_end_and_a_bound_card_splits_nothing(tmp_path: Path) -> None:
    """The launcher starts two, of which one is rank 62 of 64."""
    left = alone(tmp_path / "one", 62, 64, *LAUNCHER, "2", TRAINING, "bound", "fsdp2")
    left.check(0)
    assert list(phases(tmp_path / "one")) == [62]
    assert "rank 62 kept its own objects where rank 0 would have broadcast" in " ".join(left.out.split())


_BEGUN = """
import os, torch, torch.distributed as dist
def begun(*args, **words):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", **words)
    print("up", dist.get_rank(), os.environ["LOCAL_RANK"], flush=True)
"""
#: As Megatron asks its tensor-parallel rank 0 whether there is something to train on.
_FLAGGED = """
begun()
flag = torch.tensor([dist.get_rank() % 2 == 0], device="cuda")
dist.broadcast(flag, 0)
total = flag.long()
dist.all_reduce(total)
print(total.item() + 1)
own = torch.ones(1, device="cuda")
dist.broadcast(own, dist.get_rank())
assert own.item() == 1
on_host = torch.zeros(1, dtype=torch.long)
dist.broadcast(on_host, 0, group=dist.new_group(backend="gloo"))
if flag.item():
    raise AssertionError("rank 1 has no data of its own")
if total.item(): pass
"""


def test_one_process_of_a_whole_launcher_runs_and_a_flag_of_another_rank_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_BEGUN + _FLAGGED)
    left = alone(tmp_path / "one", 1, 2, *LAUNCHER, "2", str(script))
    left.check(0)
    assert [line for line in left.out.splitlines() if line.startswith("up")] == ["up 1 0"]
    said, lines = " ".join(left.out.split()), script.read_text().splitlines()
    at = {
        part: 1 + next(n for n, line in enumerate(lines) if part in line) for part in ("(flag, 0)", "if flag", "if t")
    }
    assert f"{script.name}:{at['if flag']} reads what rank 0 would have broadcast at" in said
    assert f"{script.name}:{at['(flag, 0)']}, and got this rank's own values instead" in said
    assert f"{script.name}:{at['if t']} reads what all ranks would have added at" in said
    assert said.count("would have added") == 1  # what no branch reads may differ as every rank's own does
    assert said.count("would have broadcast") == 2  # the other lies on the host, where no read is seen
    assert "a tensor of 1 values on the host kept this rank's own" in said


def test_a_group_of_the_host_has_options_of_its_own_under_old_torches(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.8 and older write a group's name and ranks into them, and their stand-in for gloo has none."""
    monkeypatch.setattr("torch._C._distributed_c10d.FakeProcessGroup", type("Fake", (), {"__init__": lambda *_: None}))
    group = one_rank._gloo(object)("store", 0, 2)
    group.options.group_name = "1"
    assert one_rank._gloo(object)("store", 0, 2).options.group_name == "1"


@exhaustive
def test_one_process_of_spawned_ranks_runs(tmp_path: Path) -> None:
    """torch.multiprocessing.spawn tells a rank to its function alone; others have used CUDA before they say theirs."""
    script = tmp_path / "script.py"
    spawned = (
        "def work(rank):\n    torch.zeros(1, device='cuda')\n    begun(rank=rank, world_size=3)\n"
        "if __name__ == '__main__':\n    torch.multiprocessing.spawn(work, nprocs=3)\n"
    )
    script.write_text(_BEGUN + spawned)
    left = alone(tmp_path / "one", 1, 3, str(script))
    left.check(0)
    assert [line for line in left.out.splitlines() if line.startswith("up")] == ["up 1 0"]
    assert "ranks:" not in left.out


def test_what_another_rank_alone_could_say_is_refused(tmp_path: Path) -> None:
    """Once a timeout of gloo's group has been set, as torchtitan does after its first step."""
    script = tmp_path / "script.py"
    script.write_text(
        "import datetime, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=9))\n"
        "dist.distributed_c10d._get_default_store().get('made by rank 0')\n"
    )
    left = alone(tmp_path / "one", 1, 2, str(script))
    left.check(1)
    assert "vramprobe: rank 1 asks for" in left.err


@pytest.mark.parametrize(
    ("rank", "num_ranks", "words", "said"),
    [
        (0, None, [], "--only-rank 0, --world-size –: give both"),
        (4, 4, [], "numbered from 0"),
        (0, 5000, [], "1 to 960 ranks"),
        (0, 64, ["--nnodes", "8"], "other machines"),
        (0, 64, ["--nnodes=8"], "other machines"),
    ],
)
def test_what_is_refused(rank: int, num_ranks: int | None, words: list[str], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        profiled(["torchrun", *words, "x.py"], emulate="H100-SXM", only_rank=rank, world_size=num_ranks)


def test_a_machine_of_eight_gpus_has_eight_ranks() -> None:
    """As ``measure`` reads it."""
    assert _one_rank(["torchrun", "x.py"], "H100-SXM x8", 7, None) == (7, 8)
    assert _one_rank(["torchrun", "x.py"], "H100-SXM x8", 7, 16) == (7, 16)
