"""Tensors that frameworks hold under their own names are named as what they are: masters, flat gradients, shards."""

from pathlib import Path

import pytest
from grids import grid
from run_command import profiled

from vramprobe.profile.analyse import analyse

WEIGHTS = 8 * 1024 * 1024 * 2  # bytes: eight layers in bf16
#: Megatron's: an fp32 buffer that all main_grad are views of, fp32 copies that the optimizer steps.
_MASTERS = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)]).cuda().bfloat16()
buffer, start = torch.zeros(8 * 2**20, device="cuda"), 0
for p in model.parameters():
    p.main_grad = buffer[start : start + p.numel()].view_as(p); start += p.numel()
    p.register_hook(lambda g, p=p: (p.main_grad.add_(g), None)[1])
masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
"""
_STEPS = """
for _ in range(3):
    model(torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)).float().sum().backward()
    for p, q in zip(model.parameters(), masters): q.grad = p.main_grad; p.grad = None
    optimizer.step(); buffer.zero_()
    for q in masters: q.grad = None
"""
_OWN = "optimizer = torch.optim.AdamW(masters, fused=True)\n"
#: As FusedAdam of Transformer Engine and Apex: the optimizer is given the weights and keeps the masters itself.
_IN_THE_OPTIMIZER = """
class Fused(torch.optim.AdamW):
    def __init__(self, params, masters):
        super().__init__(params, fused=True)
        self.param_groups_master = [{"params": masters[:4]}]
        for p, q in zip(params[4:], masters[4:]): self.state[p]["master_param"] = q
    @torch.no_grad()
    def step(self):
        for q in masters:
            state = self.state[q]
            if not state: state.update(exp_avg=torch.zeros_like(q), exp_avg_sq=torch.zeros_like(q))
optimizer = Fused(list(model.parameters()), masters)
"""
#: ZeRO-3's: the parameter is empty but while it is gathered.
_SHARDS = """
shards = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
for p, shard in zip(model.parameters(), shards): p.ds_tensor = shard
"""
#: DeepSpeed's ZeRO-1 and 2: what is averaged replaces the parameters' own gradients before the backward ends.
_AVERAGED = """
import sys, types
del model, buffer, p
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)]).cuda().bfloat16()
class ZeROOptimizer:
    averaged_gradients = {0: None}
sys.modules["deepspeed.runtime.base_optimizer"] = types.SimpleNamespace(ZeROOptimizer=ZeROOptimizer)
zero = ZeROOptimizer()
def average(p, queue=torch.autograd.Variable._execution_engine.queue_callback):
    if p is model[0].weight:
        def epilogue():
            for one in model.parameters(): one.grad = None
            zero.averaged_gradients = {0: [torch.zeros(4 * 2**20, device="cuda") for _ in range(2)]}
            torch.zeros(2**26, device="cuda")
        queue(epilogue)
for p in model.parameters(): p.register_post_accumulate_grad_hook(average)
optimizer = torch.optim.AdamW(masters, fused=True)
for _ in range(3):
    model(torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)).float().sum().backward()
    for q, averaged in zip(masters, torch.cat(zero.averaged_gradients[0]).chunk(8)): q.grad = averaged.view_as(q)
    zero.averaged_gradients = {0: None}
    optimizer.step()
    for q in masters: q.grad = None
"""
#: Made after the first backward, which has looked for those that are there.
_LATER = """
model(torch.randn(1, 1024, device="cuda", dtype=torch.bfloat16)).float().sum().backward()
for p in model.parameters(): p.grad = None
zero = ZeROOptimizer()
"""
#: A program without a module.
_BARE = """
import torch
masters = [torch.randn(1024, 1024, device="cuda", requires_grad=True) for _ in range(4)]
optimizer = torch.optim.AdamW(masters, fused=True)
for _ in range(3):
    sum(torch.randn(64, 1024, device="cuda") @ one for one in masters).sum().backward()
    optimizer.step(); optimizer.zero_grad()
"""


HELD = [
    (_MASTERS + _OWN + _STEPS, (WEIGHTS, 2 * WEIGHTS, 2 * WEIGHTS, 4 * WEIGHTS)),
    (_MASTERS + _SHARDS + _IN_THE_OPTIMIZER + _STEPS, (2 * WEIGHTS, 2 * WEIGHTS, 2 * WEIGHTS, 4 * WEIGHTS)),
    (_MASTERS + _AVERAGED, (WEIGHTS, 2 * WEIGHTS, 4 * WEIGHTS, 4 * WEIGHTS)),  # averaged, and flat for the step
    (
        _MASTERS + _AVERAGED.replace("zero = ZeROOptimizer()\n", _LATER),
        (WEIGHTS, 2 * WEIGHTS, 4 * WEIGHTS, 4 * WEIGHTS),
    ),
    (_BARE, (WEIGHTS, 0, WEIGHTS, 2 * WEIGHTS)),
]


@pytest.mark.parametrize(
    ("script", "expected"),
    grid(HELD, HELD[0], HELD[2]),
    ids=["masters", "in the optimizer", "averaged", "made later", "no module"],
)
def test_a_framework_s_own_tensors(tmp_path: Path, script: str, expected: tuple[int, ...]) -> None:
    """Weights, masters, gradients and state at the peak, but for the few bytes of a step's count."""
    assert profiled(tmp_path, script).exit_status == 0
    (rank,) = analyse(tmp_path / "run").ranks
    found = rank.at_peak
    known = found.weights_bytes, found.master_weights_bytes, found.gradients_bytes, found.optimizer_state_bytes
    assert all(0 <= bytes_ - wanted < 4096 for bytes_, wanted in zip(known, expected, strict=True)), (known, expected)
