"""The DataLoader that feeds a loop ends after the steps, for good; others are shortened; what counts steps is ended."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from run_verb import ROWS, profile_of

from vramprobe.profile.hook import after_steps, stop
from vramprobe.profile.hook.loaders import Loaders
from vramprobe.units import MIB

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, dataloader  # noqa: E402


class Endless(Exception):
    pass


class Heard:
    def __init__(self) -> None:
        self.ends = 0

    def end(self) -> None:
        self.ends += 1

    def endless(self, times: int) -> None:
        raise Endless(times)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Loaders, Heard]]:
    monkeypatch.setattr(DataLoader, "_get_iterator", DataLoader._get_iterator)  # undone at the end
    monkeypatch.setattr(dataloader._BaseDataLoaderIter, "__next__", dataloader._BaseDataLoaderIter.__next__)
    heard = Heard()
    loaders = Loaders(4, lambda loader: None, heard.end, heard.endless)
    loaders.install(lambda name, act: act(dataloader) if name == dataloader.__name__ else None)
    return loaders, heard


def steps(loader: DataLoader, loaders: Loaders, num: int) -> list[int]:
    """A loop whose data are ended with its step ``num``; the batches that it gets."""
    found = []
    for batch in loader:
        found.append(int(batch[0]))
        if len(found) == num:
            assert loaders.end()
        loaders.step_ended()
    return found


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_the_loader_that_feeds_the_loop_ends_for_good_and_the_others_are_shortened(
    watched: tuple[Loaders, Heard], workers: dict
) -> None:
    loaders, heard = watched
    train, held = DataLoader(range(50), 1, **workers), DataLoader(range(100, 150), 1)
    assert len(list(held)) == 50  # before its steps end a loop is as it was
    assert steps(train, loaders, 3) == [0, 1, 2]
    assert heard.ends == 1
    assert [int(batch) for batch in held] == [100, 101, 102, 103]
    assert list(train) == []
    assert [int(batch) for batch in held] == [100, 101, 102, 103]
    assert heard.ends == 1


def test_a_loader_that_nothing_else_holds_ends_too(watched: tuple[Loaders, Heard]) -> None:
    assert steps(DataLoader(range(50), 1), watched[0], 3) == [0, 1, 2]


def test_two_that_are_read_side_by_side_end_together(watched: tuple[Loaders, Heard]) -> None:
    loaders, _ = watched
    pairs = zip(DataLoader(range(50), 1), DataLoader(range(50), 1), strict=False)
    next(pairs)
    assert loaders.end()
    assert list(pairs) == []


def test_a_loop_without_a_loader_cannot_be_ended(watched: tuple[Loaders, Heard]) -> None:
    loaders, _ = watched
    list(DataLoader(range(5), 1))  # as an evaluation's before the step
    loaders.step_ended()
    assert not loaders.end()
    assert len(list(DataLoader(range(50), 1))) == 50


def test_a_loop_that_counts_steps_is_ended(watched: tuple[Loaders, Heard]) -> None:
    loaders, _ = watched
    train = DataLoader(range(50), 1)
    steps(train, loaders, 3)

    def forever() -> Iterator:
        while True:
            yield from train

    with pytest.raises(Endless, match="100"):
        next(forever())


class Run:
    """A watch whose steps repeat, and that says what becomes of it."""

    is_ending = False

    def __init__(self, num_ranks: int = 1, repeats: bool = True) -> None:
        self.phases, self.said = self, []
        self.on_step: list = []
        self.place_among_ranks, self._repeats = (0, num_ranks), repeats

    def repeats(self) -> bool:
        return self._repeats

    def line(self, kind: str, message: str) -> None:
        self.said.append(message)

    def goes_on(self) -> None:
        self.said.append("goes on")

    def stop(self) -> None:
        self.said.append("stopped")


@pytest.fixture
def stopped_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run, int], list[str]]:
    """End a step of a run that is to take three; -> what becomes of the run."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # undone at the end
    monkeypatch.setattr(stop.threading, "Timer", lambda *words: threading.Thread(target=lambda: None))

    def act(run: Run, step: int) -> list[str]:
        stop.Stop(run, 3, None)
        with contextlib.suppress(SystemExit):
            run.on_step[0](step)
        return run.said

    return act


@pytest.mark.parametrize("in_notebook", [False, True])
def test_a_notebooks_kernel_is_not_ended_in_a_cell(in_notebook: bool, stopped_at, monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel.kernelapp", raising=False)
    if in_notebook:
        monkeypatch.setitem(sys.modules, "ipykernel.kernelapp", stop)
    assert stopped_at(Run(), 2) == []
    assert stopped_at(Run(), 3)[-1] == ("goes on" if in_notebook else "stopped")


@pytest.mark.parametrize(("num_ranks", "said"), [(1, []), (2, ["stopped"])])
def test_a_rank_whose_steps_grow_ends_with_the_others(num_ranks: int, said: list[str], stopped_at) -> None:
    """As rank 0 of NeMo Automodel's, which keeps 512 bytes of each step for its log, and rank 1, which does not."""
    assert stopped_at(Run(num_ranks, repeats=False), 3) == said


class Rows(torch.utils.data.Dataset):
    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": torch.zeros(self.lengths[index])}


def test_the_batches_of_an_evaluation_are_those_of_its_longest_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(after_steps, "when_imported", lambda name, act: None)
    after = after_steps.AfterSteps(str(tmp_path), [])
    loader = DataLoader(
        Rows(list(range(1, 31))), batch_size=2, collate_fn=lambda rows: [len(r["input_ids"]) for r in rows]
    )
    shortened = after._shortened_loader(loader)
    assert list(shortened) == [[30, 29], [28, 27], [26, 25], [24, 23]]
    few = DataLoader(Rows([1, 2]), batch_size=2)
    assert after._shortened_loader(few) is None


LOOP = """
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=4096)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters())
accelerator = Accelerator()
model, optimizer, train, held = accelerator.prepare(model, optimizer,
    torch.utils.data.DataLoader(Rows(4000), batch_size=2, collate_fn=collate, shuffle=True),
    torch.utils.data.DataLoader(Rows(100), batch_size=8, collate_fn=collate))
seen = []
for epoch in range(2):
    for batch in train:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    kept = []
    for batch in held:
        with torch.no_grad():
            kept.append(accelerator.gather_for_metrics(model(**batch).logits))
    seen.append(len(kept))
    model.train()
    accelerator.save_state("mine")
accelerator.unwrap_model(model).save_pretrained("final")
model.eval()
model(**batch)  # a script that forgets no_grad
print("end of the script", seen)
"""


def test_a_loop_of_ones_own_goes_through_what_follows_its_steps(tmp_path: Path) -> None:
    left, record = profile_of(tmp_path, ROWS + LOOP, "--folder", str(tmp_path / "run"))
    assert left.stray == []
    assert "end of the script [4, 4]" in left.out
    (rank,) = record["ranks"]
    assert (rank["num_steps"], record["outcome"]["stopped"]) == (3, True)
    highest = {one["name"]: one["allocated_bytes"] for one in rank["run_phases"]}
    assert set(highest) == {"load", "training", "evaluation", "save", "after_training"}
    assert rank["peak"]["phase"] == "evaluation"
    # the first of four batches has the longest row: its logits, and their float32 copy
    assert highest["evaluation"] > 2 * 8 * 256 * 4096 * 4 > highest["training"] > MIB
    assert any("shortened to 4 of 13 batches, those of the longest rows" in one for one in record["warnings"])
