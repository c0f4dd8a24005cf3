"""Duration of a generation: it is said at once, with how to shorten it; a short one says nothing."""

import types

import pytest

from vramprobe.profile.hook.generation import Generations, serve


class Criterion:
    """Made anew for each generation, as transformers does."""


def generate(num_tokens: int, seconds_each: float, times: int = 1, prompt: int = 2048) -> tuple[list[str], list[str]]:
    clock, warned, said = [0.0], [], []
    generations = Generations(warned.append, said.append, now=lambda: clock[0])
    for _ in range(times):
        criterion = Criterion()
        for token in range(1, num_tokens + 1):
            clock[0] += seconds_each
            generations.token(criterion, prompt + token, prompt + num_tokens)
    return warned, said


def test_a_long_one_is_told_of_at_its_third_token_and_each_minute() -> None:
    warned, said = generate(1024, 0.25)
    assert len(warned) == 1
    assert "each 0.25 s" in warned[0]
    assert "max_completion_length" in warned[0]
    assert "token 3 of 1,024, about 255 s to go" in said[0]
    assert [one.split(",")[0] for one in said[1:]] == [
        "token 243 of 1",
        "token 483 of 1",
        "token 723 of 1",
        "token 963 of 1",
    ]


def test_the_next_one_is_not_told_how_to_be_shortened_again() -> None:
    warned, said = generate(512, 0.25, times=2)
    assert len(warned) == 1
    assert sum("max_completion_length" in one for one in said) == 1
    assert len(said) == 6


@pytest.mark.parametrize(("num_tokens", "seconds"), [(1024, 0.01), (64, 0.25), (2, 100.0)])
def test_a_short_one_says_nothing(num_tokens: int, seconds: float) -> None:
    assert generate(num_tokens, seconds) == ([], [])


def test_transformers_asks_its_criterion_after_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    from transformers.generation import stopping_criteria

    monkeypatch.setattr(stopping_criteria.MaxLengthCriteria, "__call__", stopping_criteria.MaxLengthCriteria.__call__)
    lengths: list[tuple[int, int]] = []
    monkeypatch.setattr(Generations, "token", lambda self, criterion, *lengths_of: lengths.append(lengths_of))
    serve([], types.SimpleNamespace(MaxLengthCriteria=stopping_criteria.MaxLengthCriteria))
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=64, pad_token_id=0
    )
    transformers.LlamaForCausalLM(config).generate(
        torch.ones(2, 5, dtype=torch.long), max_new_tokens=3, eos_token_id=99
    )
    assert lengths == [(6, 8), (7, 8), (8, 8)]
