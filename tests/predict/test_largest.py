"""Inverse questions: the answer fits and the next larger does not, whatever bounds it is named, and errors say what to
do."""

import json
import random
from typing import Any

import pytest
from command_line import vramprobe
from predictions import some_prediction

from vramprobe import api
from vramprobe.catalog import find_gpu
from vramprobe.errors import SpecError, VramprobeError
from vramprobe.predict import questions, recorded
from vramprobe.predict.largest import Largest, _last, _near
from vramprobe.predict.prediction import Interval, Prediction
from vramprobe.predict.verdict import usable_bytes, verdict
from vramprobe.recipe.recipe import CannotRecord
from vramprobe.spec import CellSpec
from vramprobe.units import GIB

QLORA_8B = {"model": "llama-3.1-8b", "method": "qlora", "gradient_checkpointing": True}


def answer(gpu: str, **words: Any) -> str:
    """The verdict of predict without a recording."""
    card = find_gpu(gpu)
    return verdict(questions.predict(gpu=gpu, records=False, **words), card).verdict


def values(found: Largest) -> tuple[int | str | None, int | str | None]:
    return found.fits and found.fits.value, found.tight and found.tight.value


@pytest.mark.usefixtures("shipped_alone")
@pytest.mark.parametrize("gpu", ["RTX-4090", "A100-80GB"])
@pytest.mark.parametrize(
    "words",
    [QLORA_8B, {"model": "llama-3.2-1b", "method": "full"}, {"model": "smollm2-135m", "method": "lora"}],
    ids=lambda words: words["model"],
)
def test_the_next_larger_does_not_fit(gpu: str, words: dict[str, Any]) -> None:
    batch = api.max_batch_size(gpu=gpu, seq_len=2048, **words)
    length = api.max_seq_len(gpu=gpu, batch_size=3, **words)
    for found, name, other in ((batch, "batch_size", {"seq_len": 2048}), (length, "seq_len", {"batch_size": 3})):
        fits, tight = values(found)
        assert fits is not None

        def said(count: int, name: str = name, other: dict[str, int] = other) -> str:
            return answer(gpu, **words, **other, **{name: count})

        assert (said(fits), said(fits + 1)) in (("fits", "tight"), ("fits", "does not fit"))
        assert said((tight or fits) + 1) == "does not fit"
        assert tight is None or said(tight) == "tight"
        assert found.question == name
        assert found.num_predictions < 40


