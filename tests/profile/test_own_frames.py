"""vramprobe's code within the program is not the program's: never compiled with it, no line of its reads."""

from collections.abc import Callable
from pathlib import Path

import pytest
from run_command import lines, profiled

from vramprobe.emulate.values import reads
from vramprobe.profile import launch

PACKAGE = Path(launch.__file__).parents[1]

COMPILED = """
import torch
from torch._dynamo.utils import get_compilation_metrics

class Optimizer(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.compile(backend="eager")
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                torch._dynamo.graph_break()
                param.add_(param.grad, alpha=-group["lr"])

@torch.compile(backend="eager")
def forward_and_backward(model, x):
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()

model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(2)]).cuda()
optimizer = Optimizer(model.parameters())
for step in range(NUM_STEPS):
    loss = forward_and_backward(model, torch.randn(64, 512, device="cuda"))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if loss.item() > 1e9:
        print("diverged")
print(sorted({metrics.co_filename for metrics in get_compilation_metrics()}))
"""


def test_a_compiled_program_compiles_no_frame_of_ours(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert profiled(tmp_path, COMPILED, num_steps=4, compiles=True).exit_status == 0
    captured = capfd.readouterr()
    assert "script.py" in captured.out
    assert str(PACKAGE) not in captured.out, captured.out
    assert "recompile" not in captured.err
    (values,) = lines(tmp_path, "values")
    read_by = {entry["line"] for entry in values["reads"]}
    assert any(line and "script.py" in line for line in read_by)
    ours = {f"{path.parent.name}/{path.name}" for path in PACKAGE.rglob("*.py")}
    assert not [line for line in read_by if line and line.split(":")[0] in ours]


def test_who_reads_is_not_the_hook_that_hands_the_operator_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's threads have no frame of the program's below it."""
    monkeypatch.setattr(reads, "OWN_FOLDERS", [*reads.OWN_FOLDERS, "/hooks/count/"])
    space: dict[str, Callable[..., dict]] = {}
    exec(compile("def operator(here):\n    return here(1)\n", "/hooks/count/step.py", "exec"), space)
    found = space["operator"](reads.here)
    assert (found["function"], found["line"].split(":")[0]) == (
        "test_who_reads_is_not_the_hook_that_hands_the_operator_on",
        "profile/test_own_frames.py",
    )
    assert not reads.is_the_programs("/hooks/count/step.py")
