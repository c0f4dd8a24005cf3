"""Into a process at its start: wait for the libraries that would ask for what is not there.

In: :func:`install`, called as the hook's is. Out: huggingface_hub finds repositories in the run's folder, transformers
reads local folders without weights, datasets returns rows; the hub is offline for this process and those it starts.
"""

import functools
import json
import os

from vramprobe_values.imports import when_imported

from .replacements import Replacements, complain

FOLDER_VARIABLE = "VRAMPROBE_PROFILE"
#: transformers' modules, and the class in each that reads a folder.
_KINDS = (
    ("transformers.modeling_utils", "PreTrainedModel"),
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase"),
    ("transformers.models.auto.tokenization_auto", "AutoTokenizer"),
    ("transformers.models.auto.processing_auto", "AutoProcessor"),
    ("transformers.models.auto.image_processing_auto", "AutoImageProcessor"),
    ("transformers.models.auto.feature_extraction_auto", "AutoFeatureExtractor"),
    ("transformers.feature_extraction_utils", "FeatureExtractionMixin"),
)
_is_installed = False


def install():
    """Twice is once; nothing where the run does not ask for it."""
    global _is_installed
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or _is_installed:
        return
    _is_installed = True
    try:
        with open(os.path.join(folder, "run.json"), encoding="utf-8") as file:
            asked = json.load(file)["options"].get("stand_ins")
    except (OSError, ValueError, KeyError) as error:
        complain(error)
        return
    if not asked:
        return
    from . import added_rows, audio, folders, hub, hub_kernels, processors, rows, torch_hub, videos, yolo

    # telemetry waits for its server, Axolotl's for minutes before it loads a model, and an emulated run is no use of it
    os.environ |= {"HF_HUB_OFFLINE": "1", "YOLO_OFFLINE": "true", "DO_NOT_TRACK": "1"}
    replacements = Replacements(folder)
    repositories = hub.Repositories(folder, asked["models"], replacements)
    serve = {
        "huggingface_hub.file_download": repositories.serve,
        "huggingface_hub.hf_api": repositories.serve_listing,
        "kernels": lambda module: hub_kernels.serve(module, replacements=replacements),
        "datasets.load": lambda module: rows.serve(module, asked, replacements),
        "datasets.features.audio": lambda module: audio.serve(module, folder=folder, replacements=replacements),
        "transformers.processing_utils": lambda module: processors.serve(
            module, repositories=repositories, replacements=replacements, asked=asked
        ),
        "transformers.models.auto.video_processing_auto": lambda module: processors.serve_videos(
            module, replacements=replacements
        ),
        "transformers.video_processing_utils": lambda module: videos.serve(
            module, folder=folder, size=asked["video_size"], replacements=replacements
        ),
        "torch.hub": lambda module: torch_hub.serve(module, replacements=replacements),
        "ultralytics.utils.downloads": lambda module: yolo.serve_weights(
            module, folder=folder, replacements=replacements
        ),
        "ultralytics.data.utils": lambda module: yolo.serve_data(
            module, folder=folder, size=asked["image_size"], replacements=replacements
        ),
        **{name: functools.partial(folders.serve, kind=kind, repositories=repositories) for name, kind in _KINDS},
    }
    for name, act in serve.items():
        when_imported(name, functools.partial(_guarded, act))
    when_imported("transformers.modeling_utils", functools.partial(_guarded, added_rows.serve))


def _guarded(serve, module):
    try:
        serve(module)
    except Exception as error:  # of a release that is made otherwise; the command goes on without
        complain(error)
