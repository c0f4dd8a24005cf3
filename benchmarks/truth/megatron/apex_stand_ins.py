"""Apex's and Megatron's own CUDA kernels as functions that allocate the same and compute nothing, for an emulated GPU.

``python apex_stand_ins.py pretrain_gpt.py …`` runs a Megatron program under them. What each allocates is read in Apex's
sources (csrc/, apex/contrib/csrc/layer_norm, apex/optimizers); NVIDIA's published cases ran with the kernels.
"""

from __future__ import annotations

import importlib.machinery
import runpy
import sys
import types
from typing import Any

import torch


class LayerNorm(torch.autograd.Function):
    """Saves its input, and the mean and the inverse deviation of each row in fp32.

    Its backward adds up the gradients of gamma and beta in 16 parts each, in fp32 (HostLayerNormGradient).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, *_: Any) -> torch.Tensor:
        rows = x.numel() // gamma.numel()
        mean, deviation = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
        ctx.save_for_backward(x, gamma, mean, deviation)
        ctx.num_others = len(_)
        return torch.empty_like(x).view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gamma, _, _ = ctx.saved_tensors
        own = (torch.empty_like(x), torch.empty_like(gamma), torch.empty_like(gamma))
        parts = [torch.empty(16, gamma.numel(), dtype=torch.float32, device=x.device) for _ in range(2)]
        del parts
        return *own, *[None] * ctx.num_others


class FusedAdam(torch.optim.Optimizer):
    """Two moments in fp32; its kernel takes lists of tensors and no memory."""

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    state = {
                        name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")
                    }
                    self.state[parameter].update(state)


def _softmax() -> dict[str, Any]:
    """Forward makes its result; backward writes into the gradient that it is given."""
    return {
        "forward": lambda x, *_: torch.empty_like(x),
        "backward": lambda gradient, *_: gradient,
        "get_batch_per_block": lambda *_: 1,
    }


def _norms(chunk: int, overflow: torch.Tensor, lists: list[list[torch.Tensor]], *_: Any) -> tuple[torch.Tensor, ...]:
    return torch.ones(1, device=overflow.device), torch.empty(0, device=overflow.device)


def _apply(function: Any, overflow: torch.Tensor, lists: Any, *given: Any) -> Any:
    return function(2048 * 32, overflow, lists, *given)


def install() -> None:
    """The modules, as imports find them."""
    softmaxes = ("scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda", "scaled_softmax_cuda")
    into = {"wgrad_gemm_accum_fp32": lambda *_: None, "wgrad_gemm_accum_fp16": lambda *_: None}
    modules: dict[str, dict[str, Any]] = {
        "apex": {},
        "apex.contrib": {},
        "apex.contrib.layer_norm": {},
        "apex.contrib.layer_norm.layer_norm": {"FastLayerNormFN": LayerNorm},
        "apex.normalization": {},
        "apex.normalization.fused_layer_norm": {"FusedLayerNormAffineFunction": LayerNorm},
        "apex.optimizers": {"FusedAdam": FusedAdam, "FusedSGD": torch.optim.SGD},
        "apex.multi_tensor_apply": {"multi_tensor_applier": _apply},
        "amp_C": {"multi_tensor_l2norm": _norms, "multi_tensor_scale": lambda *_: None},
        "fused_weight_gradient_mlp_cuda": into,
        **{name: _softmax() for name in softmaxes},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        vars(module).update(content)
        sys.modules[name] = module


if __name__ == "__main__":
    install()
    del sys.argv[0]
    sys.path.insert(0, "")
    runpy.run_path(sys.argv[0], run_name="__main__")
