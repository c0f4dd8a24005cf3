"""One workload under two majors of transformers: what a release before 5 is called with, and what a later one is."""

from types import SimpleNamespace
from typing import Any

import pytest
from factories import make_spec

from vramprobe.workload import releases, training


class _Model:
    """It notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def gradient_checkpointing_enable(self, words: dict[str, bool]) -> None:
        self.calls.append(words)

    def enable_input_require_grads(self) -> None:
        self.calls.append("inputs")


@pytest.mark.parametrize(
    ("is_fourth", "trains_inputs", "calls"),
    [
        (True, False, [{"use_reentrant": True}, "inputs"]),
        (True, True, [{"use_reentrant": True}]),
        (False, False, [{"use_reentrant": False}]),
    ],
)
def test_a_checkpoint_is_each_releases_default(
    is_fourth: bool, trains_inputs: bool, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "_IS_FOURTH", is_fourth)
    model = _Model()
    releases.enable_checkpointing(model, trains_inputs=trains_inputs)
    assert model.calls == calls


def test_a_config_of_4_44_has_no_text_config() -> None:
    assert releases.vocab_size(SimpleNamespace(config=SimpleNamespace(vocab_size=7))) == 7
    text = SimpleNamespace(vocab_size=8)
    assert releases.vocab_size(SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))) == 8


def test_adapters_are_told_their_dtype_where_peft_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import peft

    assert releases.adapters_in_fp32(True) == {"autocast_adapter_dtype": True}
    monkeypatch.setattr(peft, "get_peft_model", lambda model, config: model)
    assert releases.adapters_in_fp32(True) == {}


@pytest.mark.parametrize("has_mask", [True, False])
def test_rows_have_a_mask_of_ones_where_a_release_would_make_one_of_all_pairs(
    has_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "HAS_MASK", has_mask)
    batch = training._make_batch(make_spec(device="cpu"), SimpleNamespace(config=SimpleNamespace(vocab_size=9)))
    assert ("attention_mask" in batch) == has_mask
    assert not has_mask or batch["attention_mask"].all()
