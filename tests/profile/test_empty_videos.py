"""Videos in rows: files that decoders read, the processors' own counts, and a clear line for what is missing."""

import json
import math
import struct
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from empty_package import replaced
from grids import grid
from test_empty_images import config_of, processor_of

from benchmarks.frameworks import programs
from benchmarks.tables import read_csv
from vramprobe import api
from vramprobe.architecture.images import image_of, parse_video_size
from vramprobe.catalog import find_model
from vramprobe.errors import SpecError
from vramprobe.profile import stand_ins


def chunks(data: bytes) -> dict[bytes, list[bytes]]:
    """Return the chunks of an AVI file, by kind, lists opened."""
    found: dict[bytes, list[bytes]] = {}
    while data:
        kind, size = struct.unpack("<4sI", data[:8])
        inside = data[8 : 8 + size]
        assert len(inside) == size
        data = data[8 + size + size % 2 :]
        if kind in (b"RIFF", b"LIST"):
            for name, parts in chunks(inside[4:]).items():
                found.setdefault(name, []).extend(parts)
        else:
            found.setdefault(kind, []).append(inside)
    return found


def test_a_file_has_its_frames_each_an_image_of_the_size(empty, tmp_path: Path) -> None:
    path = Path(empty.media.gray(str(tmp_path), (5, 31, 17)))
    assert empty.media.gray(str(tmp_path), (5, 31, 17)) == str(path)
    found = chunks(path.read_bytes())
    assert [frame.rstrip(b"\0") for frame in found[b"00dc"]] == [empty.media.png(31, 17).rstrip(b"\0")] * 5
    header = struct.unpack("<14I", found[b"avih"][0])
    assert (header[0], header[4], header[8:10]) == (1_000_000, 5, (31, 17))
    for at in range(5):
        kind, _, offset, size = struct.unpack_from("<4sIII", found[b"idx1"][0], 16 * at)
        start = path.read_bytes().index(b"movi") + offset
        assert path.read_bytes()[start : start + 4] == kind == b"00dc"
        assert size == len(found[b"00dc"][at])


@pytest.mark.parametrize("decoder", ["av", "cv2"])
def test_the_usual_decoders_read_it(decoder: str, empty, tmp_path: Path) -> None:
    module: Any = pytest.importorskip(decoder)
    path = empty.media.gray(str(tmp_path), (5, 31, 17))
    if decoder == "av":
        shapes = [frame.to_ndarray(format="rgb24").shape for frame in module.open(path).decode(video=0)]
    else:
        opened = module.VideoCapture(path)
        shapes = [opened.read()[1].shape for _ in range(int(opened.get(module.CAP_PROP_FRAME_COUNT)))]
    assert shapes == [(17, 31, 3)] * 5


def test_columns_of_videos_are_guessed_from_a_name(empty, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert [empty.rows.guessed(name) for name in ("me/my-videos", "me/llava-video")] == [
        "video_text",
        "messages_videos",
    ]
    row = empty.rows.row_of("messages_videos", 8)
    assert [part["type"] for part in row["messages"][0]["content"]] == ["text", "video"]
    assert row["videos"] == [None]


@pytest.mark.parametrize(
    "text", ["16", "640x480", "0x640x480", "16x640x0", "9999x1x1", "16x640x99999", "16x640x480x3", ""]
)
def test_a_size_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"give FRAMESxWIDTHxHEIGHT, 1 to 4096 frames of 1 to 16384 pixels each way"):
        parse_video_size(text)
    assert parse_video_size(" 16 × 640x480 ") == (16, 640, 480)


def test_only_files_of_the_rows_are_read_without_the_librarys_decoder(empty, tmp_path: Path) -> None:
    library = types.SimpleNamespace(VideoMetadata=types.SimpleNamespace)  # its own needs torch; below it is asked
    empty.monkeypatch.setitem(sys.modules, "transformers.video_utils", library)

    class Processor:
        def fetch_videos(self, video_url_or_urls, sample_indices_fn=None):
            raise ImportError("`torchcodec` is not installed")

    run = empty.replacements.Replacements(str(tmp_path), {"video_size": (6, 31, 17)})
    empty.media.serve_videos(types.SimpleNamespace(BaseVideoProcessor=Processor), run)
    path = empty.media.gray(str(tmp_path), (6, 31, 17))
    frames, about = Processor().fetch_videos(path)
    assert (frames.shape, about.fps, about.total_num_frames, about.duration) == ((6, 17, 31, 3), 1.0, 6, 6.0)
    [two, _], _ = Processor().fetch_videos([path, path], sample_indices_fn=lambda metadata: [0, 5])
    assert two.shape[0] == 2
    for other in ("/data/mine.mp4", [path, "/data/mine.mp4"]):
        with pytest.raises(ImportError, match="torchcodec"):
            Processor().fetch_videos(other)
    assert [line["kind"] for line in replaced(tmp_path)] == ["video decoder"]


