"""Into a process at its start: wait for the libraries that would ask for what is not there.

In: :func:`install`, called as the hook's is. Out: huggingface_hub finds repositories in the run's folder, transformers
reads local folders without weights, datasets returns rows; the hub is offline for this process and those it starts.
"""

import json
import os

from vramprobe_values.imports import when_imported

from .told import Told, complain

FOLDER_VARIABLE = "VRAMPROBE_PROFILE"
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
    from . import folders, hub, rows

    os.environ["HF_HUB_OFFLINE"] = "1"
    told = Told(folder)
    repositories = hub.Repositories(folder, asked["models"], told)
    when_imported("huggingface_hub.file_download", repositories.serve)
    when_imported("transformers.modeling_utils", lambda module: folders.serve_models(module, repositories))
    when_imported("transformers.tokenization_utils_base", lambda module: folders.serve_tokenizers(module, repositories))
    when_imported("transformers.models.auto.tokenization_auto", lambda module: folders.serve_auto(module, repositories))
    when_imported("datasets.load", lambda module: rows.serve(module, asked, told))
