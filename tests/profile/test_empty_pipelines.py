"""Pipelines of diffusers from their ids: the table, the files of a repository, and a clear line for what cannot be."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from empty_package import replaced, repositories

from vramprobe.catalog.models import find_model
from vramprobe.catalog.profiled import list_profiled
from vramprobe.errors import SpecError
from vramprobe.profile import stand_ins

PIPELINES = {one.name: one for one in list_profiled() if one.kind == "diffusion"}
VAE = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": [4],
    "norm_num_groups": 2,
    "latent_channels": 2,
    "down_block_types": ["DownEncoderBlock2D"],
    "up_block_types": ["UpDecoderBlock2D"],
    "layers_per_block": 1,
    "mid_block_add_attention": False,
}
CLIP = {
    "architectures": ["CLIPTextModel"],
    "model_type": "clip_text_model",
    "vocab_size": 1000,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 77,
}
INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "safety_checker": [None, None],
}
TINY = {
    "model_index.json": INDEX,
    "text_encoder/config.json": CLIP,
    "tokenizer/tokenizer_config.json": {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77},
}


def files_of(name: str) -> dict[str, Any]:
    return json.loads(PIPELINES[name].config.read_text())


@pytest.mark.parametrize("name", PIPELINES)
def test_each_pipeline_has_the_configs_of_all_parts_that_its_index_names(name: str) -> None:
    files = files_of(name)
    if "model_index.json" not in files:  # a part alone
        assert list(files) == ["config.json"]
        return
    parts = {part for part, kind in files["model_index.json"].items() if isinstance(kind, list)}
    assert parts == {path.partition("/")[0] for path in files} - {"model_index.json"}
    for path, content in files.items():
        part, kind = path.partition("/")[0], files["model_index.json"].get(path.partition("/")[0])
        if isinstance(content, dict) and "_class_name" in content and kind:
            assert content["_class_name"] == kind[1], path
        if part.startswith("tokenizer"):
            assert f"text_encoder{part.removeprefix('tokenizer')}/config.json" in files


def test_pipelines_are_known_for_profiles_alone() -> None:
    assert {"flux.1-dev", "stable-diffusion-xl-base-1.0"} <= set(PIPELINES)
    with pytest.raises(SpecError, match=r"is a diffusion model, and those are not predicted.*--empty-weights"):
        find_model("black-forest-labs/FLUX.1-dev")


def test_a_quantised_pipeline_is_refused_with_the_one_that_it_was_made_of(empty, tmp_path: Path, capsys) -> None:
    _, folder_of = repositories(empty, tmp_path, tmp_path / "cache")
    folder_of("diffusers/FLUX.1-dev-bnb-4bit")
    said = capsys.readouterr().err
    assert "a pipeline that is quantised already" in said
    assert "black-forest-labs/FLUX.1-dev" in said


def test_an_unknown_pipeline_says_which_files_are_enough(empty, tmp_path: Path, capsys) -> None:
    _, folder_of = repositories(empty, tmp_path, tmp_path / "cache")
    folder_of("org/some-pipeline")
    assert "of a pipeline of diffusers: hf download org/some-pipeline --include '*.json'" in capsys.readouterr().err


def test_a_reference_is_the_config_of_that_model(empty) -> None:
    known = stand_ins.stand_ins()["models"]
    whole = empty.pipelines.with_references(files_of("qwen-image"), known)
    assert whole["text_encoder/config.json"]["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
    assert whole["vae/config.json"] == files_of("qwen-image")["vae/config.json"]


def cached(cache: Path, files: dict[str, Any]) -> Path:
    """A pipeline in the hub's cache that has its configs alone."""
    snapshot = cache / "models--org--mine" / "snapshots" / ("a" * 40)
    for path, content in files.items():
        (snapshot / path).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / path).write_text(json.dumps(content))
    (cache / "models--org--mine" / "refs").mkdir()
    (cache / "models--org--mine" / "refs" / "main").write_text("a" * 40)
    return snapshot


