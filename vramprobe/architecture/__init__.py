"""Architecture: the dimensions and the parameters of a model, by arithmetic on its config.json.

In: a config.json as a dict. Out: a frozen Architecture with every parameter's name, shape and role, or a VramprobeError
that names the supported families. It stays this side of the torch line, and of the independence line: an account of
what transformers builds that never asks transformers.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from vramprobe.architecture.config import Config
from vramprobe.architecture.families import architecture_of, families
from vramprobe.architecture.parts import (
    Architecture,
    Linear,
    Parameter,
    Role,
    RunFails,
    UnsupportedArchitecture,
    Wrapped,
)

__all__ = [
    "SCORE", "Architecture", "Linear", "Parameter", "Role", "RunFails", "UnsupportedArchitecture", "Wrapped",
    "architecture", "families",
]  # fmt: skip

#: The module by which a model scores rows.
SCORE = "score"


def architecture(config: Mapping[str, Any]) -> Architecture:
    """The Architecture of a ``config.json``, as the pinned transformers builds it.

    Raises UnsupportedArchitecture (a VramprobeError) for a model type without arithmetic here, and VramprobeError for a
    key that is missing or has a value no such model can have.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in families():
        raise UnsupportedArchitecture(
            f"tensors of model type {model_type!r} are not counted here; vramprobe predict records a step of it"
        )
    return _counted(Config(config))


@lru_cache(maxsize=64)
def _counted(config: Config) -> Architecture:
    """One answer asks for the same architecture in many places."""
    found = architecture_of(config)
    return _scoring(found) if config.values.get("num_labels") == 1 else found


def _scoring(arch: Architecture) -> Architecture:
    """With a head of one output, as ``AutoModelForSequenceClassification`` makes it: it is never tied."""
    body = [parameter for parameter in arch.parameters if not parameter.name.startswith("lm_head.")]
    head = Parameter(f"{SCORE}.weight", SCORE, (1, arch.head_width), "head", False)
    return replace(arch, tied=False, scores_rows=True, parameters=(*body, head))
