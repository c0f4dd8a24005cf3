"""Cells recorded on the emulated GPU: extended event for event, answered from the cache, refused with one line."""

import json
import subprocess
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from command_line import vramprobe
from emulated import recorded_recipe, require_emulation
from grids import exhaustive, grid

from vramprobe import api, catalog
from vramprobe.catalog.own import cache_folder
from vramprobe.catalog.shipped import data_file
from vramprobe.emulate.enter import entrance, installation_to_use
from vramprobe.emulate.installation import NotEmulatable
from vramprobe.emulate.values import hook
from vramprobe.errors import SpecError
from vramprobe.measure import nvml
from vramprobe.predict import at_hand, recorded
from vramprobe.predict.verdict import verdict
from vramprobe.profile.hook.journal import FOLDER_VARIABLE
from vramprobe.profile.launch import HOOK
from vramprobe.recipe import recorder, recording
from vramprobe.recipe.book import find_recipe, recorded_as
from vramprobe.recipe.packed import unpack
from vramprobe.recipe.recipe import NotOneBranch, recorded_words, without_values
from vramprobe.recipe.recorder import close_recorders
from vramprobe.recipe.shipped import BOOK, read_book
from vramprobe.records.outcomes import Error

#: The cells that are recorded whole as well: a family, its options.
RANKS = {"num_gpus": 4, "gradient_checkpointing": True}
CELLS = [
    ("smollm2-135m", {"method": "lora", "gradient_checkpointing": True}),
    ("smollm2-135m", {"method": "qlora"}),
    ("smollm2-135m", {"method": "full", "optim": "adamw-8bit", "grad_accum": 2}),
    ("qwen2.5-0.5b", {"method": "lora", "trainer": "dpo"}),
    ("smollm2-135m", {"method": "lora", "trainer": "grpo", "gradient_checkpointing": True}),
    ("qwen2.5-0.5b", {"method": "full", "recipe": "mixed"}),
    ("olmoe-1b-7b", {"method": "lora", "gradient_checkpointing": True}),
    ("qwen3.5-27b", {"method": "lora", "gradient_checkpointing": True}),
    ("smollm2-135m", {"method": "lora", "sharding": "fsdp", **RANKS}),
    ("smollm2-135m", {"method": "full", "sharding": "fsdp", "only_rank": 3, **RANKS}),
    ("smollm2-135m", {"method": "full", "sharding": "fsdp1", **RANKS}),
    ("smollm2-135m", {"method": "full", "sharding": "tp", **RANKS, "num_gpus": 3}),
]


@pytest.mark.parametrize(("model", "options"), grid(CELLS, *CELLS[:1]))
def test_the_extended_log_is_the_recorded_one(model: str, options: dict[str, Any]) -> None:
    spec = recorded_as(api.cell(model=model, device="cuda", batch_size=2, seq_len=64, **options))
    gpu = catalog.find_gpu("H100-SXM")
    made, seen = (recorded_recipe(spec, gpu, whole=whole) for whole in (False, True))
    assert made.checked is not None, "its layers did not repeat"
    assert seen.checked is None
    extended, whole = made.deep(), seen.deep()
    assert extended.phases == whole.phases
    assert [*map(extended.alive, extended.tops)] == [*map(whole.alive, whole.tops)]
    for name in ("size_bytes", "blocks", "causes", "streams"):
        assert np.array_equal(getattr(extended.log, name), getattr(whole.log, name)), name
    assert (made.facts, made.owned_bytes) == (seen.facts, seen.owned_bytes)


