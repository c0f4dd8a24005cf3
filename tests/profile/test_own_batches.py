"""The batches of a run's own data: all shapes as its loader makes them, those that are run, what is learnt."""

import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from emulated import require_emulation
from grids import grid
from profile_factory import Script, write_launcher
from run_command import NO_COMPILER

from vramprobe.profile import launch
from vramprobe.profile.analyse import analyse
from vramprobe.profile.data_batches import PeakByShape, data_batches, runs_of
from vramprobe.profile.hook import agreement, batch_shapes, own_batches
from vramprobe.profile.run_files import read_run
from vramprobe.records.profile import ProfileRecord
from vramprobe.units import GIB, MIB

torch = pytest.importorskip("torch")

Collate = Callable[[list[Any]], Any]


def padded(multiple: int = 1, longest: int | None = None) -> Collate:
    def collate(rows: list[Any]) -> dict[str, Any]:
        width = -(-max(map(len, rows)) // multiple) * multiple
        width = width if longest is None else min(width, longest)
        return {"input_ids": torch.zeros(len(rows), width, dtype=torch.long), "weight": torch.zeros(9999)}

    return collate


def flattened(rows: list[Any]) -> dict[str, Any]:
    return {"input_ids": torch.zeros(1, sum(map(len, rows)), dtype=torch.long)}


def squared(rows: list[Any]) -> dict[str, Any]:
    return {"input_ids": torch.zeros(len(rows), max(map(len, rows)) ** 2, dtype=torch.long)}


def halves(rows: list[Any]) -> dict[str, Any]:
    """As of pairs: each part is padded by itself."""
    half = max(map(len, rows)) // 2 + 1
    return {name: torch.zeros(len(rows), half, dtype=torch.long) for name in ("a_input_ids", "b_input_ids")}


def loader_of(collate: Collate) -> Any:
    of = random.Random(5)
    rows = [torch.zeros(of.randint(1, 300)) for _ in range(203)]
    return torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True, collate_fn=collate)


@pytest.mark.parametrize(
    ("collate", "how"),
    [
        (padded(), "lengths"),
        (padded(8), "lengths"),
        (padded(longest=250), "lengths"),
        (flattened, "lengths"),
        (squared, "collated"),
        (halves, "collated"),
    ],
)
def test_shapes_are_those_that_the_loader_makes(collate: Collate, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_shapes, "row_lengths", lambda rows: [len(row) for row in rows])
    loader = loader_of(collate)
    torch.manual_seed(3)
    iterator = iter(loader)
    state = torch.get_rng_state()
    survey = batch_shapes.Survey(iterator)
    assert torch.equal(torch.get_rng_state(), state)
    assert (survey.how, survey.is_complete, len(survey.batches)) == (how, True, 51)
    assert sorted(row for rows in survey.batches for row in rows) == list(range(203))
    made = [collate([loader.dataset[row] for row in rows]) for rows in survey.batches]
    assert survey.shapes == [batch_shapes.shape_of(one) for one in made]
    table = survey.table()
    assert sum(count for _, _, count, _ in table) == 51
    assert all(survey.shapes[first] == (rows, width) for rows, width, _, first in table)
    longest = survey.by_length(table[-1][3])
    assert [len(loader.dataset[row]) for row in longest] == sorted(map(len, (loader.dataset[i] for i in longest)))[::-1]


def test_without_lengths_all_batches_are_collated() -> None:
    survey = batch_shapes.Survey(iter(loader_of(padded())))
    assert (survey.how, survey.lengths, len(survey.shapes)) == ("collated", None, 51)


def test_a_time_limit_ends_collating_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_shapes, "LIMIT_SECONDS", -1.0)
    survey = batch_shapes.Survey(iter(loader_of(padded())))
    assert (survey.is_complete, len(survey.shapes)) == (False, 1)


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        ({"input_ids": torch.zeros(2, 7), "labels": torch.zeros(2, 7)}, (2, 7)),
        ({"chosen_input_ids": torch.zeros(2, 7), "rejected_input_ids": torch.zeros(2, 5)}, (2, 12)),
        ([torch.zeros(3, 4, 5), torch.zeros(3)], (3, 20)),
        (torch.zeros(6, 2), (6, 2)),
        ([{"text": "prompts, as of GRPO"}], None),
    ],
)
def test_the_shape_of_a_batch(batch: Any, shape: tuple[int, int] | None) -> None:
    assert batch_shapes.shape_of(batch) == shape


