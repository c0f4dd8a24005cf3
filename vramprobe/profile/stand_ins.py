"""Describe dummy weights and rows to the processes of a command, in place of missing ones.

In: the length of a row, the sizes of an image, a video and a sound. Out: a part of ``run.json`` that empty/ reads: the
configs that ship, by id and slug, and which columns well-known datasets have. Runs nothing.
"""

from pathlib import Path
from typing import Any

from vramprobe.architecture.images import DEFAULT_IMAGE_SIZE, DEFAULT_VIDEO_SIZE, parse_image_size, parse_video_size
from vramprobe.catalog.models import list_models
from vramprobe.catalog.profiled import list_profiled
from vramprobe.catalog.shipped import csv_rows, data_file, split

#: (name in the process, folder, module), as emulate/values/hook.py takes hooks.
HOOK = ("vramprobe_empty", str(Path(__file__).with_name("empty")), "start")
DEFAULT_SEQ_LEN = 2048
_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
#: What a published config.json has besides the architecture that ships: the one checkpoint of these ids is quantized.
_PUBLISHED_QUANTIZED = {
    name: {"dtype": "bfloat16", "quantization_config": _MXFP4} for name in ("openai/gpt-oss-20b", "openai/gpt-oss-120b")
}
DEFAULT_AUDIO_SECONDS = 30.0  # the window of Whisper, and of encoders made from it


def stand_ins(
    seq_len: int | None = None,
    image_size: str | None = None,
    video_size: str | None = None,
    audio_seconds: float | None = None,
) -> dict[str, Any]:
    """For ``--empty-weights``: ``seq_len`` tokens a row, an image, a video or sound of these sizes in its columns.

    Raises SpecError.
    """
    models: dict[str, dict[str, Any]] = {}
    for one in list_profiled():  # before the catalog's, which has some of them without their vision tower
        about = {"hf_id": one.hf_id, "config": str(one.config), "dtype": one.dtype, "pooling": one.pooling}
        models |= {name.lower(): about for name in (one.name, one.hf_id, *one.also)}
    for entry in list_models():
        about = {
            "hf_id": entry.hf_id,
            "config": str(data_file(f"models/{entry.name}.json")),
            "dtype": entry.dtype,
            "pooling": None,
            "quantised": _PUBLISHED_QUANTIZED.get(entry.hf_id, {}),
        }
        for name in filter(None, (entry.name, entry.hf_id)):
            models.setdefault(name.lower(), about)
    for row in csv_rows("models/SAME_SHAPE.csv"):
        models.setdefault(row["hf_id"].lower(), {**models[row["slug"]], "is_shared": True})
    datasets: dict[str, dict[str, Any]] = {}
    for row in csv_rows("datasets.csv"):
        about = {"format": row["format"], "splits": split(row["splits"], "|")}
        datasets.setdefault(row["hf_id"].lower(), {})[row["config"]] = about
    return {
        "seq_len": seq_len or DEFAULT_SEQ_LEN,
        "image_size": parse_image_size(image_size or DEFAULT_IMAGE_SIZE),
        "video_size": parse_video_size(video_size or DEFAULT_VIDEO_SIZE),
        "counts_videos": video_size is not None,
        "audio_seconds": audio_seconds or DEFAULT_AUDIO_SECONDS,
        "models": models,
        "datasets": datasets,
    }