def test_nobody_who_watches_this_process_watches_a_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after ``vramprobe.watch()``, or under ``vramprobe profile``: two modes, of which torch would see one."""
    require_emulation()
    close_recorders()
    monkeypatch.setenv("PYTHONPATH", hook.site_folder(str(tmp_path), also=[HOOK]))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    spec = recorded_as(api.cell(model="smollm2-135m", device="cuda", batch_size=2, seq_len=64, method="lora"))
    made = recorded_recipe(spec, catalog.find_gpu("T4"))
    assert made.checked is not None
    close_recorders()


def test_predict_records_once_and_answers_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_emulation()  # on the GPU of the tests around it, whose recording process has loaded its libraries
    monkeypatch.setattr(recorded, "find_recipe", partial(find_recipe, folder=tmp_path))
    options = {"model": "smollm2-135m", "method": "lora", "batch_size": 1, "seq_len": 64, "engine": "recipe"}
    said: list[str] = []
    first = api.predict(gpu="H100-SXM", say=said.append, **options)
    assert [line for line in said if line.startswith("recording")]
    said.clear()
    assert api.predict(gpu="H100-SXM", say=said.append, **options) == first
    assert said == []
    assert first.engine == "recipe"
    assert sum(first.terms.values()) == first.peak_allocated_bytes.value
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(kept.read_bytes()[:100])
    assert api.predict(gpu="H100-SXM", say=said.append, **options) == first
    assert "is no recipe of this vramprobe" in said[0]


def test_models_that_differ_in_values_alone_share_a_recipe() -> None:
    """Their recordings are equal to the event; a table of positions, and a rope that depends on the length, stay."""
    gpu = catalog.find_gpu("H100-SXM")
    spec = recorded_as(api.cell(model="smollm2-135m", method="lora", device="cuda", batch_size=1, seq_len=64))
    values = {"rope_theta": 1e6, "rms_norm_eps": 1e-3, "eos_token_id": 7, "max_position_embeddings": 131072}
    other = spec.model_copy(update={"architecture": spec.architecture | values})
    assert recorded_words(other) == recorded_words(spec)
    one, same = (recorded_recipe(cell, gpu).deep() for cell in (spec, other))
    assert one.phases == same.phases
    assert np.array_equal(one.log.size_bytes, same.log.size_bytes)
    for name, value in (("hidden_size", 640), ("rope_scaling", {"rope_type": "yarn", "factor": 2.0})):
        differs = spec.model_copy(update={"architecture": spec.architecture | {name: value}})
        assert recorded_words(differs) != recorded_words(spec)
    gpt2 = api.cell(model="gpt2", method="lora", device="cuda", batch_size=1, seq_len=64)
    assert "max_position_embeddings" in without_values({"max_position_embeddings": 8}, learns_positions=True)
    assert recorded_words(gpt2)["architecture"]["n_positions"] == 1024


@exhaustive
def test_the_largest_batch_is_found_by_few_recordings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The answer's verdict is its own recording's; the recipe that ships finds the same batch."""
    require_emulation()
    monkeypatch.setattr(recorded, "find_recipe", partial(find_recipe, folder=tmp_path))
    options = {"model": "smollm2-135m", "method": "lora", "seq_len": 512, "gpu": "RTX-4090"}
    said: list[str] = []
    by_recipe = api.max_batch_size(engine="recipe", say=said.append, **options)
    shipped = api.max_batch_size(**options)
    assert by_recipe.tight.value == pytest.approx(shipped.tight.value, abs=1)
    assert by_recipe.fits.prediction.engine == "recipe"
    assert sum("run 1 of" in line for line in said) <= 6


@exhaustive
def test_sizes_over_shapes_are_those_of_a_recording() -> None:
    """Rules from four batches of one length give the fifth's log to the byte."""
    gpu = catalog.find_gpu("H100-SXM")
    options = {"model": "smollm2-135m", "method": "lora", "seq_len": 256, "gradient_checkpointing": True}
    base, other = (recorded_as(api.cell(device="cuda", batch_size=rows, **options)) for rows in (2, 11))
    recipe = recorded_recipe(base, gpu, shapes=[(3, 256), (5, 256), (8, 256)])
    seen = recorded_recipe(other, gpu)
    assert recipe.rules.num_unexplained == 0
    extended, whole = recipe.deep((11, 256)), seen.deep()
    assert extended.phases == whole.phases
    assert np.array_equal(extended.log.size_bytes, whole.log.size_bytes)
    assert np.array_equal(extended.log.blocks, whole.log.blocks)


@exhaustive
def test_ones_own_interpreter_records_with_its_own_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    require_emulation()
    monkeypatch.setattr(recorded, "find_recipe", partial(find_recipe, folder=tmp_path))
    options = {"model": "smollm2-135m", "method": "lora", "batch_size": 1, "seq_len": 64, "gpu": "RTX-4090"}
    usual = api.predict(engine="recipe", **options)
    own = api.predict(python=installation_to_use().python, **options)
    assert own == usual.model_copy(update={"step": own.step})  # a time is of the libraries that are set up
    assert len(list(tmp_path.iterdir())) == 2  # by its libraries' versions


