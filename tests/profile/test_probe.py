"""A command's recipe from a probed run: sizes at shapes that never ran, branches, what follows from no shape."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from profile_factory import MODEL, Script, write_launcher
from typer.testing import CliRunner

from vramprobe import api
from vramprobe.catalog import find_gpu, gpu_or_size
from vramprobe.cli.verbs import app
from vramprobe.errors import StoreError, VramprobeError
from vramprobe.predict.from_run import largest_of_run, predict_run, run_on_gpus
from vramprobe.predict.frontier import frontier_of_run
from vramprobe.profile.hook import probe_batches
from vramprobe.profile.probe import NoCommandRecipe, command_recipe
from vramprobe.recipe.command import FILE_NAME, UnknownBranch, read_command, write_command
from vramprobe.units import GIB

torch = pytest.importorskip("torch")

LOADING, EARLY = 60 * 2**20, 100_007  # freed before the steps, and in the second of them
WEIGHT, STATE, SAVED_BY_TOKEN, LOGITS_BY_TOKEN, CACHE = 3 * 2**20 + 1, 5 * 2**20 + 3, 4096, 20_000, 70_001
OWN = (4, 256)
SHAPES = [
    (5, 256),
    (8, 256),
    (4, 128),
    (2, 384),
    (5, 512),
    (8, 192),
    (4, 1024),
    (1, 256),
    (1, 128),
    (1, 512),
    (1, 2048),
]
HELD_OUT = [(5, 320), (1, 320)]


def line(number: int) -> tuple[tuple[str, int, str], ...]:
    return (("/srv/train.py", number, "step"),)


def sizes(rows: int, length: int) -> dict[str, int]:
    """Bytes of each request of a step."""
    tokens = rows * length
    return {
        "batch": tokens * 8,
        "saved": tokens * SAVED_BY_TOKEN + 12,
        "scores": rows * 2 * length * length,
        "copy": tokens * 16 if rows > 1 else 0,  # one row is a view
        "logits": tokens * LOGITS_BY_TOKEN,
    }


def probed(
    shapes: list[tuple[int, int]] = SHAPES, odd: Callable[[int, int], int] | None = None, micro_steps: int = 1
) -> Script:
    """Three steps of OWN, a fourth of it, and one of each shape. ``odd``: bytes of one more temporary."""
    script, early = Script(device_total_bytes=2**40), 0
    free = iter(range(0x100000000000, 2**60, 0x10000000000))
    with script.phase("load"):
        weight, batch = next(free), next(free)
        script.alloc(weight, WEIGHT, line(1))
        script.alloc(of_load := next(free), LOADING, line(8))
        script.free(of_load)
        script.alloc(batch, sizes(*OWN)["batch"], line(2))
    played = [*([OWN] * 4), *shapes, *HELD_OUT]
    for step, (rows, length) in enumerate(played, 1):
        its = sizes(rows, length)
        if step > 4:
            script.say(
                "batch", step=step, batch=0, rows=rows, width=length, held_out=step > 4 + len(shapes), indices=[]
            )
        for micro_step in range(1, micro_steps + 1):
            with script.phase("forward", step, micro_step):
                if step == 2 and micro_step == 1:
                    script.free(early)
                if step > 1 or micro_step > 1:
                    script.free(batch)
                    script.alloc(batch := next(free), its["batch"], line(2))
                saved, scores, logits = next(free), next(free), next(free)
                script.alloc(saved, its["saved"], MODEL)
                script.alloc(scores, its["scores"], MODEL)
                if its["copy"]:
                    script.alloc(copy := next(free), its["copy"], line(3))
                    script.free(copy)
                script.alloc(logits, its["logits"], line(4))
            with script.phase("backward", step, micro_step):
                if micro_step == 1:
                    gradient = next(free)
                    script.alloc(gradient, WEIGHT, ())
                if odd is not None:
                    script.alloc(other := next(free), odd(rows, length), line(5))
                    script.free(other)
                script.free(logits, scores, saved)
        with script.phase("optimizer_step", step):
            if step == 1:
                script.alloc(state := next(free), STATE, line(6))
                script.alloc(next(free), CACHE, line(7))
                script.alloc(early := next(free), EARLY, line(9))
                script.holds("weights", weight)
                script.holds("optimizer_state", state)
        with script.phase("zero_grad", step):
            script.free(gradient)
        script.say("step", step=step)
        if step == 3:
            script.say("probe", steps=3, rows=OWN[0], width=OWN[1], micro_steps=micro_steps, num_shapes=len(shapes))
    script.say("end", why="stopped", num_alloc_retries=0, num_ooms=0)
    return script


def peak_bytes(rows: int, length: int) -> int:
    """Bytes requested at the peak of a step like those above."""
    its = sizes(rows, length)
    kept = WEIGHT + STATE + CACHE + its["batch"] + its["saved"] + its["scores"]
    return kept + max(its["logits"] + WEIGHT, its["copy"])


def recipe_in(folder: Path, script: Script) -> Any:
    script.write(folder)
    write_launcher(folder, stopped=True)
    recipe = command_recipe(folder, ["python", "train.py"], "RTX-4090")
    write_command(recipe, folder / FILE_NAME)
    return read_command(folder)


def requested(recipe: Any, shape: tuple[int, int]) -> int:
    phases = recipe.branch_of(shape).recipe.deep(shape).phases
    return max(one.allocated_peak_bytes for one in phases if one.step is not None)


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_shapes_that_never_ran_request_what_is_known(tmp_path: Path, micro_steps: int) -> None:
    recipe = recipe_in(tmp_path, probed(micro_steps=micro_steps))
    for shape in [OWN, (3, 77), (16, 8192), (1, 31), (1, 100_000), (64, 256), *SHAPES]:
        assert requested(recipe, shape) == peak_bytes(*shape), shape
    assert [one.shape for one in recipe.held_out] == HELD_OUT
    for one in recipe.held_out:
        assert one.requested_bytes == one.predicted_requested_bytes == peak_bytes(*one.shape)
    assert (recipe.shape, recipe.is_cut, recipe.micro_steps) == (OWN, True, micro_steps)
    assert len(recipe.branches) == 2
    assert all(not one.loose for one in recipe.branches)
    assert (tmp_path / FILE_NAME).stat().st_size < 6000


def test_the_answer_has_causes_and_a_verdict(tmp_path: Path) -> None:
    recipe_in(tmp_path, probed())
    found = predict_run(tmp_path, batch_size=16, seq_len=1024)
    prediction = found.prediction
    its = sizes(16, 1024)
    assert prediction.peak_phase == "backward"
    assert prediction.terms["weights"] == WEIGHT
    assert prediction.terms["optimizer_state"] == STATE
    made_in_forward = its["batch"] + its["saved"] + its["scores"] + its["logits"]
    assert prediction.terms["saved_activations"] == made_in_forward
    assert sum(prediction.terms.values()) == prediction.peak_allocated_bytes.value
    assert 0 <= prediction.peak_allocated_bytes.value - peak_bytes(16, 1024) < 12 * 512
    assert prediction.reserved_bytes.value >= prediction.peak_allocated_bytes.value
    said = " ".join(prediction.warnings)
    assert "16 x 1,024 never ran" in said
    assert "error on the shapes held out: 5 x 320: 0 B requested" in said
    assert predict_run(tmp_path, batch_size=1, seq_len=31).prediction.reserved_bytes.value >= LOADING  # stays cached
    verdicts = {one.gpu: one for one in run_on_gpus(found, "all")}
    assert verdicts["RTX-4090"].verdict.verdict == "fits"
    assert verdicts["T4"].verdict is None
    assert "--emulate T4" in verdicts["T4"].why
    assert verdicts["MI300X"].verdict is None
    size = next(iter(run_on_gpus(found, ["500MiB"])))
    assert size.verdict.verdict == "does not fit"


def test_the_largest_batch_is_the_last_that_fits(tmp_path: Path) -> None:
    recipe_in(tmp_path, probed())
    largest = largest_of_run(tmp_path, "batch_size", gpu="RTX-4090", seq_len=2048)
    assert largest.fits.verdict.verdict == "fits"
    assert predict_run(tmp_path, batch_size=largest.fits.value + 1, seq_len=2048).on(_gpu())[1].verdict == "tight"
    assert (
        predict_run(tmp_path, batch_size=largest.tight.value + 1, seq_len=2048).on(_gpu())[1].verdict == "does not fit"
    )
    longest = largest_of_run(tmp_path, "seq_len", gpu="RTX-4090", batch_size=1)
    table = frontier_of_run(tmp_path, gpu="RTX-4090").rows
    assert [row.batch_size for row in table] == [2**power for power in range(len(table))]
    assert len(table) > 1
    assert table[0].fits == (longest.fits and longest.fits.value)
    assert longest.fits.value % 64 == 0
    assert predict_run(tmp_path, batch_size=1, seq_len=longest.tight.value + 64).on(_gpu())[1].verdict == "does not fit"
    with pytest.raises(VramprobeError, match="not even batch_size 1 fits"):
        largest_of_run(tmp_path, "batch_size", gpu="1025MiB", seq_len=2048)


def _gpu() -> Any:
    return find_gpu("RTX-4090")


def test_an_order_between_two_recorded_ones_is_refused(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, probed([one for one in SHAPES if one[0] != 2]))
    assert requested(recipe, (4, 77)) == peak_bytes(4, 77)
    with pytest.raises(UnknownBranch, match=r"2 x 512.*train.py:3 step.*between 1 and 4 rows.*Recorded.*1 x 2,048"):
        recipe.branch_of((2, 512))


def test_what_follows_from_no_shape_is_named_and_never_fits_at_the_edge(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, probed(odd=lambda rows, length: rows * length * 4000 + 512 * (rows * length % 7)))
    assert {one.line for branch in recipe.branches for one in branch.loose} == {"train.py:5 step"}
    found = predict_run(recipe, batch_size=4, seq_len=1024)
    assert any("train.py:5 step" in one for one in found.prediction.warnings)
    needed = found.prediction.reserved_bytes.high
    edge = [(needed + 4 * 1024 * by_token) * 100 // 95 + GIB for by_token in (2000, 5000)]
    verdicts = [found.on(gpu_or_size(f"{size // 2**20}MiB"))[1] for size in edge]
    assert [one.verdict for one in verdicts] == ["tight", "fits"]
    assert "do not follow from the shape" in verdicts[0].reason


def test_far_beyond_the_probed_shapes_fits_asks_for_more_room(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, probed())
    most = max(rows * length for branch in recipe.branches for rows, length in branch.shapes)
    near, far = (predict_run(recipe, batch_size=1, seq_len=length) for length in (2 * most, 2 * most + 64))
    assert [any("not checked so far out" in note for note in one.prediction.warnings) for one in (near, far)] == [
        False,
        True,
    ]
    needed = far.prediction.reserved_bytes.high
    sizes_mib = [-(-needed * percent // 100 // 2**20) + 1024 for percent in (115, 130)]
    assert [far.on(gpu_or_size(f"{size}MiB"))[1].verdict for size in sizes_mib] == ["tight", "fits"]
    assert near.on(gpu_or_size(f"{sizes_mib[0]}MiB"))[1].verdict == "fits"


def _new(folder: Path) -> Path:
    (folder / "other").mkdir()
    return folder / "other"


def test_a_length_that_was_not_varied_is_refused(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, probed([(5, 256), (7, 256), (8, 256), (12, 256), (1, 256), (2, 256)]))
    assert not recipe.is_cut or recipe.held_out  # the shapes held out have another length
    only = probed([(rows, 256) for rows in (5, 7, 8, 12, 1, 2)])
    only.lines = [one for one in only.lines if one.get("width") != 320]
    recipe = recipe_in(_new(tmp_path), only)
    assert not recipe.is_cut
    with pytest.raises(UnknownBranch, match="only 256 is known; drop --seq-len"):
        recipe.branch_of((4, 512))
    assert requested(recipe, (40, 256)) == peak_bytes(40, 256)


@pytest.mark.parametrize("count", [0, 2])
def test_a_run_that_ends_early_leaves_no_recipe(tmp_path: Path, count: int) -> None:
    script = probed(SHAPES[:count])
    script.lines = [one for one in script.lines if not one.get("held_out")]
    with pytest.raises(NoCommandRecipe, match="give it more"):
        recipe_in(tmp_path, script)


def test_a_run_without_a_history_says_which_reason_is_known(tmp_path: Path) -> None:
    for why in ("this second run ended before they were written", "the program keeps a memory history of its own"):
        script = probed()
        if "program" in why:
            script.say("warning", message=f"{why}: which lines asked for memory is not known")
        (folder := tmp_path / str(len(why))).mkdir()
        script.write(folder, with_history=False)
        write_launcher(folder, stopped=True)
        with pytest.raises(NoCommandRecipe, match=f"no allocations were recorded: {why}"):
            command_recipe(folder, ["python", "train.py"], "RTX-4090")


def test_a_run_whose_loop_has_no_loader_says_so(tmp_path: Path) -> None:
    script = probed()
    next(one for one in script.lines if one["line"] == "probe").clear()
    script.lines = [one for one in script.lines if one]
    script.say("probe", why="its loop takes no batches from a torch DataLoader")
    with pytest.raises(NoCommandRecipe, match="no batches from a torch DataLoader"):
        recipe_in(tmp_path, script)


def _damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_damaged, "damaged"),
        (_flipped, "damaged|is no recipe"),
        (lambda path: path.write_text("x"), "damaged"),
        (lambda path: path.write_bytes(b""), "damaged"),
        (lambda path: path.unlink(), "older vramprobe or with --no-probe"),
    ],
)
def test_a_damaged_or_missing_recipe_is_one_line(tmp_path: Path, change: Callable[[Path], Any], said: str) -> None:
    recipe_in(tmp_path, probed())
    change(tmp_path / FILE_NAME)
    with pytest.raises(StoreError, match=said) as caught:
        read_command(tmp_path)
    assert "\n" not in str(caught.value)


def test_other_folders_and_formats_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="there is no run at"):
        read_command(tmp_path / "missing")
    with pytest.raises(StoreError, match="no profile's folder"):
        read_command(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"no_recipe": "an inference engine sizes its KV cache"}))
    with pytest.raises(StoreError, match="an inference engine"):
        read_command(tmp_path)
    recipe = recipe_in(tmp_path, probed())
    monkeypatch.setattr("vramprobe.recipe.command.FORMAT", 7)
    write_command(recipe, tmp_path / FILE_NAME)
    monkeypatch.undo()
    with pytest.raises(StoreError, match="format 7, and this vramprobe reads 1: profile the command again"):
        read_command(tmp_path)


def test_a_full_disk_leaves_the_recipe_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_in(tmp_path, probed())
    before = (tmp_path / FILE_NAME).read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        write_command(recipe, tmp_path / FILE_NAME)
    assert (tmp_path / FILE_NAME).read_bytes() == before
    assert os.listdir(tmp_path).count(FILE_NAME) == 1
    assert not list(tmp_path.glob("*.part"))


def test_the_api_answers_without_a_gpu_to_emulate(tmp_path: Path) -> None:
    recipe_in(tmp_path, probed())
    assert api.predict_run(tmp_path, batch_size=2).shape == (2, 256)
    assert api.predict_run(tmp_path / FILE_NAME, seq_len=512).shape == (4, 512)
    with pytest.raises(VramprobeError, match="batch_size: 0 given"):
        api.predict_run(tmp_path, batch_size=0)


def batch(rows: int = 4, length: int = 12) -> dict[str, Any]:
    ids = torch.arange(rows * length).reshape(rows, length)
    return {
        "input_ids": ids,
        "mask": torch.zeros(rows, 1, length, length),
        "class": torch.arange(rows),
        "pixels": torch.zeros(rows, 3, 8, 8),
        "names": ["a"] * rows,
        "scale": torch.tensor(1.0),
    }


def test_rows_are_taken_or_repeated_and_tokens_cut_or_repeated() -> None:
    base = probe_batches.ProbedBatch(batch(), 4)
    assert base.shape == (4, 12)
    longer = base.reshaped((6, 20))
    assert {name: list(one.shape) for name, one in longer.items() if name not in ("names", "scale")} == {
        "input_ids": [6, 20],
        "mask": [6, 1, 20, 20],
        "class": [6],
        "pixels": [6, 3, 8, 8],
    }
    assert longer["class"].tolist() == [0, 1, 2, 3, 0, 1]
    assert longer["input_ids"][4, 12:15].tolist() == [0, 1, 2]
    assert list(base.reshaped((1, 5))["input_ids"].shape) == [1, 5]
    kept = base.reshaped(None)
    kept.pop("class")  # as a Trainer does
    assert "class" in base.reshaped(None)


def test_pairs_keep_their_halves_and_features_their_width() -> None:
    pairs = probe_batches.ProbedBatch(
        {"input_ids": torch.arange(8)[:, None].repeat(1, 6)}, 4
    )  # DPO: chosen, then rejected
    assert pairs.shape == (4, 6)
    assert pairs.reshaped((3, 6))["input_ids"][:, 0].tolist() == [0, 1, 2, 4, 5, 6]
    features = probe_batches.ProbedBatch([torch.zeros(4, 784), torch.zeros(4, dtype=torch.long)], 4)
    assert (features.shape, features.length) == ((4, 784), None)
    assert list(features.reshaped((9, 784))[0].shape) == [9, 784]
    assert probe_batches.ProbedBatch(["a prompt"], 1).shape is None


@pytest.mark.parametrize("own", [(4, 256), (1, 2048), (8, 1024), (2, 1001), (16, 16), (1, 7)])
def test_the_probed_shapes_tell_rules_and_branches_apart(own: tuple[int, int]) -> None:
    for most in (None, own[1]):
        shapes = [one for one, held_out in probe_batches.probed_shapes(*own, most) if not held_out]
        assert len(shapes) <= 20
        assert all(1 <= length <= (most or 10**6) for _, length in shapes)
        everything = {own, *shapes}
        assert {1, 2} <= {rows for rows, _ in everything}
        assert any(rows * length > 3072 for rows, length in everything)
        if most is None:
            assert len({rows for rows, _ in everything if rows > 1}) >= 3
            assert len({length for rows, length in everything if rows == 1}) >= 4


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--batch-size", "16", "--gpu", "RTX-4090"], 0, "fits"),
        (["--batch-size", "4096", "--gpu", "RTX-4090"], 3, "does not fit"),
        (["--batch-size", "4096", "--gpu", "RTX-4090", "--exit-zero"], 0, "does not fit"),
        (["--gpu", "all"], 0, "not judged"),
        (["--gpu", "T4"], 1, "profile the command with --emulate T4"),
        (["--max-batch", "--gpu", "RTX-4090"], 0, "largest batch size that fits"),
        (["--max-seq-len", "--gpu", "RTX-4090"], 0, "largest sequence length that fits"),
        (["--max-seq-len"], 2, "name it: --gpu RTX-4090"),
        (["--max-batch", "--batch-size", "2", "--gpu", "L4"], 2, "drop --batch-size"),
        (["--max-batch", "--max-seq-len", "--gpu", "L4"], 0, "the longest sequence for each number of rows"),
        (["--model", "gpt2"], 2, "--model gpt2: not an option of --from"),
        (["--method", "lora"], 2, "--method lora: not an option of --from"),
        (["--engine", "recipe"], 2, "--engine recipe: not an option of --from"),
        (["--num-gpus", "2"], 2, "--num-gpus 2: not an option of --from"),
    ],
)
def test_the_command_line_answers_and_refuses_what_it_does_not_read(
    tmp_path: Path, words: list[str], status: int, said: str
) -> None:
    recipe_in(tmp_path, probed())
    found = CliRunner().invoke(app, ["predict", "--from", str(tmp_path), *words], env={"COLUMNS": "200"})
    text = found.output + (str(found.exception) if isinstance(found.exception, VramprobeError) else "")
    assert found.exit_code == status or isinstance(found.exception, VramprobeError), text
    assert said in " ".join(text.replace("│", " ").split())


def test_json_has_the_verdicts(tmp_path: Path) -> None:
    recipe_in(tmp_path, probed())
    found = CliRunner().invoke(app, ["predict", "--from", str(tmp_path), "--gpu", "all", "--json"])
    verdicts = {one["gpu"]: one["verdict"] for one in json.loads(found.output)["gpus"]}
    assert verdicts["H100-SXM"]["verdict"] == "fits"
    assert verdicts["T4"] is None
    found = CliRunner().invoke(app, ["predict", "--from", str(tmp_path), "--gpu", "L4", "--json"])
    assert json.loads(found.output)["verdict"]["verdict"] == "fits"


def test_a_cell_still_needs_its_model_and_method() -> None:
    every = "--model, --method, --batch-size, --seq-len"
    for words, said in ((["--model", "gpt2", "--batch-size", "1", "--seq-len", "8"], "--method"), ([], every)):
        found = CliRunner().invoke(app, ["predict", *words], env={"COLUMNS": "200"})
        assert found.exit_code == 2
        assert f"Missing {said};" in " ".join(found.output.replace("│", " ").split()), found.output
