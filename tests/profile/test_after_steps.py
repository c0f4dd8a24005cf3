"""Phases outside the steps: evaluation, save, merge and the like are named, and no file of the user is overwritten."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from profile_factory import analysed, training
from run_command import lines, told
from run_verb import ROWS, profile_of

from vramprobe.cli import display_profile
from vramprobe.profile.hook import discard, holes
from vramprobe.profile.hook.after_steps import AfterSteps
from vramprobe.profile.hook.phases import Phases
from vramprobe.profile.launch import _was_stopped
from vramprobe.units import MIB

torch = pytest.importorskip("torch")


class Cards:
    """One card, whose peak since the last take is what a test says."""

    def __init__(self) -> None:
        self.peak = 0

    def cards(self) -> list[int]:
        return [0]

    def take(self, device: int) -> dict[str, int]:
        peak, self.peak = self.peak, 0
        return {"num_alloc_retries": 0, "num_ooms": 0, "allocated_peak_bytes": peak, "allocated_end_bytes": 0}


class Lines(list):
    def write(self, line: str, **fields: object) -> None:
        self.append((line, fields.get("name"), fields.get("step"), fields.get("allocated_peak_bytes")))


@pytest.fixture
def phases() -> tuple[Phases, Cards, Lines]:
    cards, said = Cards(), Lines()
    return Phases(said, cards, lambda device: 0), cards, said


def step(watched: Phases) -> None:
    for name in ("forward", "backward", "optimizer_step"):
        watched.mark(name)
    watched.stepped()
    watched.mark("other")


def test_what_happens_in_a_scope_is_one_phase_of_no_step(phases: tuple[Phases, Cards, Lines]) -> None:
    watched, cards, said = phases
    watched.mark("forward")
    watched.mark("backward")
    watched.mark("other")
    with watched.scope("evaluation"):
        cards.peak = 7
        watched.mark("forward")  # of its model
        with watched.scope("save"):  # the outermost names it
            watched.mark("other")
        assert watched.step is None
    assert watched.step == 1
    watched.close()
    assert [one for one in said if one[2] is None] == [("phase", "load", None, 0), ("phase", "evaluation", None, 7)]
    assert [one[1] for one in said] == ["load", "forward", "backward", "other", "evaluation", "other"]


def test_a_rollout_is_of_the_step_that_it_begins(phases: tuple[Phases, Cards, Lines]) -> None:
    watched, cards, said = phases
    for _ in range(2):
        with watched.scope("generation", is_of_step=True):
            cards.peak = 7
            watched.mark("evaluation")  # of its model
        step(watched)
    watched.close()
    assert [one[1:3] for one in said if one[1] == "generation"] == [("generation", None), ("generation", 2)]
    assert [one[2] for one in said if one[0] == "step"] == [1, 2]


def test_after_the_steps_none_is_counted(phases: tuple[Phases, Cards, Lines]) -> None:
    watched, _, said = phases
    for _ in range(2):
        step(watched)
    watched.count_no_more()
    watched.training_ended()
    watched.mark("generation")
    watched.close()
    assert [one for one in said if one[0] == "step"] == [("step", None, 1, None)]
    assert said[-1][:3] == ("phase", "generation", None)


def test_a_resume_that_steps_the_optimizer_makes_no_step(phases: tuple[Phases, Cards, Lines]) -> None:
    """torch.distributed's state dicts step it once, without gradients, so that it has a state to load into."""
    watched, _, said = phases
    with watched.scope("resume"):
        watched.mark("optimizer_step")
        watched.stepped()
    step(watched)
    watched.close()
    assert [one for one in said if one[0] == "step"] == [("step", None, 1, None)]


def test_a_scope_ends_with_the_error_within(phases: tuple[Phases, Cards, Lines]) -> None:
    watched, cards, said = phases

    def evaluate() -> None:
        with watched.scope("evaluation"):
            cards.peak = 9
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        evaluate()
    assert said[-1] == ("phase", "evaluation", None, 9)
    assert watched.name == "load"


