"""The runs that are repeated under every set of libraries: four models, three methods, two trainers; a whole Mixtral.

In: nothing. Out: Runs, each a name, a model of the catalog with so many of its layers, and the words of train.py.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramprobe.catalog import find_model
from vramprobe.catalog.depth import cut_depth

HERE = Path(__file__).parent
SCRIPT = HERE / "train.py"
CARD = "H200-SXM"
METHODS = ("full", "lora", "qlora")
TRAINERS = ("trainer", "trl")
#: Model → with so many of its layers, None for all: shapes are the real ones, a run takes a third of the time.
MODELS = {"qwen2.5-0.5b": None, "llama-3-8b": 8, "mistral-7b-v0.1": 8, "mixtral-8x7b": 4}
_WHOLE_TOO = [("mixtral-8x7b", "qlora")]


@dataclass(frozen=True, kw_only=True)
class Run:
    """``num_layers``: None for all of the model's."""

    model: str
    method: str
    trainer: str
    num_layers: int | None = None

    @property
    def name(self) -> str:
        """Name in the journal and on the command line: ``llama-3-8b:8 lora trl`` with 8 layers."""
        cut = "" if self.num_layers is None else f":{self.num_layers}"
        return f"{self.model}{cut} {self.method} {self.trainer}"

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        config = find_model(self.model).config
        return config if self.num_layers is None else cut_depth(config, self.num_layers)

    @property
    def fingerprint(self) -> str:
        """Hash of all that decides what is run, but for the libraries."""
        told = json.dumps([self.config, self.method, self.trainer, CARD, SCRIPT.read_text()], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:12]

    def command(self, python: Path, folder: Path) -> list[str]:
        """Return what is started in a folder of its own."""
        return [str(python), str(SCRIPT), str(folder), self.method, self.trainer]


def runs() -> list[Run]:
    """All of them, the smallest model first."""
    chosen = [(model, method, num_layers) for model, num_layers in MODELS.items() for method in METHODS]
    chosen += [(model, method, None) for model, method in _WHOLE_TOO]
    return [
        Run(model=model, method=method, trainer=trainer, num_layers=num_layers)
        for model, method, num_layers in chosen
        for trainer in TRAINERS
    ]
