"""Into a process at its start: wait for the libraries that would ask for what is not there.

In: :func:`install`, called as the hook's is. Out: huggingface_hub finds repositories in the run's folder, transformers
reads local folders without weights, datasets returns rows; the hub is offline for this process and those it starts.
"""

import functools
import json
import os

from vramprobe_profile.journal import FOLDER_VARIABLE
from vramprobe_values.imports import when_imported

from .replacements import Replacements, complain

#: transformers' and diffusers' modules, and the class in each that reads a folder.
_KINDS = (
    ("transformers.modeling_utils", "PreTrainedModel"),
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase"),
    ("transformers.models.auto.tokenization_auto", "AutoTokenizer"),
    ("transformers.models.auto.processing_auto", "AutoProcessor"),
    ("transformers.models.auto.image_processing_auto", "AutoImageProcessor"),
    ("transformers.models.auto.feature_extraction_auto", "AutoFeatureExtractor"),
    ("transformers.feature_extraction_utils", "FeatureExtractionMixin"),
    ("diffusers.models.modeling_utils", "ModelMixin"),
    ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline"),
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
    from . import downloads, hub, loading, media, processors, rows, yolo

    # telemetry waits for its server, Axolotl's for minutes before it loads a model, and an emulated run is no use of it
    os.environ |= {"HF_HUB_OFFLINE": "1", "YOLO_OFFLINE": "true", "DO_NOT_TRACK": "1"}
    run = Replacements(folder, asked)
    run.repositories = hub.Repositories(folder, asked["models"], run)
    for name, serve in (
        ("huggingface_hub.file_download", hub.serve_cache),
        ("huggingface_hub.hf_api", hub.serve_listing),
        ("kernels", downloads.serve_kernels),
        ("datasets.load", rows.serve),
        ("huggingface_hub._snapshot_download", rows.serve_existence),
        ("datasets.features.audio", media.serve_audio),
        ("transformers.processing_utils", processors.serve),
        ("transformers.models.auto.video_processing_auto", processors.serve_videos),
        ("transformers.video_processing_utils", media.serve_videos),
        ("torch.hub", downloads.serve_torch_hub),
        ("ultralytics.utils.downloads", yolo.serve_weights),
        ("ultralytics.data.utils", yolo.serve_data),
        *((name, functools.partial(loading.serve_folders, kind=kind)) for name, kind in _KINDS),
        ("transformers.modeling_utils", loading.serve_added_rows),
    ):
        when_imported(name, functools.partial(_guarded, serve, run))


def _guarded(serve, run, module):
    try:
        serve(module, run)
    except Exception as error:  # of a release that is made otherwise; the command goes on without
        complain(error)
