"""Another library's head and loss in place of a model's: TRL's tiles of the logits, or Cut Cross-Entropy's kernels.

In: a prepared model. Out: the same model, whose forward the library has patched, and what it is called with to take
that way. Both run Triton kernels, which need a GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vramprobe.errors import MissingDependency
from vramprobe.spec import CellSpec
from vramprobe.trainers import TRAINERS

if TYPE_CHECKING:
    from torch import nn

#: What SFTTrainer has each token's log-probability come with, for its metrics (sft_trainer.py).
_WITH_METRICS = ("log_probs", "entropy", "is_top1")
_CUT = "'cut-cross-entropy[transformers] @ git+https://github.com/axolotl-ai-cloud/ml-cross-entropy'"


def load_trl(spec: CellSpec) -> None:
    """Import what the cell runs of it. Raises MissingDependency where it is not installed."""
    try:
        from trl.trainer.utils import add_fused_lm_head  # noqa: F401

        if TRAINERS[spec.trainer].trl:
            trainer_class(spec)
    except ImportError as error:
        raise MissingDependency(
            f"{spec.of_trl} is computed by trl 1.16, which is not to be had here: {error}. "
            "Install vramprobe[trl], or leave it out"
        ) from error


def trainer_class(spec: CellSpec) -> type:
    """TRL's class of the cell's trainer."""
    module, _, name = f"trl.{TRAINERS[spec.trainer].trl}".rpartition(".")
    return getattr(import_module(module), name)


def load_library(spec: CellSpec) -> None:
    """Import what head and loss are another library's of. Raises MissingDependency where it is not installed."""
    if spec.uses_trl:
        load_trl(spec)
        return
    try:
        from cut_cross_entropy.transformers import cce_patch  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            f"{spec.other_head} is put into a model by Axolotl's build of cut-cross-entropy, which is not to be had "
            f"here: {error}. Install {_CUT} (PyPI's release has no patch for transformers), or leave it out"
        ) from error


def fuse_head(spec: CellSpec, model: nn.Module) -> None:
    """Patch the model's forward as a trainer does, where the cell has such a head; before autocast is put around it."""
    if spec.loss == "chunked_nll":
        load_trl(spec)
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(base_of(model), outputs=_WITH_METRICS)
    elif spec.loss == "cut_cross_entropy":
        load_library(spec)
        from cut_cross_entropy.transformers import cce_patch

        cce_patch(base_of(model))


def options_of(spec: CellSpec) -> dict[str, Any]:
    """Keyword arguments of the model's forward beside the batch."""
    return {"fused_lm_head": True} if spec.loss == "chunked_nll" else {}


def base_of(model: nn.Module) -> nn.Module:
    """The model itself, without peft around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