@pytest.mark.parametrize("seed", range(100))
def test_near_a_rough_guess_the_answer_is_where_it_turns(seed: int) -> None:
    """Nearly straight lines with plateaus that go down again, and a guess that is off in height and in slope."""
    rng = random.Random(seed)
    slope, start, plateau = rng.choice([0.3, 1, 40]), rng.randint(-30_000, 60), rng.choice([1, 7, 100])
    noise = [rng.uniform(-50, 50) for _ in range(64)]
    first, most, asked = 1, rng.choice([None, 2, rng.randint(5, 50_000)]), 0

    def over(count: int) -> float:
        nonlocal asked
        asked += 1
        return start + slope * count + noise[count // plateau % 64]

    def rough(count: int) -> float:
        return start * 1.1 + slope * 0.7 * count - 20

    found = _near(over, first, most, rough=rough)
    assert asked < 60
    if found is None:
        assert over(first) > 0
    else:
        assert over(found) <= 0
        assert found == most or over(found + 1) > 0


def test_exact_on_any_function_that_never_falls() -> None:
    """300 straight lines, parabolas, steps and plateaus with random corners, against counting."""
    for seed in range(300):
        assert_exact(seed)


def assert_exact(seed: int) -> None:
    rng = random.Random(seed)
    bends = [(rng.randint(1, 400), rng.choice([0, 0, 1, 3, 50])) for _ in range(3)]
    square, start, rise = rng.choice([0, 0, 0.01, 2]), rng.randint(-20_000, 10), rng.choice([0, 1, 1, 7])
    jump_at = rng.randint(1, 400)
    asked: list[int] = []

    def over(count: int) -> float:
        asked.append(count)
        bent = sum(slope * max(count - corner, 0) for corner, slope in bends)
        return start + rise * count + square * count**2 + bent + (10**6 if count > jump_at else 0)

    first, most = rng.randint(1, 5), rng.choice([None, rng.randint(5, 500)])
    expected = max((count for count in range(first, (most or 500) + 1) if over(count) <= 0), default=None)
    asked.clear()
    assert _last(over, first, most) == expected, seed
    assert min(asked) == first, seed
    assert most is None or max(asked) <= most, seed
    assert len(asked) <= 40, seed


def test_learned_positions_bound_the_length() -> None:
    words = {"model": "gpt2", "method": "lora", "gradient_checkpointing": True, "batch_size": 2}
    found = api.max_seq_len(gpu="RTX-4090", **words)
    assert values(found) == (1024, None)
    assert found.notes == ["gpt2 has 1024 learned positions"]


def test_a_length_beyond_what_the_model_was_made_for_is_named() -> None:
    words = {"model": "pythia-70m", "method": "lora", "gradient_checkpointing": True, "batch_size": 2}
    found = api.max_seq_len(gpu="A100-80GB", **words)
    assert found.fits.value > 2048
    [note] = found.notes
    assert note == "pythia-70m was made for 2048 positions; what is beyond would fit, whether or not it is of use"


def test_not_even_one_is_an_error_with_advice() -> None:
    with pytest.raises(VramprobeError, match=r"not even batch_size 1 with seq_len 1024 fits .*--min-gpus"):
        api.max_batch_size(gpu="RTX-4090", model="llama-3.1-8b", method="full", seq_len=1024)


def test_the_largest_model_is_the_largest_that_fits() -> None:
    words = {"gpu": "RTX-4090", "method": "qlora", "batch_size": 2, "seq_len": 1024, "gradient_checkpointing": True}
    found = api.largest_model(**words)
    fits, _ = values(found)
    sizes = {entry.name: entry.n_params for entry in api.models()}
    assert answer(**words, model=fits) == "fits"
    larger = [name for name in sizes if sizes[fits] < sizes[name] < 44e9 and name not in found.not_judged]
    assert larger
    assert {answer(**words, model=name) for name in larger} <= {"tight", "does not fit"}
    assert all(sizes[name] > sizes[fits] for name in found.not_judged)
    assert "is at hand" in found.not_judged["nemotron-3-nano-30b-a3b"]


def test_of_models_without_a_recipe_those_that_may_be_the_answer_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest first, until one fits: of those whose weights the GPU holds."""
    words = {"gpu": "RTX-4090", "method": "lora", "batch_size": 2, "seq_len": 1024, "gradient_checkpointing": True}
    sizes = {entry.name: entry.n_params for entry in api.models()}
    recordings: list[str] = []

    def record(one: CellSpec, **_: Any) -> Prediction:
        recordings.append(one.model)
        if len(recordings) == 1:
            raise CannotRecord("its kernels are missing")
        size = sizes[one.model] * 2 + 3 * GIB
        return some_prediction(reserved_bytes=Interval(value=size, low=size, high=size))

    monkeypatch.setattr(recorded, "predict", record)
    found = api.largest_model(engine="recipe", **words)
    assert sizes[found.fits.value] > sizes[api.largest_model(**words).fits.value]
    assert recordings == sorted(recordings, key=lambda name: -sizes[name])
    assert recordings[-1] == found.fits.value
    usable = found.fits.verdict.usable_bytes
    assert all(2 * sizes[name] <= usable for name in recordings)
    assert found.not_judged[recordings[0]] == "its kernels are missing"


def test_models_too_short_for_the_length_are_named_and_not_judged() -> None:
    found = api.largest_model(gpu="6GiB", method="qlora", batch_size=2, seq_len=3000, gradient_checkpointing=True)
    assert "1024 learned positions" in found.not_judged["gpt2-xl"]


def test_no_model_fits_is_an_error() -> None:
    with pytest.raises(VramprobeError, match=r"none of the models of the catalog .* fits on L4"):
        api.largest_model(gpu="L4", method="full", batch_size=512, seq_len=8192)


def test_an_option_that_is_wrong_for_every_model_is_that_error() -> None:
    with pytest.raises(SpecError, match="method: 'lara' given"):
        api.largest_model(gpu="T4", method="lara", batch_size=1, seq_len=8)


def test_without_a_recipe_few_counts_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One recipe of several shapes says about where, recordings of the counts themselves exactly."""
    recordings: list[int] = []

    def known(one: CellSpec, more: int) -> Prediction:
        size = 4 * GIB + one.batch_size * GIB // 7 + more
        peak = Interval(value=size, low=size, high=round(size * 1.005))
        return some_prediction(peak_allocated_bytes=peak, reserved_bytes=None)

    def record(one: CellSpec, **_: Any) -> Prediction:
        recordings.append(one.batch_size)
        return known(one, GIB // 3)

    monkeypatch.setattr(recorded, "over_shapes", lambda *words, **_: lambda one: known(one, 0))
    monkeypatch.setattr(recorded, "predict", record)
    found = api.max_batch_size(gpu="RTX-4090", model="t5-base", method="lora", seq_len=64)
    usable = usable_bytes(find_gpu("RTX-4090"), device_is_known=False)
    assert found.tight.value == (usable - 4 * GIB - GIB // 3) * 7 // GIB
    assert len(recordings) == len(set(recordings)) <= 8
    recordings.clear()
    monkeypatch.setattr(recorded, "over_shapes", other_branch)
    assert api.max_batch_size(gpu="RTX-4090", model="t5-base", method="lora", seq_len=64).tight == found.tight
    assert len(recordings) <= 10


def other_branch(*words: Any, **options: Any) -> Any:
    raise CannotRecord("at 3 x 64 tokens the step asks the allocator in another order")


CELL = ["--model", "llama-3.1-8b", "--method", "qlora"]
CARD, ONE = ["--gpu", "RTX-4090"], ["--seq-len", "8", "--batch-size", "1"]


def test_the_command_line_asks_and_answers() -> None:
    words = ["predict", *CELL, "--gradient-checkpointing", "--seq-len", "1024", *CARD, "--max-batch"]
    shown = vramprobe(*words)
    assert shown.returncode == 0, shown.stderr
    expected = api.max_batch_size(gpu="RTX-4090", seq_len=1024, widen=True, **QLORA_8B)
    assert f"the largest batch size that fits is {expected.fits.value} " in shown.stdout
    assert f"the largest batch size that is tight is {expected.tight.value} " in shown.stdout
    written = vramprobe(*words, "--json")
    assert Largest.model_validate_json(written.stdout) == expected


def test_the_command_lines_verdict_is_that_of_the_forward_question() -> None:
    """Options that nobody named widen both: at the largest that fits predict says fits, and one row more is tight."""
    found = api.max_batch_size(gpu="RTX-4090", seq_len=1024, widen=True, **QLORA_8B)
    fits, tight = values(found)
    batches = (fits, fits + 1, tight, tight + 1)
    forward = [api.predict(gpu="RTX-4090", widen=True, batch_size=one, seq_len=1024, **QLORA_8B) for one in batches]
    assert [one.verdict.verdict for one in forward] == ["fits", "tight", "tight", "does not fit"]
    assert found.fits.verdict == forward[0].verdict
    narrow = api.max_batch_size(gpu="RTX-4090", seq_len=1024, **QLORA_8B)
    assert narrow.fits.value > fits


def test_a_verdict_of_does_not_fit_says_how_to_ask_for_the_fewest_gpus() -> None:
    words = ["predict", "--model", "llama-3.2-1b", "--method", "full", "--batch-size", "1", "--seq-len", "4k"]
    words += ["--gpu", "8GiB"]
    written = json.loads(vramprobe(*words, "--json").stdout)
    assert written["verdict"]["verdict"] == "does not fit"
    assert "min_gpus" not in written
    assert "How many of it hold the run: --min-gpus" in vramprobe(*words).stdout


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--seq-len", "8"], 2, "Missing --batch-size; or ask for it: --max-batch"),
        ([*ONE, "--max-batch", *CARD], 2, "so drop --batch-size"),
        (["--max-batch", "--largest-model", *CARD], 2, "different questions; ask one at a time"),
        (["--seq-len", "8", "--max-batch"], 2, "name it: --gpu RTX-4090"),
        ([*ONE, "--largest-model", *CARD], 2, "so drop --model"),
        ([*ONE, "--min-gpus", "--num-gpus", "2", *CARD], 2, "--num-gpus 2: not an option of --min-gpus"),
        ([*ONE, "--sharding", "zero3"], 1, "give both or neither"),
        ([*ONE, "--sharding", "zero9", "--num-gpus", "2"], 1, "allowed: ddp, zero1"),
        ([*ONE, "--sharding", "fsdp", "--num-gpus", "0"], 1, "must be from 1 to"),
        ([*ONE, "--min-gpus", "--sharding", "ddp", *CARD], 1, "ddp divides nothing"),
        (["--seq-len", "900000", "--max-batch", *CARD], 1, "not even batch_size 1 with seq_len 900000 fits"),
    ],
)
def test_contradictions_are_clear_errors(words: list[str], code: int, message: str) -> None:
    done = vramprobe("predict", *CELL, *words)
    assert done.returncode == code
    text = " ".join(done.stderr.replace("│", " ").split())
    assert message in text, text


def test_where_no_model_could_be_judged_it_says_why() -> None:
    with pytest.raises(VramprobeError, match=r"none of \d+ models could be judged; --engine recipe records"):
        api.largest_model(gpu="T4", method="qlora", batch_size=1, seq_len=512, images=1)


def test_the_recipes_that_ship_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded: exact around the recorded rows, said to be near beyond; fewer tokens let more rows in."""
    monkeypatch.setattr(recorded, "find_recipe", None)
    words = {"model": "qwen3.5-2b", "method": "lora", "gradient_checkpointing": True, "seq_len": 2048}
    found = api.max_batch_size(gpu="L4", **words)
    again = api.predict(gpu="L4", batch_size=found.fits.value, **words)
    assert found.fits.prediction.peak_allocated_bytes == again.peak_allocated_bytes
    larger = api.max_batch_size(gpu="B200", **words)
    assert larger.fits.value > 5
    assert any("near, not exact" in note for note in larger.fits.prediction.warnings)
