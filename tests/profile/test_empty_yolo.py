"""Ultralytics' data sets that are missing: as many images as the YAML says, labels of its classes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from empty_package import replaced

COCO8 = """
path: coco8 # dataset root dir
train: images/train # train images (relative to 'path') 4 images
val: images/val # val images (relative to 'path') 2 images
names:
  0: person
  1: bicycle
download: https://example.org/coco8.zip
"""


def served(empty, folder: Path) -> SimpleNamespace:
    """Return ultralytics.data.utils over files of ``folder``; its check returns the YAML that it is given."""

    def save(file: str, data: dict) -> None:
        Path(file).write_text(yaml.safe_dump(data))

    module = SimpleNamespace(
        YAML=SimpleNamespace(load=lambda file: yaml.safe_load(Path(file).read_text()), save=save),
        DATASETS_DIR=folder / "datasets",
        check_file=lambda name: str(folder / name),
        check_det_dataset=lambda dataset: yaml.safe_load((folder / dataset).read_text()),
    )
    empty.yolo.serve_data(module, empty.replacements.Replacements(str(folder / "run"), {"image_size": (64, 48)}))
    return module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "coco8.yaml").write_text(COCO8)
    return tmp_path


def test_a_missing_data_set_has_the_published_number_of_images(folder: Path, empty) -> None:
    found = served(empty, folder).check_det_dataset("coco8.yaml")
    root = Path(found["path"])
    assert (root.is_relative_to(folder / "run"), found["download"], found["names"][1]) == (True, None, "bicycle")
    assert len(list((root / "images" / "train").iterdir())) == 4
    assert len(list((root / "images" / "val").iterdir())) == 2
    lines = (root / "labels" / "train" / "000003.txt").read_text().splitlines()
    assert len(lines) == 8
    assert {line.split()[0] for line in lines} == {"0", "1"}
    assert all(0 <= float(number) <= 1 for line in lines for number in line.split()[1:])
    [said] = replaced(folder / "run")
    assert (said["kind"], said["what"]) == ("dataset", "coco8")
    assert said["by"] == "4 images of 64 × 48 with 8 objects each, 2 for validation"


def test_a_data_set_that_is_there_stays(folder: Path, empty) -> None:
    (folder / "datasets" / "coco8" / "images" / "val").mkdir(parents=True)
    assert served(empty, folder).check_det_dataset("coco8.yaml")["path"] == "coco8"
    assert not (folder / "run" / "yolo").exists()


def test_labels_of_poses_have_their_points(empty) -> None:
    [first, *_] = empty.yolo._label({"names": {0: "person"}, "kpt_shape": [17, 3]}).splitlines()
    assert len(first.split()) == 5 + 17 * 3
