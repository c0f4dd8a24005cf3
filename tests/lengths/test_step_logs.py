"""Recordings that give the steps of a run's batches: a recipe that ships, one of a few lengths, or each of four."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from vramprobe.emulate.installation import NotEmulatable
from vramprobe.lengths import step_logs
from vramprobe.lengths.batches import Shape
from vramprobe.lengths.step_logs import logs_over
from vramprobe.predict.questions import cell
from vramprobe.recipe.recipe import NotOneBranch
from vramprobe.spec import CellSpec

LENGTHS = range(100, 1100, 50)


class Heard(NamedTuple):
    """A recipe in place of one: says the length that it was recorded at, and the batch that it is asked for."""

    length: int

    def deep(self, shape: tuple[int, ...]) -> Any:
        class Deep(NamedTuple):
            log: tuple[int, int]

        return Deep((self.length, shape[1]))


def over(
    monkeypatch: pytest.MonkeyPatch, find: Callable[..., Any], kept: Callable[..., Any] = lambda *words, **_: None
) -> tuple[dict[int, Any], list[str], list[tuple[int, list[int]]]]:
    """(each length's log, notes, what was recorded: a length and those beside it)."""
    asked: list[tuple[int, list[int]]] = []

    def found(spec: CellSpec, gpu: Any, say: Any, *, shapes: Any = (), near: bool = False) -> Heard:
        asked.append((spec.seq_len, [length for _, length in shapes]))
        assert near == bool(shapes)
        return find(spec, shapes)

    monkeypatch.setattr(step_logs, "find_recipe", found)
    monkeypatch.setattr(step_logs, "kept_recipe", kept)
    one = cell(model="smollm2-135m", method="lora", device="cuda", batch_size=3, seq_len=1050, padding=True)
    log_at, notes = logs_over(one, {Shape(3, length) for length in LENGTHS}, None, lambda words: None)
    return {length: log_at(Shape(3, length)) for length in LENGTHS}, notes, asked


def test_six_lengths_are_recorded_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    logs, notes, asked = over(monkeypatch, lambda spec, shapes: Heard(spec.seq_len))
    assert asked == [(650, [100, 300, 500, 850, 1050])]
    assert logs == {length: (650, length) for length in LENGTHS}
    assert notes == []


def test_lengths_that_are_not_alike_are_recorded_apart_and_the_next_longer_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: set[int] = set()

    def find(spec: CellSpec, shapes: Any) -> Heard:
        if shapes:
            raise NotOneBranch("other events at each")
        kept.add(spec.seq_len)
        return Heard(spec.seq_len)

    def find_kept(spec: CellSpec, *words: Any, **options: Any) -> Heard | None:
        return Heard(spec.seq_len) if spec.seq_len in kept and not options else None

    logs, notes, asked = over(monkeypatch, find, find_kept)
    assert [length for length, _ in asked] == [650, 100, 400, 750, 1050]
    assert (logs[100][0], logs[150][0], logs[400][0], logs[450][0], logs[800][0]) == (100, 400, 400, 750, 1050)
    assert "100, 400, 750, 1050 tokens" in notes[0]
    again, _, asked = over(monkeypatch, find, find_kept)
    assert again == logs
    assert [length for length, _ in asked] == [100, 400, 750, 1050]  # not once more together


def test_without_an_emulated_gpu_a_recipe_that_ships_answers_near(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*words: Any, **options: Any) -> Any:
        raise NotEmulatable("no compiler")

    monkeypatch.setattr(step_logs, "kept_recipe", none)
    one = cell(model="smollm2-135m", method="lora", device="cuda", batch_size=2, seq_len=512)
    log_at, notes = logs_over(one, {Shape(2, 512), Shape(2, 100)}, None, lambda words: None)
    assert len(notes) == 1
    assert notes[0].endswith("2 x 100 tokens lie outside: near, not exact")
    assert 0 < log_at(Shape(2, 100)).size_bytes.max() <= log_at(Shape(2, 512)).size_bytes.max()
    with pytest.raises(NotEmulatable):
        logs_over(one.model_copy(update={"padding": True}), {Shape(2, 100)}, None, lambda words: None)
