"""Ultralytics' weights and data sets that are not there: the model that the name says, gray images with boxes.

In: ultralytics' modules as they are imported. Out: a checkpoint of the named model with its first weights, a data set
of the published number of images with the classes of its own YAML, in the run's folder. What is there stays as it is.
"""

import os
import re

from vramprobe_values.imports import instead_of

from .media import png

_MAX_IMAGES = 128  # of a split: more only make more epochs of the same steps
_BOXES = 8  # of an image; COCO has 7.3
_IMAGES = re.compile(r"^(train|val|test):.*?#.*?([\d,]+) images", re.MULTILINE)


def serve_weights(module, run):
    """ultralytics.utils.downloads."""

    @instead_of(module, "attempt_download_asset")
    def attempt_download_asset(plain, file, *more, **options):
        name = os.path.basename(str(file))
        if os.path.exists(file) or not name.endswith(".pt"):
            return plain(file, *more, **options)
        made = os.path.join(run.folder, "yolo", name)
        if not os.path.exists(made):
            kind, number = _write_weights(made)
            run.replaced("weights", name, f"the first ones of {kind}, {number / 1e6:.2f} million parameters")
        return made


def _write_weights(path):
    import torch
    from ultralytics import __version__
    from ultralytics.nn import tasks

    name = os.path.basename(path).removesuffix(".pt") + ".yaml"
    task = tasks.guess_model_task(name)
    kinds = {
        "detect": "Detection",
        "segment": "Segmentation",
        "pose": "Pose",
        "classify": "Classification",
        "obb": "OBB",
    }
    kind = getattr(tasks, kinds[task] + "Model")
    model = kind(name, verbose=False)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    about = {"epoch": -1, "best_fitness": None, "ema": None, "optimizer": None, "version": __version__, "date": None}
    torch.save(about | {"model": model.half(), "train_args": {"task": task}}, path)
    return kind.__name__, sum(at.numel() for at in model.parameters())


def serve_data(module, run):
    """ultralytics.data.utils."""

    @instead_of(module, "check_det_dataset")
    def check_det_dataset(plain, dataset, *more, **options):
        return plain(_whole(module, str(dataset), run), *more, **options)


def _whole(module, dataset, run):
    """The YAML of a data set that is there, or of one in the run's folder."""
    file = str(module.check_file(dataset))
    if not file.endswith((".yaml", ".yml")):
        return dataset
    data = module.YAML.load(file)
    home = os.path.join(data.get("path") or os.path.dirname(file))
    homes = [home, os.path.join(str(module.DATASETS_DIR), home)]
    given = data.get("val") or data.get("validation") or data.get("train")
    first = given[0] if isinstance(given, list) else given
    if not first or any(os.path.exists(os.path.join(one, str(first))) for one in homes):
        return dataset
    name = os.path.splitext(os.path.basename(file))[0]
    root, size = os.path.join(run.folder, "yolo", name), run.asked["image_size"]
    made = root + ".yaml"
    if not os.path.exists(made):
        with open(file, encoding="utf-8") as text:
            published = {split: int(number.replace(",", "")) for split, number in _IMAGES.findall(text.read())}
        counts = {split: min(published.get(split, _MAX_IMAGES), _MAX_IMAGES) for split in ("train", "val")}
        for split, number in counts.items():
            _write_split(root, split, number, size, data)
        module.YAML.save(made, data | {"path": root, "train": "images/train", "val": "images/val", "download": None})
        said = f"{counts['train']} images of {size[0]} × {size[1]} with {_BOXES} objects each"
        run.replaced("dataset", name, f"{said}, {counts['val']} for validation")
    return made


def _write_split(root, split, number, size, data):
    image, label = png(*size), _label(data)
    for kind in ("images", "labels"):
        os.makedirs(os.path.join(root, kind, split), exist_ok=True)
    for at in range(number):
        with open(os.path.join(root, "images", split, f"{at:06}.png"), "wb") as file:
            file.write(image)
        with open(os.path.join(root, "labels", split, f"{at:06}.txt"), "w") as file:
            file.write(label)


def _label(data):
    """A line for each object: its class, and the corners of a rectangle, which every task but pose reads; of pose the
    center, the size and the points."""
    num_classes, points = len(data.get("names") or ()) or int(data.get("nc") or 1), data.get("kpt_shape")
    lines = []
    for at in range(_BOXES):
        left, top = 0.1 + 0.05 * at, 0.5 - 0.05 * at
        if points:
            numbers = [left + 0.1, top + 0.1, 0.2, 0.2, *([left + 0.1, top + 0.1, 2][: points[1]] * points[0])]
        else:
            numbers = [left, top, left + 0.2, top, left + 0.2, top + 0.2, left, top + 0.2]
        lines.append(" ".join([str(at % num_classes), *(f"{number:g}" for number in numbers)]))
    return "\n".join(lines) + "\n"
