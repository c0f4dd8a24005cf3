"""Vision-language models, encoders and pairs by id: processors that count, tokens at their ids, images in rows."""

import importlib
import io
import json
import re
import types
from pathlib import Path
from typing import Any

import pytest
from empty_package import replaced, repositories
from grids import grid
from typer.testing import CliRunner
from vision import profiled_config

from vramprobe.architecture import architecture, families
from vramprobe.architecture.images import image_of, parse_image_size
from vramprobe.catalog import find_model
from vramprobe.catalog.models import list_models
from vramprobe.catalog.profiled import list_profiled, reason_against_own_code
from vramprobe.catalog.shipped import csv_rows
from vramprobe.cli import verbs
from vramprobe.errors import SpecError
from vramprobe.profile import stand_ins

transformers = pytest.importorskip("transformers")
#: Parameters, tied ones once, with the vision tower: Gemma 3 4B's as published (PARAMETERS.csv), the others as built.
PUBLISHED = {
    "bert-base-uncased": 109_514_298,
    "all-minilm-l6-v2": 22_713_216,
    "qwen3-embedding-0.6b": 595_776_512,
    "gemma-3-4b-it": 4_300_079_472,
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    "smolvlm-instruct": 2_246_272_880,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "llama-4-scout-it": 108_641_793_536,  # published (PARAMETERS.csv), as Maverick's
    "llama-4-maverick-it": 401_583_781_376,
}


def config_of(slug: str) -> Any:
    raw = profiled_config(slug)
    return raw, transformers.AutoConfig.for_model(**raw)


def tokenizer_of(empty, folder: Path, slug: str) -> Any:
    """(config.json, the config, the tokenizer) of this model, as a command would load them."""
    raw, config = config_of(slug)
    (folder / "config.json").write_text(json.dumps(raw))
    empty.hub._write_tokenizer(str(folder), raw, config)
    return raw, config, transformers.AutoTokenizer.from_pretrained(folder)


NAMES = [one.name for one in list_profiled() if one.kind != "diffusion"]  # those: test_empty_pipelines.py


@pytest.mark.parametrize(
    "name", grid(NAMES, "all-minilm-l6-v2", "modernbert-base", "qwen2.5-vl-3b", "smolvlm-instruct")
)
def test_each_config_builds_the_class_that_it_names(name, empty) -> None:
    raw, config = config_of(name)
    made = empty.checkpoint.model_of(config)
    assert type(made).__name__ == raw["architectures"][0]
    made.tie_weights()
    count = sum(one.numel() for one in made.parameters())
    assert name not in PUBLISHED or count == PUBLISHED[name]
    source = next(one.source for one in list_profiled() if one.name == name)
    if said := re.search(r"\| count: (\d+) on meta", source):
        assert count == int(said[1])
    if raw["model_type"] in families():
        assert architecture(raw).num_params == count


def test_each_config_says_where_it_is_from() -> None:
    assert all(len(one.source) > 30 and one.config.is_file() for one in list_profiled())
    stray = {path.stem for path in list_profiled()[0].config.parent.glob("*.json")} - {
        one.name for one in list_profiled()
    }
    assert stray == set()


@pytest.mark.parametrize("name", ["all-minilm-l6-v2", "answerdotai/ModernBERT-base"])
def test_what_is_not_predicted_says_what_to_do(name) -> None:
    with pytest.raises(SpecError, match=r"not predicted.*profile --emulate GPU --empty-weights"):
        find_model(name)


@pytest.mark.parametrize("row", csv_rows("models/OWN_CODE.csv"), ids=lambda row: row["example"])
def test_a_model_with_code_of_its_own_says_so_and_asks_no_hub(row) -> None:
    with pytest.raises(SpecError, match=r"trust_remote_code.*vramprobe profile --emulate GPU -- COMMAND"):
        find_model(row["example"])
    assert not row["instead"] or find_model(row["instead"]).name == row["instead"]


def test_no_model_of_the_catalog_is_taken_for_one_with_code_of_its_own() -> None:
    rows = [(one.name, one.hf_id, *one.also) for one in list_profiled()]
    names = [name for row in rows for name in row] + [one.hf_id for one in list_models()]
    assert [name for name in names if reason_against_own_code(name)] == []


def test_they_are_listed_as_what_only_a_profile_knows() -> None:
    listed = json.loads(CliRunner().invoke(verbs.app, ["models", "--json"]).stdout)
    others = {one["slug"]: one["kind"] for one in listed if one.get("profile_only")}
    assert others == {one.name: one.kind for one in list_profiled() if not one.has_counted_images}
    assert "qwen2.5-vl-7b" not in others
    shown = CliRunner().invoke(verbs.app, ["models"]).stdout
    assert "Only in profile --emulate GPU --empty-weights" in shown
    assert "With images (--images)" in shown


