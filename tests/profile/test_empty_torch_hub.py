"""Weights that torch.hub would download: a model keeps its first ones, and what is in the cache is read."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from empty_package import replaced

URL = "https://download.example.org/models/resnet18-f37072fd.pth"


@pytest.fixture
def hub(empty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", torch.nn.Module.load_state_dict)  # given back afterwards
    module = SimpleNamespace(
        get_dir=lambda: str(tmp_path),
        load_state_dict_from_url=lambda url, *more, **options: {"weight": torch.ones(1, 2)},
    )
    empty.downloads.serve_torch_hub(module, empty.replacements.Replacements(str(tmp_path)))
    return module


def test_a_file_that_is_not_there_leaves_the_model_as_it_is(hub: SimpleNamespace, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    assert not model.load_state_dict(hub.load_state_dict_from_url(URL, progress=True)).missing_keys
    assert torch.equal(model.weight, before)
    by = "the first ones of Linear, 0.00 million parameters"
    assert replaced(tmp_path) == [{"kind": "weights", "what": "resnet18-f37072fd.pth", "by": by}]


def test_a_file_that_is_there_is_read(hub: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "resnet18-f37072fd.pth").touch()
    model = torch.nn.Linear(2, 1, bias=False)
    model.load_state_dict(hub.load_state_dict_from_url(URL))
    assert torch.equal(model.weight.detach(), torch.ones(1, 2))
    assert replaced(tmp_path) == []
