"""Liger's fused linear cross entropy in place of a model's head and loss: never all logits at once.

In: a prepared model. Out: the same model, whose forward makes the loss from the last hidden states chunk by chunk, and
its gradients with it. Nothing else of Liger's is put in. Its kernels are Triton's and need a GPU; on the CPU they run
where Triton interprets them, which is slow and allocates the same tensors.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
from typing import TYPE_CHECKING, Any

from vramprobe.errors import MissingDependency, SpecError
from vramprobe.spec import CellSpec

if TYPE_CHECKING:
    from torch import nn

#: Triton's own switch, which counts where kernels are defined: before Liger is imported.
_INTERPRET = "TRITON_INTERPRET"


def load_liger() -> None:
    """Import what runs. Raises MissingDependency where it is not installed."""
    try:
        import liger_kernel.transformers  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            f"fused_linear_cross_entropy is liger-kernel's, which is not to be had here: {error}. "
            "Install vramprobe[liger], or leave the option out"
        ) from error


def require_kernels(device: str) -> None:
    """Raise MissingDependency where Triton's kernels cannot run."""
    if device == "cpu" and os.environ.get(_INTERPRET) != "1":
        raise MissingDependency(
            "fused_linear_cross_entropy runs Triton kernels, which need device cuda; on the CPU Triton can interpret "
            f"them: set {_INTERPRET}=1 (memory is as true as ever, times are not), or leave the option out"
        )


def fuse_loss(spec: CellSpec, model: nn.Module) -> None:
    """Put the fused loss in, as transformers' Trainer does under ``use_liger_kernel``, and nothing else of Liger's.

    Raises MissingDependency where it cannot run, SpecError where Liger does not know the family.
    """
    require_kernels(spec.device)
    load_liger()
    if spec.device == "cpu":
        _let_go_of_arguments()
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from transformers.integrations.liger import apply_liger_kernel

    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(spec.model_type)
    if apply is None:
        raise SpecError(f"liger-kernel has no fused_linear_cross_entropy for {spec.model_type}; leave it out")
    switches = {
        name: False for name, given in inspect.signature(apply).parameters.items() if isinstance(given.default, bool)
    }
    apply_liger_kernel(model, switches | {"fused_linear_cross_entropy": True})


def _let_go_of_arguments() -> None:
    """Triton's interpreter leaves each launch's tensors in a cycle of references, which a GPU does not: break it."""
    from triton.runtime.interpreter import GridExecutor

    if hasattr(GridExecutor.__call__, "__wrapped__"):
        return
    launch = GridExecutor.__call__

    @functools.wraps(launch)
    def launch_and_collect(self: Any, *args: Any, **options: Any) -> None:
        launch(self, *args, **options)
        gc.collect(0)  # the cycle is younger than anything else

    GridExecutor.__call__ = launch_and_collect