def processor_of(empty, folder: Path, slug: str, video_size: str | None = None):
    """The processor that a command would load for this model."""
    raw, config = config_of(slug)
    (folder / "config.json").write_text(json.dumps(raw))
    empty.hub._write_tokenizer(str(folder), raw, config)
    empty.processors.write(str(folder), raw, config)
    processing_utils, video_processing_auto = map(
        importlib.import_module, ("transformers.processing_utils", "transformers.models.auto.video_processing_auto")
    )
    for kind, names in (
        (processing_utils.ProcessorMixin, ("from_pretrained", "check_argument_for_proper_class")),
        (video_processing_auto.AutoVideoProcessor, ("from_pretrained",)),
    ):
        for name in names:
            empty.monkeypatch.setattr(kind, name, kind.__dict__[name])  # taken back after the test
    found, _ = repositories(empty, folder, folder / "cache")
    (folder / "model.safetensors").write_text("")
    asked = stand_ins.stand_ins(image_size="1024x768", video_size=video_size)
    run = empty.replacements.Replacements(str(folder), asked, found)
    empty.processors.serve(processing_utils, run)
    empty.processors.serve_videos(video_processing_auto, run)
    return transformers.AutoProcessor.from_pretrained(folder)


def test_a_transformers_that_checks_its_processors_in_init_is_served_too(empty, tmp_path) -> None:
    plain = classmethod(lambda cls, folder: cls)
    module = types.SimpleNamespace(ProcessorMixin=type("ProcessorMixin", (), {"from_pretrained": plain}))  # as of 4.49
    found, _ = repositories(empty, tmp_path, tmp_path / "cache")
    empty.processors.serve(module, empty.replacements.Replacements(str(tmp_path), {}, found))
    assert module.ProcessorMixin.__dict__["from_pretrained"] is not plain
    assert not hasattr(module.ProcessorMixin, "check_argument_for_proper_class")


@pytest.mark.parametrize(
    ("slug", "expected"),
    grid(
        [
            ("qwen2.5-vl-3b", 999),  # 1024 × 768, each side to the nearest multiple of 28: 37 × 27
            ("qwen3-vl-4b", 768),  # 32 × 24 of 32 pixels
            ("qwen3.5-9b-vl", 768),  # the same
            ("gemma-4-e4b-it", 266),  # 19 × 14 of 48 pixels
            ("gemma-3-4b-it", 256),  # whatever the size
            ("smolvlm-instruct", 1053),  # 4 × 3 parts and the whole, of 81
        ],
        ("qwen2.5-vl-3b", 999),
        ("smolvlm-instruct", 1053),
    ),
)
def test_tokens_of_an_image_are_those_that_the_processor_counts(slug, expected, empty, tmp_path) -> None:
    processor = processor_of(empty, tmp_path, slug)
    assert empty.counts.tokens_per_image(processor, 1024, 768) == expected
    assert image_of(find_model(slug).config, 1024, 768).num_tokens == expected
    (said,) = [one["by"] for one in replaced(tmp_path) if one["kind"] == "image tokens"]
    assert said == f"{expected:,} for 1024 × 768 pixels, counted by {type(processor).__name__}"
    processor.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "chat_template.jinja").exists()
    raw, config = config_of(slug)
    for key, word in empty.processors.FAMILIES[raw["model_type"]]["placed"].items():
        assert processor.tokenizer.convert_tokens_to_ids(word) == raw.get(key, getattr(config, key))
    chat = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": "a"},
    ]
    shown = processor.apply_chat_template(chat, tokenize=False)
    image = empty.processors.FAMILIES[raw["model_type"]]["image"]
    assert shown == f"<|im_start|>user\n{image}what?<|im_end|>\n<|im_start|>assistant\na</s>\n"


_ROLES = {f"{role}_token" for role in ("bos", "eos", "pad", "unk", "cls", "sep", "mask")}
_NAMED = re.compile(r"""tokenizer\.(\w+_token)(?:_id)?\b|attr\((?:self\.)?tokenizer, ["'](\w+_token)(?:_id)?["']""")


def test_a_tokenizer_names_every_token_that_its_familys_processor_asks_it_for(empty) -> None:
    models = Path(transformers.__file__).with_name("models")
    sources = [path.read_text() for path in models.glob("*/processing_*.py")]  # some import torchvision
    for model_type, family in empty.processors.FAMILIES.items():
        (source,) = (one for one in sources if f"class {family['processor']}(" in one)
        asked = {one for found in _NAMED.findall(source) for one in found if one} - _ROLES
        assert asked <= set(family.get("named", {})), model_type


@pytest.mark.parametrize("slug", ["smolvlm2-500m", "smolvlm-instruct", "qwen2.5-vl-3b", "qwen2-audio-7b"])
def test_named_tokens_are_those_of_the_text(slug, empty, tmp_path) -> None:
    raw, _, tokenizer = tokenizer_of(empty, tmp_path, slug)
    named = empty.processors.of(raw)["named"]
    assert named
    for name, word in named.items():
        (number,) = tokenizer(word, add_special_tokens=False)["input_ids"]
        assert (getattr(tokenizer, name), getattr(tokenizer, f"{name}_id")) == (word, number)