def test_the_configs_of_a_pipeline_in_the_cache_are_enough_and_the_cache_stays_as_it_is(empty, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    snapshot = cached(tmp_path / "cache", TINY)
    before = sorted(path.relative_to(snapshot) for path in snapshot.rglob("*"))
    run, folder_of = repositories(empty, tmp_path, tmp_path / "cache")
    home = Path(folder_of("org/mine"))
    made = home / "snapshots" / (home / "refs" / "main").read_text()
    assert (made / "model_index.json").resolve() == (snapshot / "model_index.json").resolve()
    assert sorted(path.relative_to(snapshot) for path in snapshot.rglob("*")) == before
    encoder, loading = transformers.CLIPTextModel.from_pretrained(made / "text_encoder", output_loading_info=True)
    assert (loading["missing_keys"], loading["unexpected_keys"]) in ((set(), set()), ([], []))
    assert encoder.config.hidden_size == 8
    tokenizer = transformers.CLIPTokenizer.from_pretrained(made / "tokenizer")
    ids = tokenizer("a dog", padding="max_length", max_length=77).input_ids
    assert (len(ids), ids[0], ids[-1]) == (77, 998, 999)  # begun and padded by CLIP's two marks, the last of all
    assert run.folder_for(str(made / "text_encoder")) == str(made / "text_encoder")  # no tokenizer for this part alone
    [weights, words] = replaced(tmp_path)
    assert weights["by"] == "empty files of CLIPTextModel (0.00 billion parameters in bfloat16, assumed)"
    assert words["by"] == "CLIPTokenizer (1,000 tokens), of letters and English words"


def test_t5_texts_end_in_their_mark_and_are_padded_to_their_length(empty, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    empty.tokenizer.write_t5(str(tmp_path), 400)
    tokenizer = transformers.T5TokenizerFast.from_pretrained(tmp_path)
    ids = tokenizer("a dog", padding="max_length", max_length=16).input_ids
    assert ids[-1] == 0
    assert ids.index(1) == 4  # ▁a ▁d o g
    assert max(ids) < 400


def test_what_is_written_beside_a_link_never_reaches_what_it_points_to(empty, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    empty.replacements.write_json(str(tmp_path), "link", {})
    assert (tmp_path / "there").read_text() == "mine"
    assert (tmp_path / "link").read_text() == "{}"


def test_a_part_has_the_names_and_shapes_that_diffusers_saves_and_float32_a_variant(empty, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    from safetensors import safe_open

    diffusers.AutoencoderKL.from_config(VAE).save_pretrained(tmp_path / "saved")
    made = empty.pipelines.fill(str(tmp_path / "empty"), {"config.json": VAE}, "float32")

    def seen(file: Path) -> dict[str, tuple[Any, str]]:
        with safe_open(file, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: (one.get_shape(), one.get_dtype()) for name, one in slices.items()}

    saved = seen(tmp_path / "saved" / "diffusion_pytorch_model.safetensors")
    assert seen(tmp_path / "empty" / "diffusion_pytorch_model.safetensors") == saved
    half = seen(tmp_path / "empty" / "diffusion_pytorch_model.fp16.safetensors")
    assert half == {name: (shape, "F16") for name, (shape, _) in saved.items()}
    assert "in float32 and as variant fp16" in made["weights"]


#: Parameters as their authors or a copy's index tell them (MODELS.csv).
PUBLISHED = {
    ("flux.1-dev", "transformer"): 23_802_816_640 // 2,
    ("flux.1-dev", "text_encoder_2"): 9_524_621_312 // 2,
    ("qwen-image", "transformer"): 20_430_401_088,
    ("stable-diffusion-v1-5", "unet"): 859_520_964,
    ("stable-diffusion-xl-base-1.0", "unet"): 2_567_463_684,
}


@pytest.mark.parametrize(("name", "part"), PUBLISHED)
def test_a_part_has_its_published_parameters(name: str, part: str, empty, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    files = {"config.json": files_of(name)[f"{part}/config.json"]}
    empty.pipelines.fill(str(tmp_path), files, "bfloat16")
    assert sum(num_elements(file) for file in tmp_path.glob("*.safetensors")) == PUBLISHED[name, part]


def num_elements(file: Path) -> int:
    """Elements of all tensors that a safetensors header names; the rest of the file is holes."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return sum(math.prod(about["shape"]) for name, about in header.items() if name != "__metadata__")
