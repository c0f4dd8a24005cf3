"""Images as they are counted, against transformers' own processors."""

import ast
import importlib
import importlib.util
import math
import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vision import profiled_config

from vramprobe.architecture.images import Image, image_of
from vramprobe.errors import SpecError

np = pytest.importorskip("numpy")
pytest.importorskip("transformers")
SIZES = [(640, 480), (480, 640), (1024, 1024), (37, 29), (500, 20), (1111, 333), (4000, 3000)]


@pytest.mark.parametrize(("slug", "limits"), [("qwen2.5-vl-7b", (3136, 12845056)), ("qwen3-vl-8b", (65536, 16777216))])
def test_qwen_resizes_as_its_processor_does(slug: str, limits: tuple[int, int]) -> None:
    own = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    config = profiled_config(slug)
    side = 2 * config["vision_config"]["patch_size"]
    for width, height in [*SIZES, (16384, 16384), (20, 20), (4000, 20)]:
        high, wide = own.smart_resize(height, width, side, *limits)
        assert image_of(config, width, height) == Image(1, high, wide, high * wide // side**2), (width, height)
    with pytest.raises(SpecError, match="beyond 200 to 1"):
        image_of(config, 4020, 20)


@pytest.mark.parametrize(("slug", "kind"), [("smolvlm-instruct", "idefics3"), ("smolvlm2-500m", "smolvlm")])
def test_smolvlm_cuts_into_tiles_as_its_processor_does(slug: str, kind: str) -> None:
    own = importlib.import_module(f"transformers.models.{kind}.image_processing_pil_{kind}")
    name = {"idefics3": "Idefics3ImageProcessorPil", "smolvlm": "SmolVLMImageProcessorPil"}[kind]
    config = profiled_config(slug)
    tile, patch = config["vision_config"]["image_size"], config["vision_config"]["patch_size"]
    processor = getattr(own, name)(size={"longest_edge": 4 * tile}, max_image_size={"longest_edge": tile})
    processor.do_normalize = processor.do_rescale = False
    for width, height in SIZES[:2] + SIZES[3:5]:
        made = processor(images=[[np.zeros((height, width, 3), dtype=np.uint8)]])["pixel_values"]
        tokens = (tile // patch) ** 2 // config["scale_factor"] ** 2
        assert np.asarray(made).shape == (1, number := image_of(config, width, height).num_tiles, 3, tile, tile)
        assert image_of(config, width, height) == Image(number, tile, tile, number * tokens)


def own_functions(module: str) -> dict[str, Any]:
    """The functions of a module of transformers that needs torchvision, by name, without it."""
    torch = pytest.importorskip("torch")
    source = importlib.util.find_spec(module).origin
    tree = ast.parse(Path(source).read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for node in tree.body:
        node.returns, node.decorator_list = None, []
        for argument in node.args.args:
            argument.annotation = None
    names: dict[str, Any] = {"torch": torch, "defaultdict": defaultdict, "math": math}
    exec(compile(tree, source, "exec"), names)
    return names


def test_llama_4_cuts_into_tiles_as_its_processor_does() -> None:
    own = own_functions("transformers.models.llama4.image_processing_llama4")
    config = profiled_config("llama-4-scout-it")
    shapes = own["torch"].tensor(own["find_supported_resolutions"](16, SimpleNamespace(height=336, width=336)))
    drawn = random.Random(4)
    sizes = [*SIZES, (336, 336), (337, 336), (1344, 1344), (5376, 336)]
    sizes += [(drawn.randint(1, 6000), drawn.randint(1, 6000)) for _ in range(300)]
    for width, height in sizes:
        high, wide = own["get_best_fit"]((height, width), shapes).tolist()
        number = high * wide // 336**2
        number += number > 1  # the whole image
        assert image_of(config, width, height) == Image(number, 336, 336, 144 * number), (width, height)


def sizes_drawn(seed: int, least: int = 1) -> list[tuple[int, int]]:
    drawn = random.Random(seed)
    return [*SIZES, *((drawn.randint(least, 6000), drawn.randint(least, 6000)) for _ in range(300))]


def test_gemma_4_keeps_the_shape_as_its_processor_does() -> None:
    own = own_functions("transformers.models.gemma4.image_processing_gemma4")
    config = profiled_config("gemma-4-e4b-it")
    for width, height in [*sizes_drawn(5), (9000, 10), (10, 9000)]:
        high, wide = own["get_aspect_ratio_preserving_size"](height, width, 16, 2520, 3)
        assert image_of(config, width, height) == Image(1, high, wide, high * wide // 48**2), (width, height)
    with pytest.raises(SpecError, match="makes nothing"):
        image_of(config | {"vision_soft_tokens_per_image": 0}, 640, 480)


def test_internvl_cuts_into_tiles_as_its_processor_does() -> None:
    own = own_functions("transformers.models.got_ocr2.image_processing_got_ocr2")
    config = profiled_config("internvl3.5-8b")
    for width, height in [*sizes_drawn(6), (448, 448), (896, 448), (2688, 448)]:
        wide, high = own["get_optimal_tiled_canvas"]((height, width), (448, 448), 1, 12)
        number = wide * high + (wide * high > 1)
        assert image_of(config, width, height) == Image(number, 448, 448, 256 * number), (width, height)


@pytest.mark.parametrize("slug", ["llava-onevision-0.5b", "llava-onevision-7b"])
def test_llava_onevision_cuts_into_tiles_as_its_processor_does(slug: str) -> None:
    own = importlib.import_module("transformers.models.llava_onevision.processing_llava_onevision")
    config = profiled_config(slug)
    views = range(384, 2305, 384)
    processor = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=[[high, wide] for high in views for wide in views]),
        num_image_tokens=729,
        vision_aspect_ratio="anyres_max_9",
    )
    kind = own.LlavaOnevisionProcessor
    processor._get_unpadded_features = lambda *sizes: kind._get_unpadded_features(processor, *sizes)
    for width, height in sizes_drawn(7, least=20):
        tokens = kind._get_number_of_features(processor, height, width, 384, 384)
        high, wide = own.select_best_resolution((height, width), processor.image_processor.image_grid_pinpoints)
        assert image_of(config, width, height) == Image(1 + high * wide // 384**2, 384, 384, tokens), (width, height)


@pytest.mark.parametrize("slug", ["llava-v1.6-mistral-7b", "llama3-llava-next-8b"])
def test_llava_next_cuts_into_tiles_as_its_processor_does(slug: str) -> None:
    own = importlib.import_module("transformers.models.llava_next.processing_llava_next")
    config, kind = profiled_config(slug), own.LlavaNextProcessor
    processor = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=config["image_grid_pinpoints"]),
        patch_size=14,
        num_additional_image_tokens=1,
    )
    processor._get_unpadded_features = lambda *sizes: kind._get_unpadded_features(processor, *sizes)
    for width, height in sizes_drawn(8, least=20):
        tokens = kind._get_number_of_features(processor, height, width, 336, 336) - 1  # less the class token
        high, wide = own.select_best_resolution((height, width), config["image_grid_pinpoints"])
        assert image_of(config, width, height) == Image(1 + high * wide // 336**2, 336, 336, tokens), (width, height)


@pytest.mark.parametrize(("slug", "longest", "side"), [("pixtral-12b", 1024, 16), ("mistral-small-3.1-24b", 1540, 28)])
def test_pixtral_keeps_the_shape_as_its_processor_does(slug: str, longest: int, side: int) -> None:
    own = importlib.import_module("transformers.models.pixtral.image_processing_pil_pixtral")
    for width, height in sizes_drawn(9, least=20):
        image = np.zeros((height, width, 1), dtype=np.uint8)
        high, wide = own.get_resize_output_image_size(image, longest, side)
        rows, columns = high // side, wide // side
        expected = Image(
            1, high, wide, rows * (columns + 1), rows
        )  # PixtralProcessor: a break or an end after each row
        assert image_of(profiled_config(slug), width, height) == expected, (width, height)


def test_idefics2_cuts_into_quarters_as_its_processor_does() -> None:
    own = importlib.import_module("transformers.models.idefics2.image_processing_pil_idefics2")
    processor = own.Idefics2ImageProcessorPil(do_image_splitting=True, do_normalize=False, do_rescale=False)
    for width, height in SIZES:
        made = processor(images=[[np.zeros((height, width, 3), dtype=np.uint8)]])["pixel_values"]
        image = image_of(profiled_config("idefics2-8b"), width, height)
        assert np.asarray(made).shape == (1, image.num_tiles, 3, image.height, image.width), (width, height)
        assert image.num_tokens == 5 * 64


def test_llama_3_2_has_four_tiles_and_one_token() -> None:
    own = importlib.import_module("transformers.models.mllama.image_processing_pil_mllama")
    config = profiled_config("llama-3.2-11b-vision-instruct")
    processor = own.MllamaImageProcessorPil(size={"height": 560, "width": 560}, max_image_tiles=4)
    for width, height in SIZES[:3]:
        made = processor(images=[[np.zeros((height, width, 3), dtype=np.uint8)]])["pixel_values"]
        image = image_of(config, width, height)
        assert np.asarray(made).shape == (1, 1, image.num_tiles, 3, image.height, image.width)
        assert image.num_tokens == 1


@pytest.mark.parametrize(("slug", "side", "tokens"), [("llava-1.5-7b", 336, 576), ("paligemma-3b-pt-448", 448, 1024)])
def test_llava_and_paligemma_make_all_images_alike(slug: str, side: int, tokens: int) -> None:
    assert {image_of(profiled_config(slug), *size) for size in SIZES} == {Image(1, side, side, tokens)}


def test_gemma_makes_all_images_alike() -> None:
    found = {image_of(profiled_config("gemma-3-4b-it"), *size) for size in SIZES}
    assert found == {Image(1, 896, 896, 256)}


def test_a_model_without_a_tower_has_no_images() -> None:
    with pytest.raises(SpecError, match="images are known for qwen2_vl"):
        image_of({"model_type": "llama"}, 640, 480)