def test_chosen_are_the_quantiles_the_largest_and_others_between_them() -> None:
    table = [[4, width, 1, width] for width in range(1, 1001)]
    chosen = own_batches.choose(table, 96)
    widths = [row[1] for row in chosen]
    assert widths == sorted(set(widths))
    assert {1, 500, 900, 990, 1000} <= {row[1] for row in chosen if not row[4]}
    assert sum(row[4] for row in chosen) == 3
    assert [row[1] for row in own_batches.choose(table, 2)] == [500, 1000]
    most_tokens = [8, 600, 1, 1001]  # and not the longest
    kept = own_batches.choose([*table, most_tokens], 3)
    assert [row[:2] for row in kept] == [[4, 501], [4, 1000], [8, 600]]
    assert own_batches.choose([[2, 5, 9, 0], [4, 5, 3, 1]], 96) == [[2, 5, 9, 0, False], [4, 5, 3, 1, False]]


def test_peaks_between_and_beyond_the_shapes_that_were_run() -> None:
    def true(rows: int, width: int) -> int:
        return max(5 * GIB, 1000 + 3 * MIB * rows * width + 17 * rows * width**2)

    widths = (1, 300, 800, 1500, 2000)
    learnt = PeakByShape([(4, width, true(4, width)) for width in widths])
    for width in widths:
        assert learnt(4, width) == true(4, width)
    assert learnt(4, 1900) == pytest.approx(true(4, 1900), rel=0.01)
    assert learnt(4, 4000) == pytest.approx(true(4, 4000), rel=1e-6)  # beyond, with the square
    assert learnt(8, 1500) == pytest.approx(true(8, 1500), rel=0.02)  # more rows
    assert learnt(4, 0) == 5 * GIB  # another phase's peak


STATE, PER_TOKEN = 2 * GIB, 8 * MIB


def on_batches(widths: Sequence[int], *, steps_run: int | None = None, out_of_memory: bool = False) -> Script:
    """Three steps of 4 × 64, and one of each width; the epoch has ten batches of each. Each token takes the same."""
    script = Script()
    script.alloc(0x1000000, STATE)

    def step(width: int) -> None:
        with script.phase("forward", step=number):
            script.alloc(0x9000000000, 4 * width * PER_TOKEN)
        with script.phase("backward", step=number):
            script.free(0x9000000000)
        script.say("step", step=number)

    with script.phase("load"):
        pass
    for number in range(1, 4):  # noqa: B007
        step(64)
    shapes = [[4, width, 10, at * 10] for at, width in enumerate(widths)]
    lengths = [[width, 40] for width in widths]
    script.say("batches", steps=3, how="lengths", is_complete=True, micro_steps=1, shapes=shapes, lengths=lengths,
               num_batches=10 * len(widths), num_rows=40 * len(widths))  # fmt: skip
    for at, width in enumerate(widths[:steps_run]):
        number = 5 + at
        script.say("batch", step=number, batch=at * 10, rows=4, width=width, held_out=at == 1, indices=[at, 9])
        step(width)
    if out_of_memory:
        script.say("oom", step=number, phase="backward", requested_bytes=1)
    return script


def answered(folder: Path, script: Script) -> Any:
    script.write(folder)
    write_launcher(folder, stopped=True)
    (raw,) = read_run(folder).ranks
    found = data_batches(raw, context_bytes=GIB)
    assert found is not None
    return raw, found


def unused_bytes(raw: Any) -> int:
    """Return reserved minus allocated bytes of the highest step that fitted and was not held out."""
    (*_, last) = [one for one in runs_of(raw) if not (one.is_oom or one.is_held_out)]
    return last.reserved_bytes - last.allocated_bytes


def test_the_largest_batch_and_what_else_would_fit(tmp_path: Path, printed) -> None:
    raw, found = answered(tmp_path, on_batches([100, 200, 300, 400, 500]))
    assert raw.num_steps == 3  # the others are not the run's own
    assert [(one.name, one.width, one.source) for one in found.peaks] == [
        ("p50", 300, "emulated"),
        ("p90", 500, "emulated"),
        ("p99", 500, "emulated"),
        ("max", 500, "emulated"),
    ]
    assert found.peaks[-1].allocated_bytes == STATE + 4 * 500 * PER_TOKEN
    assert found.peaks[-1].rows == [4, 9]
    assert [one.error for one in found.held_out] == [0]
    assert found.fits is True
    assert found.max_length is None
    free = found.usable_bytes - STATE - unused_bytes(raw)
    assert found.max_batch_size.value == int(free / (500 * PER_TOKEN))
    record = analyse(tmp_path)
    assert record.ranks[0].peak.allocated_bytes == found.peaks[-1].allocated_bytes
    shown = printed(record)
    assert "the run's own data: 200 rows, 50 batches an epoch; 5 shapes, 5 of them" in shown
    assert "not the run's peak" not in shown
    assert "the largest batch fits" in shown


