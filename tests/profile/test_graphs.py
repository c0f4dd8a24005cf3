"""Loops that capture forward and backward in a CUDA graph, as torchtitan 0.3 does: each replay is of a step."""

from pathlib import Path

from run_command import lines, profiled, unprofiled

CAPTURES = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batch, stream = torch.randn(64, 1024, device="cuda"), torch.cuda.Stream()

def forward_backward():
    model(batch).square().mean().backward()

with torch.cuda.stream(stream):
    forward_backward()
optimizer.step()
optimizer.zero_grad()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    forward_backward()
for step in range(NUM_STEPS):
    graph.replay()
    optimizer.step()
print("peak", torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.memory_allocated())
"""


def test_each_replay_is_the_backward_of_a_step(tmp_path: Path) -> None:
    ended = profiled(tmp_path, CAPTURES, steps=3, num_steps=20)
    assert (ended.exit_status, ended.stopped) == (0, True)
    steps = [line["step"] for line in lines(tmp_path, "step")]
    assert len(steps) < 10
    last = [line["name"] for line in lines(tmp_path, "phase") if line["step"] == steps[-1]]
    assert {"backward", "optimizer_step"} <= set(last)


def test_the_hook_leaves_the_peaks_of_replays_as_they_are(tmp_path: Path) -> None:
    ended = profiled(tmp_path, CAPTURES, num_steps=6)
    assert ended.exit_status == 0
    phases = lines(tmp_path, "phase")
    seen = [max(line[f"{tier}_peak_bytes"] for line in phases) for tier in ("allocated", "reserved")]
    assert seen == [int(word) for word in unprofiled(tmp_path, CAPTURES).split()[1:3]]
