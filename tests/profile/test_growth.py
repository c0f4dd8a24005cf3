"""Growth by step: the slope by line, the collection that keeps it, the step that fills the card."""

from pathlib import Path

import pytest
from profile_factory import analysed, training
from run_command import profiled

from vramprobe.profile.analyse import analyse
from vramprobe.profile.growth import _lines_that_add

LEAK = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses, last = [], []
for step in range(NUM_STEPS):
    loss = model(torch.randn(1024, 1024, device="cuda")).square().mean()
    loss.backward(retain_graph=True)
    losses.append(loss)
    last = [loss.detach()]
    optimizer.step()
    optimizer.zero_grad()
"""
#: Kept by a loss's graph: the input and the first layer's output of 1024 rows, and the output of the last one, float32;
#: the loss itself.
SLOPE_BYTES = 1024 * (1024 + 4096 + 1024) * 4 + 4


def test_a_list_of_losses_with_their_graph_is_found(tmp_path: Path, printed) -> None:
    profiled(tmp_path, LEAK, steps=3, num_steps=20)
    record = analyse(tmp_path / "run")
    growth = record.ranks[0].growth
    assert (growth.bytes_per_step, growth.first_step, growth.last_step) == (SLOPE_BYTES, 2, 8)
    assert [(one.place, one.bytes_per_step) for one in growth.by_line] == [("script.py:7 <module>", SLOPE_BYTES)]
    (kept,) = growth.kept
    assert (kept.name, kept.num_tensors, kept.num_with_graph) == ("losses", 9, 9)
    assert kept.added_at == ["script.py:9"]
    peak = record.ranks[0].peak
    assert record.environment.device_total_bytes is not None
    free = record.environment.device_total_bytes - record.context_bytes - peak.allocated_bytes
    assert growth.full_at_step == 9 + free // SLOPE_BYTES + 1
    shown = printed(record)
    assert "memory grows by 24.00 MiB with each step (steps 2 to 8)" in shown
    assert "kept by losses: 9 tensors, 9 with their graph, added to at script.py:9" in shown


def test_steps_that_leave_nothing_behind_do_not_grow(tmp_path: Path) -> None:
    assert analysed(tmp_path, training()).ranks[0].growth is None


@pytest.mark.parametrize(
    ("text", "name", "lines"),
    [
        ("a = []\nlosses.append(x)\nother.append(x)", "losses", [2]),
        ("self.losses.append(x)\nlosses.append(x)", "self.losses", [1]),
        ("seen[step] = x\nseen += [x]\nseen.extend(y)\nlen(seen)", "seen", [1, 2, 3]),
        ("not python (", "losses", []),
    ],
)
def test_lines_that_add_to_a_collection(text: str, name: str, lines: list[int], tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(text)
    assert _lines_that_add(path, name) == lines
