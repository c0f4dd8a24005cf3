"""A training on an emulated card that writes the raw files itself, by torch's own history; ``python … FOLDER``.

Started by test_emulated_run.py in a process that sees the card. Four linear layers of 1024 × 1024 in fp32, Adam, three
steps; a buffer that nobody holds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vramprobe.profile.hook import history

TIERS = ("allocated", "reserved", "requested")


def main(folder: Path) -> None:
    torch.cuda.memory._record_memory_history(enabled="all", context="all", stacks="python")
    first_ns = last_ns = time.time_ns()
    card = torch.cuda.get_device_properties(0)
    lines: list[dict[str, Any]] = [
        {
            "line": "process",
            "pid": os.getpid(),
            "argv": sys.argv,
            "torch": torch.__version__,
            "device_index": 0,
            "device_name": card.name,
            "device_total_bytes": card.total_memory,
            "capability": [card.major, card.minor],
            "emulated": True,
            "started_ns": first_ns,
        }
    ]
    held: list[dict[str, Any]] = []

    def phase(name: str, step: int | None, work: Callable[[], Any]) -> Any:
        nonlocal last_ns
        torch.cuda.reset_peak_memory_stats()
        result, stats, start_ns = work(), torch.cuda.memory_stats(), last_ns
        last_ns = time.time_ns()
        ends = {f"{tier}_end_bytes": stats[f"{tier}_bytes.all.current"] for tier in TIERS}
        peaks = {f"{tier}_peak_bytes": stats[f"{tier}_bytes.all.peak"] for tier in TIERS}
        lines.append(
            {"line": "phase", "name": name, "step": step, "start_ns": start_ns, "end_ns": last_ns} | ends | peaks
        )
        return result

    def hold(cause: str, named: Any) -> None:
        found = [(name, tensor.untyped_storage()) for name, tensor in named if tensor.is_cuda]
        held.append(
            {
                "cause": cause,
                "time_ns": time.time_ns(),
                "storages": {one.data_ptr(): one.nbytes() for _, one in found},
                "names": {one.data_ptr(): name for name, one in found},
            }
        )

    def load() -> tuple[torch.nn.Module, torch.Tensor]:
        layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)]
        return torch.nn.Sequential(*layers).cuda(), torch.zeros(512, 1024, device="cuda")

    model, batch = phase("load", None, load)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for step in (1, 2, 3):
        if step == 1:
            hold("weights", model.named_parameters())
        loss = phase("forward", step, lambda: model(batch).sum())

        def backward(loss: torch.Tensor = loss) -> None:
            loss.backward()
            hold("gradients", [(name, one.grad) for name, one in model.named_parameters()])

        phase("backward", step, backward)
        del loss, backward
        phase("optimizer_step", step, optimizer.step)
        hold("optimizer_state", [("", one) for state in optimizer.state.values() for one in state.values()])
        phase("zero_grad", step, optimizer.zero_grad)
        lines.append({"line": "step", "step": step})
    lines.append({"line": "end", "why": "exit", "num_alloc_retries": 0, "num_ooms": 0})
    found = history.compact(torch.cuda.memory._snapshot(), 0)
    found |= {"traced": "all", "first_ns": first_ns, "last_ns": time.time_ns(), "held": held}
    history.write(found, folder / f"{os.getpid()}.history")
    (folder / f"{os.getpid()}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