def test_qwen3s_videos_have_the_settings_that_are_published_for_them(empty, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    raw, config = config_of("qwen3-vl-2b")
    empty.processors.write(str(tmp_path), raw, config)
    videos = json.loads((tmp_path / "video_preprocessor_config.json").read_text())
    images = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert videos["size"] == {"longest_edge": 25165824, "shortest_edge": 4096}
    assert (videos["video_processor_type"], videos["patch_size"]) == ("Qwen3VLVideoProcessor", images["patch_size"])
    assert "image_processor_type" not in videos


@pytest.mark.parametrize(
    ("slug", "size", "expected"),
    [
        ("qwen2.5-vl-3b", "16x640x480", 8 * 391),
        ("qwen3-vl-2b", "5x640x480", 3 * 300),  # the last frame twice
        ("smolvlm2-500m", "16x640x480", 16 * 64),
    ],
)
def test_tokens_of_a_video_are_those_that_the_processor_counts(slug, size, expected, empty, tmp_path) -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("num2words")
    processor = processor_of(empty, tmp_path, slug, video_size=size)
    assert empty.counts.tokens_per_video(processor, parse_video_size(size)) == expected
    frames, width, height = parse_video_size(size)
    [said] = [one["by"] for one in replaced(tmp_path) if one["kind"] == "video tokens"]
    assert (
        said == f"{expected:,} for {frames} frames of {width} × {height} pixels, counted by {type(processor).__name__}"
    )


def test_the_counts_in_the_table_are_those_of_its_frames(empty) -> None:
    """Two frames are one image to Qwen 2.5; to Qwen 3 within its budget of a video's pixels."""
    rows = {row["program"]: int(row["tokens"]) for row in read_csv(programs.TABLE) if row["kind"] == "video"}
    for name, slug in (("Qwen2.5-VL-3B-Instruct", "qwen2.5-vl-3b"), ("Qwen3-VL-2B-Instruct", "qwen3-vl-2b")):
        image = image_of(find_model(slug).config, 640, 480)
        assert rows[f"{name}, 1 × 16x640x480"] == 8 * image.num_tokens
    assert rows["SmolVLM2-500M-Video-Instruct, 2 × 16x640x480"] == 16 * 64
    shrunk = math.sqrt(64 * 720 * 1280 / 25165824)  # a video's pixels over their budget, by side
    tokens = 64 // 2 * int(720 / shrunk / 32) * int(1280 / shrunk / 32)
    assert rows["Qwen3-VL-2B-Instruct, 1 × 64x1280x720"] == tokens == 11648


AS_IMAGES = {one.program: one for one in programs.RUNS if one.as_images}


@pytest.mark.parametrize("program", grid(AS_IMAGES, "Qwen3-VL-2B-Instruct, 1 × 16x640x480"))
def test_a_video_of_qwens_is_predicted_as_half_as_many_images(program: str) -> None:
    sizes = {row["program"]: int(row["allocated_bytes"]) for row in read_csv(programs.TABLE)}
    adapters: dict[str, Any] = {"lora_r": 16, "lora_targets": ("q_proj", "k_proj", "v_proj", "o_proj")}
    step: dict[str, Any] = {"autocast": "bf16", "gradient_checkpointing": True, "device": "cuda"}
    one = AS_IMAGES[program]
    *_, model, batch = one.command.split()
    words = {"model": model, "batch_size": int(batch), "method": "lora", "gpu": one.gpu} | one.as_images
    found = api.predict(**words, **adapters, **step).peak_allocated_bytes.value
    assert found == pytest.approx(sizes[one.program], rel=2e-4)


def test_who_cannot_read_videos_says_what_to_do(empty, tmp_path: Path, capsys) -> None:
    processor = types.SimpleNamespace(image_processor=1, chat_template="x", video_processor=None)
    run = empty.replacements.Replacements(str(tmp_path), stand_ins.stand_ins(video_size="2x31x17"))
    empty.counts.tell(processor, "google/gemma", run)
    processor.video_processor = types.SimpleNamespace(processes_no_videos=True)
    empty.counts.tell(processor, "Qwen/Qwen", run)
    said = [one["what"] for one in replaced(tmp_path) if one["kind"] == "missing"]
    assert said == [
        "google/gemma: its SimpleNamespace reads no videos; give --image-size instead of --video-size",
        "Qwen/Qwen: videos need torchvision where the command runs; pip install torchvision, and run it again",
    ]
    assert not [one for one in replaced(tmp_path) if one["kind"] == "video tokens"]
    with pytest.raises(ImportError, match="videos need torchvision where the command runs: pip install torchvision"):
        empty.processors._no_videos()(videos=[1])
    (tmp_path / "replaced").unlink()
    run.asked = stand_ins.stand_ins()
    empty.counts.tell(processor, "Qwen/Qwen", run)
    assert [one["kind"] for one in replaced(tmp_path)] == ["image tokens"]
