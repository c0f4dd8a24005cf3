"""The phases outside the steps: which call of a library is which, and what a resumed training takes."""

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from run_verb import profile_of

from vramprobe.profile.hook import scopes
from vramprobe.profile.ranks import run_phases
from vramprobe.profile.raw import RawPhase


class Names:
    """Names that a watch's phases are told, innermost last."""

    is_outside = False

    def __init__(self) -> None:
        self.entered: list[str] = []

    @contextlib.contextmanager
    def scope(self, name: str, *, is_of_step: bool = False) -> Iterator[None]:
        self.entered.append(name)
        yield


class Trainer:
    """Its methods as transformers names them."""

    def _load_from_checkpoint(self, folder: str, model: object = None) -> str:
        return folder

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> str | None:
        return checkpoint


def test_a_training_that_resumes_has_that_phase_and_another_has_not() -> None:
    names, kind = Names(), type("Trainer", (Trainer,), dict(vars(Trainer)))
    module = ModuleType("transformers.trainer")
    module.Trainer = kind  # type: ignore[attr-defined]
    scopes._name([SimpleNamespace(phases=names)], module)
    assert kind()._load_optimizer_and_scheduler(None) is None
    assert kind()._load_optimizer_and_scheduler(checkpoint=None) is None
    assert names.entered == []
    assert kind()._load_from_checkpoint("out/checkpoint-2") == "out/checkpoint-2"
    assert kind()._load_optimizer_and_scheduler("out/checkpoint-2") == "out/checkpoint-2"
    assert names.entered == ["resume", "resume"]


@pytest.mark.parametrize("grad", [True, False])
def test_log_probs_with_gradients_are_a_forward_where_the_library_computes_its_loss_so(
    monkeypatch: pytest.MonkeyPatch, grad: bool
) -> None:
    """TRL's loss calls them, verl's worker does not; and what is awaited within a phase belongs to it."""
    entered = []
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(is_grad_enabled=lambda: grad))
    for name, kind, function in (
        ("trl.trainer.grpo_trainer", "GRPOTrainer", "_get_per_token_logps"),
        ("verl.workers.engine_workers", "ActorRolloutRefWorker", "compute_log_prob"),
    ):
        names, module = Names(), ModuleType(name)

        def computes(self: object) -> int:
            return 3

        async def updates(self: object, names: Names = names) -> list[str]:
            return list(names.entered)

        computes.__module__ = updates.__module__ = name
        setattr(module, kind, type(kind, (), {function: computes, "update_weights": updates}))
        scopes._name([SimpleNamespace(phases=names)], module)
        worker = getattr(module, kind)()
        assert getattr(worker, function)() == 3
        entered.append(list(names.entered))
    assert asyncio.run(worker.update_weights()) == [*entered[1], "weight_sync"]
    assert entered == [[] if grad else ["log_probs"], ["log_probs"]]


def test_what_is_loaded_after_a_resume_is_of_the_resume() -> None:
    """The optimizer's state stands then."""
    sizes = [("load", None, 10), ("resume", None, 30), ("load", None, 31), ("forward", 1, 40)]
    phases = [
        RawPhase(name=name, step=step, start_ns=at, end_ns=at + 1, allocated_end_bytes=size, allocated_peak_bytes=size)
        for at, (name, step, size) in enumerate(sizes)
    ]
    found = {one.name: (one.num_phases, one.allocated_bytes) for one in run_phases(phases)}
    assert found == {"load": (1, 10), "resume": (2, 31), "training": (1, 40)}
    without = [one for one in phases if one.name != "resume"]
    assert run_phases(without) == []


SCRIPT = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        return {"input_ids": torch.arange(8), "labels": torch.arange(8)}

config = LlamaConfig(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
    vocab_size=8192, tie_word_embeddings=True)
arguments = TrainingArguments("out", per_device_train_batch_size=1, max_steps=int(sys.argv[1]), save_steps=2,
    report_to="none", disable_tqdm=True)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Rows())
trainer.train(resume_from_checkpoint=sys.argv[2] if sys.argv[2:] else None)
print("parameters", trainer.model.num_parameters())
"""


@pytest.mark.exhaustive
def test_a_resumed_training_takes_its_weights_and_moments_before_the_steps(tmp_path: Path) -> None:
    """In float32 the weights stand already; Adam's two moments come from the host, one tensor after the other."""
    profile_of(tmp_path, SCRIPT, "--no-speed", "--whole", words=["2"])
    left, record = profile_of(tmp_path, SCRIPT, "--no-speed", words=["900", "out/checkpoint-2"])
    num_parameters = int(next(line.split()[1] for line in left.out.splitlines() if line.startswith("parameters")))
    (rank,) = record["ranks"]
    highest = {one["name"]: one["allocated_bytes"] for one in rank["run_phases"]}
    assert list(highest)[:3] == ["load", "resume", "training"]
    assert rank["num_steps"] == 3
    assert highest["resume"] == pytest.approx(3 * 4 * num_parameters, rel=0.002)
    assert highest["load"] == pytest.approx(4 * num_parameters, rel=0.002)