def test_a_largest_batch_that_runs_out_of_memory(tmp_path: Path, printed) -> None:
    widths = [100, 200, 300, 400, 500, 900]
    raw, found = answered(tmp_path, on_batches(widths, out_of_memory=True))
    worst = found.peaks[-1]
    assert (worst.source, worst.width, found.fits) == ("out of memory", 900, False)
    assert worst.allocated_bytes == pytest.approx(STATE + 4 * 900 * PER_TOKEN, rel=1e-3)  # predicted from the others
    length = (found.usable_bytes - STATE - unused_bytes(raw)) / (4 * PER_TOKEN)
    assert found.max_length.value == pytest.approx(length, abs=2)
    cut = [width - found.max_length.value for width in widths if width > found.max_length.value]
    assert found.max_length.rows_cut_share == pytest.approx(len(cut) / len(widths))
    assert found.max_length.tokens_cut_share == pytest.approx(sum(cut) / sum(widths))
    assert found.max_batch_size.value == int(4 * length / 900)
    assert "the largest batch does not fit" in printed(analyse(tmp_path))


def test_a_run_that_ends_before_the_largest_batch_predicts_it(tmp_path: Path) -> None:
    _, found = answered(tmp_path, on_batches([100, 200, 300, 400, 500], steps_run=4))
    assert (found.num_run, found.peaks[-1].source) == (4, "predicted")
    assert found.peaks[-1].allocated_bytes == pytest.approx(STATE + 4 * 500 * PER_TOKEN, rel=1e-3)


def test_stand_in_rows_are_not_asked(tmp_path: Path) -> None:
    watches: list[Any] = []
    own = own_batches.OwnBatches(str(tmp_path), watches)
    (tmp_path / "replaced").write_text(json.dumps({"kind": "dataset"}) + "\n")
    assert not own.begin(SimpleNamespace(place_among_ranks=(0, 1)), 3)  # which reads nothing of the watch
    assert not own.is_playing


PLAIN = """
import random, sys, torch
torch.manual_seed(2)  # the longest row in the first batch would meet no state of the optimizer
of = random.Random(2)
rows = [torch.full((of.randint(8, 400),), 3) for _ in range(320)]
def collate(batch):
    return torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
model = torch.nn.Sequential(torch.nn.Embedding(512, 256), torch.nn.Linear(256, 1024), torch.nn.ReLU(),
    torch.nn.Linear(1024, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
LOOP = """
for batch in torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True, collate_fn=collate):
    batch = batch.cuda()
    torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TRAINER = """
import random
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import (DataCollatorForSeq2Seq, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer,
    TrainingArguments)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")),
    pad_token="b")
of = random.Random(2)
def rows():
    for _ in range(400):
        count = of.randint(8, 400)
        yield {"input_ids": [0] * count, "labels": [0] * count, "attention_mask": [1] * count}
model = LlamaForCausalLM(LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=4, vocab_size=4096))
arguments = TrainingArguments("out", per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to="none",
    save_strategy="no", num_train_epochs=1, disable_tqdm=True)
Trainer(model, arguments, DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8),
    Dataset.from_generator(rows, cache_dir="cache")).train()
"""


def run_of(folder: Path, script: str, *, steps: int | None, num_ranks: int = 1) -> ProfileRecord:
    folder.mkdir()
    (folder / "script.py").write_text(NO_COMPILER + script if script.startswith(PLAIN) else script)
    options = launch.Options(trace="none", steps=steps, phases=steps is not None, speed=False)
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"] if num_ranks > 1 else []
    command = [str(require_emulation()), *launcher, str(folder / "script.py")]
    launch.run(command, folder, options, emulate=f"RTX-4090 x{num_ranks}")
    return analyse(folder)


