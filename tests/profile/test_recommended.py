"""Recommend for a command: its steps by its Trainer's arithmetic, hours and dollars by hand, replicas, bad input."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from command_line import vramprobe, within
from profile_factory import COUNT, Script, training, write_launcher

from vramprobe.catalog import find_gpu
from vramprobe.cli import verbs
from vramprobe.errors import SpecError
from vramprobe.profile.recommended import CommandQuestion, recommended
from vramprobe.profile.replicas import ReplicaLauncher, count_on, is_replicated, launcher_of
from vramprobe.profile.run_files import read_run
from vramprobe.profile.run_length import run_length
from vramprobe.recommend.answer import Recommendation
from vramprobe.recommend.options import Limits
from vramprobe.recommend.prices import Offer
from vramprobe.records.traffic import KINDS
from vramprobe.speed.counted import time_of
from vramprobe.units import GIB, MIB

STEP_TOKENS = 4 * 2048
TRAINER = {"num_steps": 300, "are_given": False, "num_epochs": 3, "num_batches": 400, "grad_accum": 4, "world_size": 1}
TODAY = date(2026, 11, 25)
ALL_REDUCE, ALL_GATHER = KINDS.index("all_reduce"), KINDS.index("all_gather")


def offer(gpu: str, num_gpus: int, usd_per_hour: float) -> Offer:
    return Offer(
        provider="a provider", date="2026-11", terms="on-demand", gpu=gpu, num_gpus=num_gpus,
        usd_per_hour=usd_per_hour, source="a test",
    )  # fmt: skip


OFFERS = [
    *(offer("H100-SXM", count, 2.0 * count) for count in (1, 2, 4, 8)),
    offer("L4", 1, 0.1),
    offer("V100-16GB-SXM", 1, 0.1),
]


def run(
    folder: Path,
    *,
    trainer: dict[str, Any] | None = TRAINER,
    replaced: bool = False,
    moved: list[list[int]] | None = None,
    size_bytes: int = 0,
    world_size: int = 1,
    command: tuple[str, ...] = ("python", "train.py"),
    **launcher: Any,
) -> Path:
    folder.mkdir(exist_ok=True)
    where = {"device_name": "NVIDIA H200", "capability": [9, 0], "device_total_bytes": 150 * GIB}
    script = training(extra_bytes=size_bytes, world_size=world_size, rank=0, **where)
    script.say("count", **COUNT | {"moved": moved or []})
    if trainer is not None:
        script.say("trainer", **trainer)
    script.write(folder)
    if replaced:
        (folder / "replaced").write_text('{"kind": "dataset", "what": "org/data", "by": "512 rows"}\n')
    write_launcher(folder, command=list(command), emulate="H200", **launcher)
    return folder


def found(folder: Path, **asked: Any) -> Recommendation:
    limits = Limits(**{name: asked.pop(name) for name in ("deadline_seconds", "budget_usd") if name in asked})
    return recommended(folder, CommandQuestion(limits=limits, **asked), OFFERS, today=TODAY)


def test_hours_are_steps_times_the_counted_seconds_and_dollars_hours_times_the_price(tmp_path: Path) -> None:
    answer = found(run(tmp_path))
    assert (answer.num_steps, answer.tokens) == (300, 300 * STEP_TOKENS)
    by_gpu = {one.gpu: one for one in answer.options}
    assert set(by_gpu) == {"H100-SXM", "L4"}
    seconds = time_of(count_on(COUNT, 1), find_gpu("L4"))
    option = by_gpu["L4"]
    assert option.hours.value == pytest.approx(300 * seconds.seconds / 3600)
    assert option.hours.high == pytest.approx(300 * seconds.high_seconds / 3600)
    assert option.usd.low == pytest.approx(300 * seconds.low_seconds / 3600 * 0.1)
    assert option.setting.tokens_per_second.value == pytest.approx(STEP_TOKENS / seconds.seconds)
    assert [one.option.gpu for one in answer.answers] == ["L4", "H100-SXM"]
    assert any("not judged: V100-16GB-SXM: its kernels differ" in note for note in answer.notes)


def test_a_deadline_picks_the_cheapest_that_ends_in_time(tmp_path: Path) -> None:
    run(tmp_path)
    hours = {one.gpu: one.hours for one in found(tmp_path).options}
    between = 3600 * (hours["H100-SXM"].high + hours["L4"].low) / 2
    assert hours["H100-SXM"].high < hours["L4"].low
    answer = found(tmp_path, deadline_seconds=between, budget_usd=0.001)
    last = answer.answers[-1]
    assert (last.question, last.option.gpu) == ("within the deadline", "H100-SXM")
    assert "more than the budget" in answer.answers[0].doubt


@pytest.mark.parametrize(
    ("asked", "trainer", "expected"),
    [
        ({}, {}, 300),
        ({}, {"are_given": True, "num_steps": 77}, 77),
        ({"steps": 9}, {}, 9),
        ({"tokens": 10 * STEP_TOKENS + 1}, {}, 11),
        ({"epochs": 1}, {}, 100),
        ({"epochs": 0.5}, {"num_steps": 301}, 51),
        ({"epochs": 2}, {"are_given": True}, 200),  # of 400 batches, 4 a step
    ],
)
def test_the_steps_of_a_run_are_the_trainers_or_as_asked(
    asked: dict[str, Any], trainer: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    seen = read_run(run(tmp_path, trainer=TRAINER | trainer))
    assert run_length(seen, 1, STEP_TOKENS, **asked).num_steps == expected


@pytest.mark.parametrize(
    ("asked", "how", "said"),
    [
        ({}, {"trainer": None}, "no transformers Trainer was seen: give --steps or --tokens"),
        ({}, {"replaced": True}, "org/data was replaced by --empty-weights.*give --steps or --tokens"),
        ({"epochs": 2}, {"replaced": True}, "org/data was replaced"),
        ({"epochs": 2}, {"trainer": TRAINER | {"are_given": True, "num_batches": None}}, "a stream: give --steps"),
    ],
)
def test_a_length_that_is_not_known_says_which_option_to_give(
    asked: dict[str, Any], how: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=said):
        run_length(read_run(run(tmp_path, **how)), 1, STEP_TOKENS, **asked)


def test_a_run_is_as_long_as_one_option_says() -> None:
    with pytest.raises(SpecError, match="--steps and --tokens both say"):
        CommandQuestion(limits=Limits(), steps=3, tokens=5)


def test_tokens_of_steps_without_an_embedding_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no embedding was seen: give --steps"):
        run_length(read_run(run(tmp_path)), 1, None, tokens=5)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("python train.py", None),
        ("trl sft --num_processes 4", None),
        ("torchrun train.py", ReplicaLauncher("torchrun", 1)),
        ("/env/bin/torchrun --nproc_per_node=4 train.py", ReplicaLauncher("torchrun", 4)),
        ("torchrun --nproc-per-node gpu train.py", ReplicaLauncher("torchrun", None)),
        (
            "python3.11 -m torch.distributed.run --nproc_per_node 2 train.py",
            ReplicaLauncher("torch.distributed.run", 2),
        ),
        ("accelerate launch train.py", ReplicaLauncher("accelerate", None)),
        ("accelerate launch --num_processes 8 train.py", ReplicaLauncher("accelerate", 8)),
    ],
)
def test_a_launcher_is_known_by_its_name(words: str, expected: ReplicaLauncher | None) -> None:
    assert launcher_of(words.split()) == expected


def two(folder: Path, kind: int, size: int, phase: str = "backward", **more: Any) -> Path:
    """A run of rank 0 of two, which shares so many bytes."""
    run(folder, moved=[[kind, 2, 1, size]], world_size=2, command=("accelerate", "launch", "train.py"), **more)
    path = folder / "100.jsonl"
    text = path.read_text().splitlines()
    said = json.dumps({"line": "moved", "phase": phase, "step": 2, "counts": [[kind, 2, 1, size]]})
    path.write_text("\n".join([*text, said]) + "\n")
    return folder


def test_replicas_share_gradients_alone(tmp_path: Path) -> None:
    def replicated(name: str, *what: Any) -> bool:
        return is_replicated(read_run(two(tmp_path / name, *what)))

    assert replicated("ddp", ALL_REDUCE, GIB)
    assert replicated("counts", ALL_GATHER, 16)  # of the samples of a step
    assert not replicated("fsdp", ALL_GATHER, GIB)
    assert not replicated("tp", ALL_REDUCE, GIB, "forward")


def test_a_ring_of_more_replicas_sends_more(tmp_path: Path) -> None:
    content = COUNT | {"moved": [[ALL_REDUCE, 2, 1, 800]]}
    assert [count_on(content, count).link_bytes for count in (1, 2, 8)] == [
        (),
        (("all_reduce", 800, 2),),
        (("all_reduce", 1400, 8),),
    ]


def test_a_launcher_of_replicas_is_offered_every_number_that_is_rented_out(tmp_path: Path) -> None:
    two(tmp_path, ALL_REDUCE, GIB)
    answer = found(tmp_path, tokens=1600 * STEP_TOKENS)
    steps = {one.num_gpus: one.setting.num_steps for one in answer.options if one.gpu == "H100-SXM"}
    assert steps == {1: 1600, 2: 800, 4: 400, 8: 200}
    assert {one.num_gpus for one in answer.options if one.gpu == "L4"} == {1}  # nobody rents out two
    assert found(tmp_path, steps=10, max_gpus=2).options[0].setting.num_steps == 10
    same = {one.setting.num_steps for one in found(tmp_path, steps=10).options}
    assert same == {10}


def test_ranks_that_share_the_model_are_offered_as_they_ran(tmp_path: Path) -> None:
    answer = found(two(tmp_path, ALL_GATHER, GIB))
    assert {(one.gpu, one.num_gpus) for one in answer.options} == {("H100-SXM", 2)}
    assert any("its memory depends on their number" in note for note in answer.notes)


def test_where_nothing_fits_it_says_what_would(tmp_path: Path) -> None:
    answer = found(run(tmp_path, size_bytes=100 * GIB))
    assert [one.option for one in answer.answers] == [None, None]
    assert all(one.hours is None and one.usd is None for one in answer.options)
    assert any(note.startswith("nothing fits; nearest 1 × H100-SXM") for note in answer.notes)


def test_what_leaves_little_is_tight_and_nccl_takes_its_own(tmp_path: Path) -> None:
    size = int(77.0 * GIB)  # of the 78.68 GiB that an H100 has
    assert {one.setting.verdict.verdict for one in found(run(tmp_path / "one", size_bytes=size)).options} == {
        "does not fit",
        "tight",
    }
    # 73.5 GiB are 93.4 % of an H100, and 95.3 % of what NCCL leaves
    several = found(two(tmp_path / "two", ALL_REDUCE, MIB, size_bytes=int(73.5 * GIB)))
    verdicts = {one.num_gpus: one.setting.verdict.verdict for one in several.options if one.gpu == "H100-SXM"}
    assert (verdicts[1], verdicts[2]) == ("fits", "tight")


def test_without_a_counted_step_it_says_why(tmp_path: Path) -> None:
    def failed(name: str, script: Script, **launcher: Any) -> str:
        folder = tmp_path / name
        folder.mkdir()
        script.write(folder)
        write_launcher(folder, **launcher)
        with pytest.raises(SpecError) as error:
            found(folder)
        return str(error.value)

    assert "no step was counted" in failed("short", training())
    said = failed("error", training(), exit_status=1, tail=["ValueError: no"])
    assert "ended with an error" in said
    assert "ValueError: no" in said
    out = training(device_name="NVIDIA H200", capability=[9, 0])
    out.say("oom", time_ns=out.now_ns + 10**9, requested_bytes=GIB, allocated_bytes=GIB, phase="load")
    assert "runs out of memory on H200" in failed("oom", out, exit_status=1)


def test_the_verb_reads_a_profiles_folder_and_says_that_it_predicts(tmp_path: Path) -> None:
    done = vramprobe("recommend", "--from", str(run(tmp_path)), "--gpu", "L4", "--gpu", "H100-SXM")
    assert done.returncode == 0, done.stderr
    assert "train.py, 300 steps, 2.46M tokens: predicted, not measured" in done.stdout
    assert "1 × L4" in done.stdout
    done = vramprobe("recommend", "--from", str(tmp_path), "--json", "--steps", "5")
    assert Recommendation.model_validate_json(done.stdout).num_steps == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--steps", "3", "--tokens", "5M", "--", "python", "x.py"), "--steps and --tokens both say"),
        (("--from", "nowhere", "--", "python", "x.py"), "not both"),
        (("--from", "nowhere"), "there is no run at nowhere"),
        (("--from", "."), ". holds no run: name the folder"),
        (("--budget", "0", "--", "python", "x.py"), "--budget 0"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = within(verbs.main, ["vramprobe", "recommend", *words], tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in " ".join(done.stderr.split())
