"""The loop around a step: what predict says of each is what the loops of examples/loops.py took."""

import ast
import csv
import json
from pathlib import Path

import pytest
from command_line import HERE, vramprobe
from emulated import require_emulation
from grids import exhaustive, grid
from predictions import some_prediction
from typer.testing import CliRunner

from vramprobe import api
from vramprobe.cli.verbs import app
from vramprobe.errors import SpecError
from vramprobe.predict.questions import cell
from vramprobe.predict.unknowns import other_loop_bytes
from vramprobe.recipe.recipe import recorded_words
from vramprobe.recipe.shipped import entry_key
from vramprobe.trainers import LOOPS
from vramprobe.units import format_bytes

EXAMPLE = Path(HERE) / "examples" / "loops.py"
CARD = "A100-80GB-SXM"
#: A loop of examples/loops.py → the one of --loop that stands for it.
NAMES = {
    "trainer": "trainer", "plain": "trainer", "zero_grad_first": "trainer", "scaled": "trainer", "evaluates": "trainer",
    "keeps_outputs": "keeps-outputs", "step_function": "step-function", "accelerated": "accelerate",
    "zero_grad_late": "late-zero-grad",
}  # fmt: skip
#: What eight layers of models took in these loops: emulated, one process each, the highest of steps 2 to 4.
EMULATED = Path(__file__).parents[1] / "data" / "loops.csv"
#: Scalars that a loop holds beside the model's own: losses, a GradScaler's numbers, each a block.
SCALARS_BYTES = 3 << 10
SMALL = {"model": "smollm2-135m", "method": "lora", "batch_size": 2, "seq_len": 512, "device": "cuda"}


def runs():
    with EMULATED.open() as file:
        return list(csv.DictReader(file))


def options(run):
    given = {name: run[name] for name in ("model", "method", "dtype", "autocast")}
    given |= {"num_layers": int(run["layers"]), "batch_size": int(run["rows"]), "seq_len": int(run["length"])}
    given |= {"grad_accum": int(run["accumulate"]), "gradient_checkpointing": run["gradient_checkpointing"] == "yes"}
    return given | {"loop": NAMES[run["loop"]]}


def test_every_example_stands_for_a_loop_and_every_loop_has_one():
    tree = ast.parse(EXAMPLE.read_text())
    [listed] = [one.value for one in tree.body if isinstance(one, ast.Assign) and one.targets[0].id == "LOOPS"]
    assert {one.id for one in listed.elts} == set(NAMES) == {run["loop"] for run in runs()}
    assert set(NAMES.values()) == set(LOOPS)


@exhaustive
def test_a_loop_needs_what_its_example_took():
    """Adapters to the byte but for scalars; all weights within 0.1 %, 0.4 % where micro-batches or gradients add up."""
    require_emulation()
    counts = dict.fromkeys(LOOPS, 0)
    for run in runs():
        given = options(run)
        if run["use_cache"] == "yes":
            continue
        found = api.predict(gpu=CARD, engine="recipe", **given)
        took = int(run["allocated_bytes"])
        off = found.peak_allocated_bytes.value - took
        is_wide = given["grad_accum"] > 1 or given["loop"] == "late-zero-grad"
        within = SCALARS_BYTES if run["method"] == "lora" else took * (0.004 if is_wide else 0.001)
        assert abs(off) <= within, run
        counts[given["loop"]] += 1
    assert min(counts.values()) >= 3, counts


@pytest.mark.parametrize(
    ("more", "size", "raised"),
    grid(
        [
            ({}, 2, 4),
            ({"method": "full"}, 2, 2),
            ({"method": "full", "dtype": "fp32"}, 4, 4),
            ({"method": "qlora"}, 2, 4),
            ({"method": "qlora", "autocast": "none"}, 4, 4),  # whose head peft has raised
            ({"grad_accum": 7}, 2, 4),
        ],
        ({}, 2, 4),
    ),
)
def test_kept_logits_stand_at_every_moment(more, size, raised):
    """The peak is a Trainer's and the logits, ``size`` bytes each; a real T4's agree (benchmarks/truth/t4.md)."""
    require_emulation()
    found = {loop: api.predict(loop=loop, gpu=CARD, **SMALL | more) for loop in LOOPS if loop != "late-zero-grad"}
    peaks = {loop: one.peak_allocated_bytes.value for loop, one in found.items()}
    logits, usual = 1024 * 49_152, peaks["trainer"]
    assert abs(peaks["keeps-outputs"] - usual - logits * size) <= SCALARS_BYTES
    assert abs(peaks["accelerate"] - usual - logits * raised) <= SCALARS_BYTES
    assert usual - SCALARS_BYTES <= peaks["step-function"] <= peaks["keeps-outputs"] + SCALARS_BYTES


