"""Repositories of a run's own, made by the package ``profile/empty`` (the fixture ``empty``)."""

import json
import types
from pathlib import Path
from typing import Any

from vramprobe.profile import stand_ins


def repositories(empty: types.SimpleNamespace, home: Path, cache: Path) -> Any:
    """Those of a run in ``home``, and huggingface_hub's own names over them, with ``cache`` for the hub's."""
    found = empty.hub.Repositories(
        str(home), stand_ins.stand_ins()["models"], empty.replacements.Replacements(str(home))
    )
    from huggingface_hub import constants

    empty.monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    module = types.SimpleNamespace(
        repo_folder_name=lambda *, repo_id, repo_type: "--".join([f"{repo_type}s", *repo_id.split("/")]),
        try_to_load_from_cache=lambda *asked: asked,
    )
    empty.hub.serve_cache(module, types.SimpleNamespace(repositories=found))
    found.look = module.try_to_load_from_cache
    return found, lambda name, repo_type="model": module.repo_folder_name(repo_id=name, repo_type=repo_type)


def replaced(home: Path) -> list[dict[str, str]]:
    path = home / "replaced"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
