"""Steps of programs that update their weights by code of their own, as torch's examples of an LSTM and Muon's do."""

from pathlib import Path

import pytest
from run_command import lines, profiled

#: Two steps each, all of one program without an optimizer of torch.optim.
LOOPS = {
    "in place": """
for _ in range(2):
    model.zero_grad()
    loss_of(model).backward()
    with torch.no_grad():
        for one in model.parameters(): one.sub_(one.grad, alpha=0.1)
""",
    "data": """
for _ in range(2):
    loss_of(model).backward()
    for one in model.parameters():
        one.data.add_(one.grad, alpha=-0.1)
        one.grad = None
""",
    "accumulated": """
for _ in range(2):
    for _ in range(2): loss_of(model).backward()
    with torch.no_grad():
        for one in model.parameters(): one.sub_(one.grad); one.grad.zero_()
""",
    "functional": """
values = dict(model.named_parameters())
x = torch.randn(64, 1024, device="cuda")
def loss_with(values): return torch.func.functional_call(model, values, x).square().mean()
for _ in range(2):
    gradients = torch.func.grad(loss_with)(values)
    values = {name: one.detach() - 0.1 * gradients[name] for name, one in values.items()}
""",
    "no module": """
def run():
    x, weight = (torch.randn(1024, 1024, device="cuda", requires_grad=like) for like in (False, True))
    for _ in range(2):
        gradient, = torch.autograd.grad((x @ weight).square().mean(), weight)
        weight = (weight - 0.1 * gradient).detach().requires_grad_()
run()
""",
}
SCRIPT = """
import torch
model = torch.nn.Linear(1024, 1024).cuda()
def loss_of(model): return model(torch.randn(64, 1024, device="cuda")).square().mean()
"""


@pytest.fixture(scope="module")
def looped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own_steps")
    assert profiled(folder, SCRIPT + "".join(LOOPS.values()), compiles=True).exit_status == 0
    return folder


def test_each_loop_has_two_steps(looped: Path) -> None:
    assert [line["step"] for line in lines(looped, "step")] == list(range(1, 2 * len(LOOPS) + 1))


@pytest.mark.parametrize(("loop", "times"), [("in place", 1), ("data", 1), ("accumulated", 2)])
def test_what_updates_the_weights_is_the_optimizers_step(looped: Path, loop: str, times: int) -> None:
    step = 2 * (list(LOOPS).index(loop) + 1)
    names = [phase["name"] for phase in lines(looped, "phase") if phase["step"] == step]
    assert [name for name in names if name not in ("zero_grad", "other")] == [
        *["forward", "backward"] * times,
        "optimizer_step",
    ]


def test_an_optimizer_that_has_not_stepped_yet_is_waited_for(tmp_path: Path) -> None:
    """DeepSpeed takes each micro-step's gradients away, and steps after the last."""
    script = """
import torch
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    for _ in range(2):
        model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
        taken = [one.grad for one in model.parameters()]
        model.zero_grad()
    for one, grad in zip(model.parameters(), taken): one.grad = grad
    optimizer.step()
"""
    assert profiled(tmp_path, script).exit_status == 0
    assert [line["step"] for line in lines(tmp_path, "step")] == [1, 2, 3]