def test_the_phases_of_a_run_and_its_peak_are_shown(tmp_path: Path, printed) -> None:
    script = training()
    with script.phase("evaluation"):
        script.alloc(0xF000000, 64 * MIB)
        script.free(0xF000000)
    with script.phase("other"):
        pass
    script.say("evaluation", num_batches=4, num_batches_of=10, grown_bytes=MIB, peak_bytes=80 * MIB)
    script.say("end", why="exit", after_steps=True)
    record = analysed(tmp_path, script, stopped=True)
    (rank,) = record.ranks
    highest = {one.name: one.allocated_bytes for one in rank.run_phases}
    assert list(highest) == ["load", "training", "evaluation", "after_training"]
    of_steps = [one.allocated_bytes for one in rank.phases if one.name not in ("load", "evaluation")]
    assert highest["training"] == max(of_steps)
    assert highest["evaluation"] == rank.peak.allocated_bytes > highest["training"]
    assert [one for one in record.warnings if "all 10 of this length would take 86.00 MiB (predicted from 4)" in one]
    shown = printed(record)
    assert "peak of the run: evaluation, " in shown
    assert "above training's" in shown


def test_the_rank_that_has_the_most_in_a_phase_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, (saved, loads) in enumerate([(200, True), (300, False)]):
        script = training(pid=100 + rank, rank=rank, world_size=2)
        with script.phase("save"):
            script.alloc(0xF000000, saved * MIB)
            script.free(0xF000000)
        if loads:
            with script.phase("load_best"):
                pass
        script.write(tmp_path)
    display_profile.print_profile(analysed(tmp_path))
    out = capsys.readouterr().out
    shown = {line.split()[0]: line.split() for line in out[out.index("phases of the run") :].splitlines()[1:5]}
    assert shown["save"][5:] == ["rank", "1;", "rank", "0", shown["save"][-2], "MiB"]
    assert float(shown["save"][1]) - float(shown["save"][-2]) == pytest.approx(100, abs=0.01)
    assert " ".join(shown["load_best"][5:]) == "rank 0; 1 of 2 had no such phase"
    assert shown["training"][5:] == []


def test_what_outlives_the_phase_that_ran_out_is_not_the_peak(tmp_path: Path, printed) -> None:
    script = training()
    with script.phase("other"):
        pass
    with script.phase("evaluation"):
        script.alloc(0xF000000, 64 * MIB)
    with script.phase("other"):  # the error holds it
        pass
    assert "peak of the run: evaluation, " in printed(analysed(tmp_path, script))


def test_a_run_of_steps_alone_has_no_phases_of_a_run(tmp_path: Path) -> None:
    assert analysed(tmp_path, training()).ranks[0].run_phases == []


@pytest.mark.parametrize(
    ("ends", "stopped"),
    [
        ([{"why": "exit", "after_steps": True}], True),
        ([{"why": "exit", "after_steps": True}, {"why": "error", "after_steps": True}], False),  # out of memory
        ([{"why": "exit"}], False),
        ([{"why": "stopped", "ended_ns": 1}, {"why": "error", "ended_ns": 2}], True),
    ],
)
def test_a_run_that_goes_on_after_its_steps_was_stopped_unless_one_ran_out(ends: list[dict], stopped: bool) -> None:
    assert _was_stopped(ends) is stopped


def test_a_trainer_says_once_how_long_its_training_is() -> None:
    said: list[tuple[str, dict]] = []
    after = AfterSteps.__new__(AfterSteps)
    after._is_length_told = False
    after._watches = [SimpleNamespace(line=lambda kind, **fields: said.append((kind, fields)))]
    args = SimpleNamespace(max_steps=-1, num_train_epochs=3.0, gradient_accumulation_steps=4, world_size=2)
    for _ in range(2):
        after._say_how_long(args, SimpleNamespace(max_steps=300), range(400))
    expected = {"num_steps": 300, "are_given": False, "num_epochs": 3.0, "num_batches": 400, "grad_accum": 4}
    settings = {name: str(value) for name, value in vars(args).items()}
    assert said == [("trainer", expected | {"world_size": 2}), ("settings", {"settings": settings})]
    after._is_length_told = False
    after._say_how_long(args, SimpleNamespace(max_steps=300), iter(()))
    assert [words["num_batches"] for kind, words in said if kind == "trainer"][1:] == [None]  # a stream