@pytest.mark.parametrize("script", grid([PLAIN + LOOP, TRAINER], PLAIN + LOOP), ids=["plain", "trainer"])
def test_the_largest_batch_is_that_of_the_whole_run(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = run_of(tmp_path / "chosen", script, steps=3)
    (rank,) = found.ranks
    batches = rank.batches
    assert (batches.is_complete, batches.peaks[-1].source, len(batches.held_out)) == (True, "emulated", 3)
    assert max(abs(one.error) for one in batches.held_out) < 0.03
    whole = run_of(tmp_path / "whole", script, steps=None).ranks[0]
    assert whole.num_steps > 2 * rank.num_steps
    # a Trainer holds the next step's batch beside this one's
    assert rank.peak.requested_bytes == pytest.approx(whole.peak.requested_bytes, rel=1e-4)
    # allocated bytes have what blocks were not split into, which depends on the steps before
    assert batches.peaks[-1].allocated_bytes == rank.peak.allocated_bytes
    assert rank.peak.allocated_bytes == pytest.approx(whole.peak.allocated_bytes, rel=0.02)


# find_unused_parameters keeps DDP from making its buckets anew after the first step. NCCL's watchdog holds the old ones
# (3.5 MiB) until it looks, up to 100 ms later: how many steps that is differs from run to run.
TWO_RANKS = (
    """
import torch.distributed
torch.distributed.init_process_group("nccl")
torch.cuda.set_device(torch.distributed.get_rank())
"""
    + PLAIN
    + """
model = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
loader = torch.utils.data.DataLoader(rows, batch_size=8, collate_fn=collate,
    sampler=torch.utils.data.DistributedSampler(rows))
"""
    + LOOP.replace("torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True, collate_fn=collate)", "loader")
)


@pytest.mark.exhaustive
def test_each_rank_runs_its_own_largest_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed) -> None:
    monkeypatch.chdir(tmp_path)
    found = run_of(tmp_path / "chosen", TWO_RANKS, steps=3, num_ranks=2)
    run_of(tmp_path / "whole", TWO_RANKS, steps=None, num_ranks=2)
    every_step = {one.process.rank: one for one in read_run(tmp_path / "whole").ranks}
    for rank in found.ranks:
        raw = every_step[rank.rank]
        peak = max(one.allocated_peak_bytes for one in raw.phases if one.step is not None)
        assert (rank.batches.num_batches, rank.batches.peaks[-1].source) == (raw.num_steps, "emulated")
        assert rank.batches.peaks[-1].allocated_bytes == peak
    top = max(found.ranks, key=lambda one: one.batches.peaks[-1].allocated_bytes)
    assert f"own data on rank {top.rank}, whose largest batch needs the most of 2 ranks" in printed(found)


TABLE = [[8, 100, 5, 0], [8, 200, 3, 2], [8, 300, 1, 6]]


def test_the_ranks_train_on_the_batches_that_decide_on_any_of_them() -> None:
    other = [[8, 150, 7, 1], [8, 400, 1, 4]]
    chosen = own_batches.choose_of_ranks([TABLE, other], 96)
    assert {number for number, held_out in chosen if not held_out} >= {6, 4}  # the largest of each rank
    assert chosen[-1][0] == 4  # that of the run comes last
    assert len({number for number, _ in chosen}) == len(chosen)
    assert own_batches.choose_of_ranks([[[8, 100, 9, 0]]] * 2, 96) == []


@pytest.mark.parametrize(
    ("said", "why", "who"),
    [
        ([{"size": 1, "stale": 1}] * 2, None, None),
        ([{"why": ""}] * 2, "", None),
        (None, "not all ranks came so far in time", None),
        ([{"size": 1, "stale": 1}, {"why": ""}], "rank 0 of 2 ranks reads all batches", 0),
        ([{"size": 1, "stale": 1}, {"why": "no index"}], "no index", 1),
        ([{"size": 1, "stale": 1}, {"size": 1, "stale": 2}], "as many batches", 0),
    ],
)
def test_why_the_ranks_do_not_train_on_chosen_batches(said: Any, why: str | None, who: int | None) -> None:
    found, rank = own_batches.why_not(said)
    assert rank == who
    assert found == why if not why else why in (found or "")


def test_all_ranks_hear_the_same_a_late_one_too(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        heard = list(pool.map(lambda at: agreement.heard(str(tmp_path), "batches", at, 3, {"at": at}), range(3)))
    assert heard == [[{"at": 0}, {"at": 1}, {"at": 2}]] * 3
    assert agreement.heard(str(tmp_path), "batches", 1, 3, {"at": "a second run"}) is None
    agreement.say(str(tmp_path), "failed", 1, {"failed": True})
    said = agreement.heard(str(tmp_path), "failed", 0, 2, {"why": ""})
    assert own_batches.why_not(said) == ("rank 1 of 2 ended with an error", 0)
    assert agreement.heard(str(tmp_path), "late", 0, 2, {}, limit_seconds=0.1) is None
    assert agreement.heard(str(tmp_path), "late", 1, 2, {}, limit_seconds=0.1) is None  # though both have spoken now