def test_an_image_of_gemma_3_stands_between_lines_that_are_tokens(empty, tmp_path) -> None:
    words = tokenizer_of(empty, tmp_path, "gemma-3-4b-it")[2].get_vocab()
    assert {"\n" * count for count in (1, 2, 3, 4)} <= words.keys()  # vLLM looks them up


def test_mistral_3_has_the_marks_of_its_images(empty, tmp_path) -> None:
    """Its processor needs torchvision."""
    raw, config, tokenizer = tokenizer_of(empty, tmp_path, "mistral-small-3.1-24b")
    said = empty.processors.write(str(tmp_path), raw, config)
    words = tokenizer.get_vocab()
    assert words["[IMG]"] == raw["image_token_index"]
    assert {"[IMG_BREAK]", "[IMG_END]"} <= words.keys()
    assert json.loads((tmp_path / "preprocessor_config.json").read_text())["size"] == {"longest_edge": 1540}
    assert said.startswith("PixtralProcessor")


def test_llama_4_reads_an_image_at_its_patches(empty) -> None:
    """Its processor needs torchvision; its image token stands once in a text, before the patches of the whole image."""

    class Processor:
        image_token_id, img_patch_token = 9, "<|patch|>"
        tokenizer = types.SimpleNamespace(convert_tokens_to_ids={"<|patch|>": 7}.get)

        def apply_chat_template(self, messages, tokenize):
            return "<|image|>"

        def __call__(self, **given):
            return {"input_ids": [[1, 7, 7, 8, 9, 7, 2]]}

    assert empty.counts.tokens_per_image(Processor(), 640, 480) == 3


def test_an_image_is_a_png_of_its_size(empty) -> None:
    image = pytest.importorskip("PIL.Image")
    shown = image.open(io.BytesIO(empty.media.png(7, 3)))
    assert (shown.format, shown.size, shown.getpixel((6, 2))) == ("PNG", (7, 3), (128, 128, 128))


@pytest.mark.parametrize("text", ["1024", "0x5", "axb", "99999x1", "-3x4", ""])
def test_an_image_size_that_cannot_be_is_refused(text) -> None:
    with pytest.raises(SpecError, match=r"give WIDTHxHEIGHT in pixels, 1 to 16384 each, such as 640x480"):
        parse_image_size(text)
    assert parse_image_size(" 1024 × 768 ") == (1024, 768)


def test_an_encoder_has_its_mask_and_an_embedding_model_its_pooling(empty, tmp_path) -> None:
    _, folder_of = repositories(empty, tmp_path, tmp_path / "cache")
    home = Path(folder_of("sentence-transformers/all-MiniLM-L6-v2"))
    snapshot = home / "snapshots" / (home / "refs" / "main").read_text()
    made = transformers.AutoTokenizer.from_pretrained(snapshot)
    assert (made.mask_token, made.cls_token, made.pad_token_id, len(made)) == ("[MASK]", "[CLS]", 0, 30522)
    pooled = json.loads((snapshot / "1_Pooling" / "config.json").read_text())
    assert [name for name, value in pooled.items() if value is True] == ["pooling_mode_mean_tokens"]
    assert [one["type"].rsplit(".", 1)[-1] for one in json.loads((snapshot / "modules.json").read_text())] == [
        "Transformer",
        "Pooling",
        "Normalize",
    ]
    said = {one["kind"]: one["by"] for one in replaced(tmp_path)}
    assert said["weights"] == "empty files of BertModel, 0.02 billion parameters in float32"


def test_a_chat_model_with_a_vision_tower_is_taken_with_it(empty) -> None:
    """gemma-3-4b is the language model alone for predict, and the whole one, as on the hub, for a command."""
    known = stand_ins.stand_ins()["models"]
    for name in ("google/gemma-3-4b-it", "google/gemma-3-4b-pt", "gemma-3-4b"):
        assert known[name]["config"].endswith("profiled/gemma-3-4b-it.json")
    assert find_model("gemma-3-4b").model_type == "gemma3_text"


def test_a_local_folder_with_a_config_alone_gets_a_processor_too(empty, tmp_path) -> None:
    raw, _ = config_of("smolvlm-instruct")
    raw["text_config"] |= {"num_hidden_layers": 1}
    raw["vision_config"] |= {"num_hidden_layers": 1}
    (tmp_path / "mine").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(raw))
    found, _ = repositories(empty, tmp_path / "run", tmp_path / "cache")
    folder = Path(found.folder_for(str(tmp_path / "mine")))
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    assert (settings["size"], settings["max_image_size"]) == ({"longest_edge": 1536}, {"longest_edge": 384})
    assert json.loads((folder / "processor_config.json").read_text())["image_seq_len"] == 81
    assert [one["kind"] for one in replaced(tmp_path / "run")] == ["weights", "tokenizer", "processor"]
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["config.json"]