def test_a_file_of_holes_is_read_as_zeros_and_takes_no_disk(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {"a": torch.ones(1024, 1024, dtype=torch.bfloat16), "b": torch.ones(3, dtype=torch.int64)}
    described = {name: holes.described(one) for name, one in tensors.items()}
    holes.write_holes(tmp_path / "model.safetensors", described, {"format": "pt"})
    found = safetensors.load_file(tmp_path / "model.safetensors")
    assert {name: (one.shape, one.dtype) for name, one in found.items()} == {
        name: (one.shape, one.dtype) for name, one in tensors.items()
    }
    assert not found["a"].any()
    assert (tmp_path / "model.safetensors").stat().st_blocks * 512 < 64 * 1024


def test_what_is_saved_after_the_steps_goes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "addaudithook", lambda heard: None)
    after = discard.Discard(str(tmp_path / "run"), print, print)
    assert after.path("out/model") == "out/model"
    after.begin()
    assert after.path("out/model") == f"{tmp_path}/run/discarded{os.getcwd()}/out/model"
    assert after.path(after.path("out/model")) == after.path("out/model")
    after._torch_save(torch.save, {"state": torch.ones(1 << 20)}, tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()
    kept = Path(after.path(tmp_path / "model.pt"))
    assert torch.load(kept)["state"].shape == (1 << 20,)
    assert kept.stat().st_blocks * 512 < 64 * 1024


def test_a_checkpointer_finds_the_size_of_what_went_elsewhere(tmp_path: Path, monkeypatch) -> None:
    """torchtune's asks for it at the path that it has made itself."""
    monkeypatch.setattr(sys, "addaudithook", lambda heard: None)
    monkeypatch.setattr(torch, "save", torch.save)  # undone at the end

    class FullModelHFCheckpointer:
        def __init__(self) -> None:
            self._output_dir = tmp_path / "mine"

        def save_checkpoint(self, state: dict) -> int:
            path = self._output_dir / "epoch_0" / "model.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, path)
            return path.stat().st_size

    module = SimpleNamespace(FullModelHFCheckpointer=FullModelHFCheckpointer)
    modules = {"torch": torch, "torchtune.training.checkpointing._checkpointer": module}
    after = discard.Discard(str(tmp_path / "run"), print, print)
    after.install(lambda name, act: act(modules[name]) if name in modules else None)
    after.begin()
    assert FullModelHFCheckpointer().save_checkpoint({"weight": torch.ones(1 << 20)}) > 4 << 20
    assert not (tmp_path / "mine").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_is_of_holes_and_goes_elsewhere(tmp_path: Path, monkeypatch) -> None:
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    monkeypatch.setattr(sys, "addaudithook", lambda heard: None)
    for owner, name in (
        (torch, "save"),
        (checkpoint.filesystem._FileSystemWriter, "__init__"),
        (checkpoint.FileSystemReader, "__init__"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # undone at the end
    after = discard.Discard(str(tmp_path / "run"), print, print)
    modules = {"torch": torch, "torch.distributed.checkpoint.filesystem": checkpoint.filesystem}
    after.install(lambda name, act: act(modules[name]) if name in modules else None)
    after.begin()
    state = {"large": torch.ones(1 << 20), "small": torch.arange(3)}
    checkpoint.save(state, storage_writer=checkpoint.FileSystemWriter(tmp_path / "mine"), no_dist=True)
    assert not (tmp_path / "mine").exists()
    files = list(Path(after.path(tmp_path / "mine")).glob("*.distcp"))
    assert sum(one.stat().st_size for one in files) > 4 << 20
    assert sum(one.stat().st_blocks * 512 for one in files) < 64 * 1024
    checkpoint.load(state, storage_reader=checkpoint.FileSystemReader(tmp_path / "mine"), no_dist=True)
    assert not state["large"].any()
    assert state["small"].tolist() == [0, 1, 2]


#: What a program does to files that were there: is it heard before?
DAMAGE = {
    "open('mine', 'w')": True,
    "open('mine', 'a')": False,
    "open('new', 'w')": False,
    "os.remove('mine')": True,
    "os.replace('new_one', 'mine')": True,
    "shutil.rmtree('folder')": True,
    "open('discarded_here', 'w').close(); os.remove('discarded_here')": False,
}


@pytest.mark.parametrize("act", DAMAGE)
def test_an_older_file_is_not_lost(act: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("mine", "folder/mine"):
        (tmp_path / name).write_text("kept")
    time.sleep(0.1)
    script = (
        "import os, shutil, sys\nfrom vramprobe.emulate import values\nsys.modules['vramprobe_values'] = values\n"
        "from vramprobe.profile.hook import discard\n"
        "def heard(path): raise SystemExit(9)\n"
        f"discard.Discard({str(tmp_path / 'run')!r}, print, heard).begin()\n"
        f"open('new_one', 'w').close()\n{act}\n"
    )
    environment = os.environ | {"HOME": "/nowhere"}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == (9 if DAMAGE[act] else 0), done.stderr.decode()
    kept = "kept" if DAMAGE[act] else (tmp_path / "mine").read_text()
    assert (tmp_path / "mine").read_text() == (tmp_path / "folder" / "mine").read_text() == kept


SCRIPT = """
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=4096)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, task_type="CAUSAL_LM"))
arguments = TrainingArguments("out", per_device_train_batch_size=2, per_device_eval_batch_size=8, max_steps=900,
    eval_strategy="steps", eval_steps=300, save_steps=300, load_best_model_at_end=True, save_total_limit=1,
    report_to="none", disable_tqdm=True)
trainer = Trainer(model, arguments, collate, Rows(4000), Rows(100), compute_metrics=lambda found: {"n": 1})
trainer.train()
merged = trainer.model.merge_and_unload()
merged.save_pretrained("mine")
LlamaForCausalLM.from_pretrained("mine").cuda().generate(torch.ones(1, 4, dtype=torch.long, device="cuda"),
    max_new_tokens=4)
with open("mine/config.json", "w") as file:
    file.write("lost")
print("not reached")
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps_only", [False, True])
def test_a_trainer_goes_through_its_phases_and_writes_nothing(steps_only: bool, tmp_path: Path) -> None:
    work = tmp_path / "work"
    for folder in ("out/checkpoint-1", "mine"):
        (work / folder).mkdir(parents=True)
        (work / folder / "config.json").write_text("kept")
    options = ["--folder", str(tmp_path / "run"), *(["--steps-only"] if steps_only else [])]
    left, record = profile_of(tmp_path, ROWS + SCRIPT, *options)
    assert left.stray == []
    assert "not reached" not in left.out
    assert (work / "mine" / "config.json").read_text() == "kept"
    (rank,) = record["ranks"]
    assert (rank["num_steps"], record["outcome"]["stopped"]) == (3, True)
    highest = {one["name"]: one["allocated_bytes"] for one in rank["run_phases"]}
    if steps_only:
        assert highest == {}
        return
    expected = {"load", "training", "evaluation", "save", "load_best", "merge", "generation", "after_training"}
    assert set(highest) == expected
    assert rank["peak"]["phase"] == "evaluation"
    # 4 of 13 batches of 8 rows; the first has the longest row, whose float32 logits and their copies are the largest
    assert highest["evaluation"] > 2 * 8 * 256 * 4096 * 4
    assert any("shortened to 4 of 13 batches" in one for one in record["warnings"])
    assert any("ended before" in one and "mine/config.json was overwritten" in one for one in record["warnings"])
    assert told(tmp_path)["stopped"]
    (trainer,) = lines(tmp_path, "trainer")
    assert (trainer["num_steps"], trainer["are_given"], trainer["num_batches"]) == (900, True, 2000)
    assert not (tmp_path / "run" / "discarded").exists()
    assert {one["phase"] if one["line"] == "oom" else None for one in lines(tmp_path)} == {None}