def test_an_answer_names_the_loop_that_it_assumes_and_what_the_commonest_other_needs():
    found = api.predict(gpu=CARD, **SMALL)
    [note] = [one for one in found.warnings if "--loop" in one]
    needed = format_bytes(found.peak_allocated_bytes.value + 1024 * 49_152 * 2)
    assert note == f"{needed} allocated if your loop keeps its outputs (--loop keeps-outputs); a Trainer's is assumed"
    for more in ({"loop": "trainer"}, {"loop": "plain"}):
        assert not any("--loop" in one for one in api.predict(gpu=CARD, **SMALL, **more).warnings), more
    assert other_loop_bytes(cell(**SMALL, loss="chunked_nll")) == 0


def test_trl_is_a_trainer_with_its_loss():
    assert cell(**SMALL, loop="trl") == cell(**SMALL, loss="chunked_nll")
    assert cell(**SMALL, loop="trl", trainer="dpo") == cell(**SMALL, trainer="dpo")
    with pytest.raises(SpecError, match="loop trl means loss=chunked_nll, but loss=nll was given"):
        cell(**SMALL, loop="trl", loss="nll")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"trainer": "dpo", "loop": "accelerate"}, "trainer dpo has a loop of its own; leave loop accelerate out"),
        ({"loop": "late-zero-grad", "grad_accum": 2}, "frees the gradients in each micro-step"),
        ({"loop": "keeps-outputs", "sharding": "ddp", "num_gpus": 2}, "loop keeps-outputs is known of one GPU"),
        ({"loop": "keeps"}, "loop: 'keeps' given; allowed: 'trainer', 'keeps-outputs'"),
    ],
)
def test_a_loop_that_cannot_be_is_refused(more, said):
    with pytest.raises(SpecError, match=said):
        api.predict(gpu=CARD, **SMALL, **more)


@pytest.mark.parametrize("verb", ["recommend", "techniques", "grpo"])
def test_a_verb_that_reads_no_loop_refuses_it(verb):
    done = vramprobe(verb, "--model", "smollm2-135m", "--loop", "accelerate")
    assert done.returncode == 2
    assert f"{verb} has no option --loop: predict and measure have it" in done.stderr


def test_from_python_too():
    with pytest.raises(SpecError, match="loop: a recommendation is of a Trainer's loop"):
        api.recommend(model="smollm2-135m", method="lora", seq_len=512, tokens=10**6, loop="accelerate")
    with pytest.raises(SpecError, match="loop: GRPO has TRL's own"):
        api.grpo(model="smollm2-135m", method="lora", gpu=CARD, loop="accelerate")


def test_fp16_is_enough_and_its_autocast_is_said(monkeypatch):
    precision = lambda **words: [getattr(cell(**SMALL | words), name) for name in ("dtype", "autocast")]  # noqa: E731
    assert precision(dtype="fp16") == precision(autocast="fp16") == ["fp16", "fp16"]
    assert precision(method="full", dtype="fp16") == ["fp16", "none"]
    assert precision(method="full", autocast="fp16") == ["fp32", "fp16"]
    with pytest.raises(SpecError, match=r"--dtype bf16 under --autocast fp16 mixes .* take --autocast bf16"):
        precision(dtype="bf16", autocast="fp16")
    with pytest.raises(SpecError, match="GradScaler refuses to unscale fp16 gradients: --dtype fp32"):
        precision(method="full", dtype="fp16", autocast="fp16")
    words = ("predict", "--model", "smollm2-135m", "--method", "lora", "--batch-size", "1", "--seq-len", "64")
    monkeypatch.setattr("vramprobe.predict.recorded.predict", lambda *given, **more: some_prediction())
    shown = lambda *more: CliRunner().invoke(app, [*words, *more]).output  # noqa: E731
    assert "--dtype fp16: autocast fp16 and fp32 adapters" in shown("--dtype", "fp16")
    assert "--dtype fp16:" not in shown("--dtype", "fp16", "--autocast", "none")


def test_recipes_from_before_there_were_loops_are_found():
    assert "loop" not in recorded_words(cell(**SMALL))
    assert recorded_words(cell(**SMALL, loop="accelerate"))["loop"] == "accelerate"
    assert entry_key(cell(**SMALL), CARD) != entry_key(cell(**SMALL, loop="accelerate"), CARD)


@pytest.mark.parametrize("name", grid(NAMES))
def test_an_example_takes_what_is_recorded_at_a_shape_that_never_ran(name, tmp_path):
    require_emulation()
    words = ("profile", "--emulate", CARD, "--empty-weights", "--no-speed", "--steps-only", "--json")
    command = ("python", str(EXAMPLE), name, "HuggingFaceTB/SmolLM2-135M", "--rows", "3", "--length", "320")
    done = vramprobe(*words, "--", *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [rank] = json.loads(done.stdout.splitlines()[-1])["ranks"]  # after what the loop itself prints
    given = SMALL | {"batch_size": 3, "seq_len": 320, "gpu": CARD, "loop": NAMES[name]}
    found = api.predict(engine="recipe", **given)
    assert abs(found.peak_allocated_bytes.value - rank["peak"]["allocated_bytes"]) <= SCALARS_BYTES
    assert abs(found.reserved_bytes.value / rank["peak"]["reserved_bytes"] - 1) < 0.02
