"""A step of many micro-steps, of which five are logged, is what all of them are."""

from __future__ import annotations

from typing import Any

import pytest
from grids import grid

from vramprobe.allocator import compiled
from vramprobe.allocator.compiled import counting_allocator
from vramprobe.allocator.ledger import Usage
from vramprobe.kernels.chip import Chip
from vramprobe.spec import resolve
from vramprobe.terms.replayed import play
from vramprobe.terms.step import requests
from vramprobe.terms.step.requests import Run
from vramprobe.terms.tape.micro_steps import LOGGED, StepLog
from vramprobe.terms.tape.request_log import Chunk, NotAlike

CELLS: list[dict[str, Any]] = [
    {"model": "llama-3.2-1b", "method": "qlora", "gradient_checkpointing": True},
    {"model": "qwen2.5-0.5b", "method": "full", "recipe": "mixed"},
    {"model": "gemma-2-2b", "method": "lora"},  # layers of two kinds
]


def played(words: dict[str, Any], num_micro_steps: int) -> tuple[Run, list[Usage]]:
    spec = resolve(device="cuda", batch_size=1, seq_len=512, grad_accum=num_micro_steps, **words)
    allocator = counting_allocator()
    run = Run(spec, allocator, workspace_bytes=8 << 20, chip=Chip())
    play(run, allocator)
    return run, [allocator.ledger.now(), allocator.ledger.peak()]


@pytest.mark.parametrize("words", grid(CELLS, CELLS[0]), ids=lambda words: " ".join(map(str, words.values())))
def test_some_of_them_tell_what_all_do(words: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run, found = played(words, LOGGED + 3)
    assert (len(run._log.parts), run._log.num_left_out) == (LOGGED, 3)
    assert run._num_more == 1  # the first of the three leaves all as it found it
    with monkeypatch.context() as patch:
        patch.setattr(requests, "LOGGED", 99)
        whole, wanted = played(words, LOGGED + 3)
    assert len(whole._log.parts) == LOGGED + 3
    assert found == wanted
    monkeypatch.setattr(compiled, "PlainAllocator", None)
    assert played(words, LOGGED + 3)[1] == wanted


def test_as_many_as_are_logged_are_played_as_they_are() -> None:
    run, _ = played(CELLS[0], LOGGED)
    assert (len(run._log.parts), run._log.num_left_out, run._num_more) == (LOGGED, 0, 0)


def chunks(*parts: list[Any], end: list[Any]) -> list[Chunk]:
    """A step of a chunk for each micro-step; of tokens as in request_log.py."""
    found = [Chunk(("forward", "loss"), tokens, micro_step=number) for number, tokens in enumerate(parts)]
    found.append(Chunk(("zero_grad", "end"), end, micro_step=len(parts) - 1))
    for chunk in found:
        chunk.num_requests = sum(isinstance(token, int) for token in chunk.tokens)
    return found


def test_a_log_by_hand() -> None:
    """The first makes a gradient of 9 bytes; each asks for 5, gives back what the one before it left, and keeps 3."""
    parts: list[list[Any]] = [[9, 5, (0, 1), 3]] + [
        [5, (at, 0), (at - 1, 2 if at == 1 else 1), 3] for at in range(1, 5)
    ]
    log = StepLog(chunks(*parts, end=[(0, 0), (4, 1)]), 7)
    assert log.parts[3] == [5, ~7, ~6, 3]
    assert log.firsts == [0, 3, 5, 7, 9, 11]
    assert log.num_left_out == 2
    assert log.repeated(1) == ([5, ~9, ~8, 3], 9)
    assert log.repeated(2) == ([5, ~11, ~10, 3], 11)
    assert log.last(2) == ([5, ~13, ~12, 3], 13)
    assert log.end(2) == ([~0, ~14], 15)
    assert log.end(0) == ([~0, ~10], 11)


ALIKE: list[list[Any]] = [[5, (at, 0)] for at in range(5)]


@pytest.mark.parametrize(
    ("parts", "end"),
    [
        ([*ALIKE[:3], [7, (3, 0)], ALIKE[4]], []),  # those between differ
        ([[9, 9, 9], *([5, (0, at)] for at in range(3)), []], []),  # each gives back another of the first's
        ([ALIKE[0], ALIKE[1], [5], [5], ALIKE[4]], [(2, 0)]),  # of which, where there are more?
        (ALIKE[:4], []),  # too few
    ],
)
def test_what_a_few_do_not_tell_is_said(parts: list[list[Any]], end: list[Any]) -> None:
    with pytest.raises(NotAlike):
        StepLog(chunks(*parts, end=end), 9)