@exhaustive
def test_a_gpu_of_this_machine_records_shallow_models(tmp_path: Path) -> None:
    """A process that takes the emulated GPU for its own; the recipe names no emulator where there is none."""
    require_emulation()
    way = entrance("RTX-4090")
    words = ["--model", "smollm2-135m", "--method", "lora", "--batch-size", "1", "--seq-len", "64", "--json"]
    environment = way.environment | {"VRAMPROBE_CACHE_DIR": str(cache_folder())}
    command = [way.python, "-m", "vramprobe", "predict", *words, "--engine", "measured", "--gpu", "A100-80GB"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rmtree(way.machine)
    found = json.loads(run.stdout)
    usual = api.predict(model="smollm2-135m", method="lora", batch_size=1, seq_len=64, gpu="RTX-4090", engine="recipe")
    assert found["peak_allocated_bytes"]["value"] == usual.peak_allocated_bytes.value
    assert found["reserved_bytes"]["value"] == usual.reserved_bytes.value


def test_a_recording_says_what_it_was_made_on() -> None:
    def said(**seen: Any) -> dict[str, str]:
        return recording._device_words(SimpleNamespace(environment=SimpleNamespace(**seen)))

    assert said(emulator="4", device_name="NVIDIA L4") == {"emulator": "4"}
    stack = said(emulator=None, device_name="NVIDIA L4")
    recipe = SimpleNamespace(stack=stack, checked=5, depths=(2, 3, 4, 5))
    assert at_hand._provenance(recipe).startswith("measured on this machine's NVIDIA L4 at 2, 3, 4 layers")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"python": "/no/python", "engine": "formula"}, "python is an interpreter to record with, and formula"),
        ({"python": "/no/python"}, "there is no interpreter at /no/python"),
        ({"engine": "measured"}, "NVML shows none"),
    ],
)
def test_what_else_to_record_with_is_refused_in_a_line(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_emulation()
    monkeypatch.setattr(nvml, "first_visible_gpu", lambda: None)
    with pytest.raises((SpecError, NotEmulatable), match=words):
        api.predict(model="smollm2-135m", method="lora", batch_size=1, seq_len=64, gpu="RTX-4090", **options)


@pytest.mark.parametrize(
    ("version", "words"), [(None, "has no transformers"), ("4.41.2", "needs 4.42 or newer"), ("4.42.0", "")]
)
def test_an_interpreter_needs_transformers_4_42(version: str | None, words: str) -> None:
    with pytest.raises(SpecError, match=words) if words else nullcontext():
        recorder._require_transformers(version, Path("python"))


@pytest.mark.parametrize(
    ("module", "packages"), [("pynvml", "numpy psutil pydantic nvidia-ml-py"), ("requests.sessions", "requests")]
)
def test_an_interpreter_that_lacks_a_package_is_told_all_that_a_recording_needs(module: str, packages: str) -> None:
    said = recorder._ended_with(1, f"ModuleNotFoundError: No module named '{module}'", Path("python"))
    assert said.endswith(f"which a recording needs: python -m pip install {packages}")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cpu"}, "vramprobe measure --device cpu"),
        ({"sharding": "device-map", "num_gpus": 2}, "device-map has one process for all GPUs"),
        ({"sharding": "fsdp", "num_gpus": 2, "only_rank": 2}, "numbered from 0 to 1"),
    ],
)
def test_what_is_not_recorded_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        api.predict(engine="recipe", model="smollm2-135m", method="lora", batch_size=1, seq_len=64, **options)


def test_a_target_that_peft_refuses_is_told_by_the_option(tmp_path: Path) -> None:
    """As peft 0.21 has it of Falcon-H1 and Nemotron-H."""
    outcome = Error(error_type="ValueError", message="Module 'out_proj': remove it from `target_modules` to avoid it")
    seen = SimpleNamespace(emulator="1")
    record: Any = SimpleNamespace(environment=seen, spec=SimpleNamespace(cell_id="falcon-h1-3b"), outcome=outcome)
    said = recording._why_not(record, tmp_path / "cell.log")
    assert said.startswith("falcon-h1-3b does not run on the emulated GPU: ")
    assert said.endswith("to avoid it. Here these are --lora-targets: names of linear layers.")


def test_without_an_emulated_gpu_one_line_says_what_to_do(tmp_path: Path) -> None:
    """With an empty cache there is no environment to record in, this interpreter's torch is for the CPU, and no recipe
    of eager attention ships."""
    words = ("--model", "smollm2-135m", "--method", "lora", "--batch-size", "1", "--seq-len", "64", "--attn", "eager")
    done = vramprobe("predict", *words, "--engine", "recipe", env={"VRAMPROBE_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 1
    assert "vramprobe emulate setup" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_of_a_model_without_arithmetic_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds half of the weights, and NCCL has its share of the GPU."""
    require_emulation()
    monkeypatch.setattr(recorded, "find_recipe", partial(find_recipe, folder=tmp_path))
    options = {"model": "qwen3.5-0.8b", "method": "full", "batch_size": 1, "seq_len": 64, "num_layers": 4}
    one = api.predict(gpu="H100-SXM", **options)
    rank = api.predict(gpu="H100-SXM", **options, sharding="fsdp", num_gpus=2)
    assert (rank.engine, rank.sharding, rank.num_gpus) == ("recipe", "fsdp", 2)
    assert rank.warnings[0].startswith("rank 0 of 2 under fsdp")
    assert rank.terms["weights"] == pytest.approx(one.terms["weights"] / 2, rel=0.001)
    assert (rank.device_bytes is None) == (one.device_bytes is None)
    assert "1.50 GiB for NCCL" in verdict(rank, catalog.find_gpu("H100-SXM")).reason


@exhaustive
def test_a_model_without_arithmetic_is_recorded(tmp_path: Path) -> None:
    require_emulation()
    words = ("--model", "qwen3.5-0.8b", "--method", "lora", "--batch-size", "1", "--seq-len", "64", "--num-layers", "4")
    done = vramprobe("predict", *words, "--gpu", "RTX-4090", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["engine"] == "recipe"
    assert found["verdict"]["verdict"] == "fits"
    assert any((cache_folder() / "recipes").iterdir())


@pytest.mark.parametrize(("num_quantized", "said"), [(900, 0), (100, 1)])
def test_experts_that_stay_in_16_bits_are_said(num_quantized: int, said: int) -> None:
    name, packed = next(iter(read_book(data_file(BOOK)).items()))
    recipe = unpack(packed, name)
    facts = recipe.facts | {"num_params": 1000, "num_quantised_params": num_quantized}
    spec = api.cell(model="qwen3.5-35b-a3b", method="qlora", batch_size=2, seq_len=1024, device="cuda")
    found = at_hand.replayed(replace(recipe, facts=facts), spec, (2, 1024)).notes
    assert len(found) == said
    words = ("nf4 reaches only 100 of 1,000 parameters", "--kbit-prep trl or none", "Axolotl can quantize experts, too")
    assert all(word in one for one in found for word in words)


def test_lengths_in_other_branches_are_left_out_where_near_is_enough() -> None:
    """A step of few tokens sums the norms' gradients at once: a request less than a step of many."""
    gpu, options = catalog.find_gpu("H100-SXM"), {"model": "smollm2-135m", "method": "full", "device": "cuda"}
    spec = recorded_as(api.cell(batch_size=4, seq_len=600, **options))
    shapes = [(4, 19), (4, 435)]
    with pytest.raises(NotOneBranch, match="at 4 x 19 the events are not those at 4 x 600"):
        recorded_recipe(spec, gpu, shapes=shapes)
    near = recorded_recipe(spec, gpu, shapes=shapes, near=True)
    exact = recorded_recipe(recorded_as(api.cell(batch_size=4, seq_len=500, **options)), gpu)
    found, own = near.deep((4, 500)).log, exact.deep().log
    assert np.array_equal(found.size_bytes, own.size_bytes)
    assert np.array_equal(found.blocks, own.blocks)
    with pytest.raises(NotOneBranch, match="others at each of these lengths"):
        recorded_recipe(spec, gpu, shapes=shapes[:1], near=True)


def test_a_cell_that_is_interrupted_is_not_recorded_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the interrupt reached this process alone."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"say": "begun"}\'\nexec sleep 60\n')
    python.chmod(0o755)
    monkeypatch.setattr(recorder, "_entered", lambda *words: (None, python, {}))

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        recorder.record_packed(
            api.cell(model="pythia-70m", method="lora", device="cuda", batch_size=1, seq_len=64),
            catalog.find_gpu("T4"),
            interrupt,
        )
    assert time.monotonic() - begun < recorder._ENDING_SECONDS
