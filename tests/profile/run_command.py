"""A command under the hook on an emulated card, and what its processes said."""

import json
import subprocess
from pathlib import Path
from typing import Any

from emulated import require_emulation

from vramprobe.profile import launch

#: For its first optimizer torch loads its compiler: two seconds of CPU, which a script that compiles nothing can save.
NO_COMPILER = (
    "import sys as _s, types as _t; _s.modules['torch._dynamo'] = "
    "_t.SimpleNamespace(disable=lambda step=None, *_, **__: step, graph_break=lambda *_, **__: None)"
)
TRAIN = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(NUM_STEPS):
    loss = model(torch.randn(64, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("peak", torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.memory_allocated())
"""


def profiled(
    folder: Path,
    script: str,
    *,
    steps: int | None = None,
    trace: str = "all",
    emulate: str = "RTX-4090",
    words: tuple[str, ...] = (),
    num_steps: int = 6,
    verify: bool = False,
    stand_ins: dict[str, Any] | None = None,
    compiles: bool = False,
) -> launch.Ended:
    """Run a script under the hook; the raw files are in ``folder / "run"``. ``compiles``: it needs torch's
    compiler, as transformers and a checkpoint do."""
    python = require_emulation()
    path = folder / "script.py"
    path.write_text(_prepared(script, num_steps, compiles))
    (folder / "run").mkdir()
    command = [str(python), str(path), *words]
    options = launch.Options(trace=trace, steps=steps, verify=verify, stand_ins=stand_ins)
    return launch.run(command, folder / "run", options, emulate=emulate)


def _prepared(script: str, num_steps: int, compiles: bool) -> str:
    """Its lines keep their numbers: one that begins with an empty line begins with what saves the compiler."""
    first = NO_COMPILER if script.startswith("\n") and not compiles else ""
    return first + script.replace("NUM_STEPS", str(num_steps))


def unprofiled(folder: Path, script: str, *, emulate: str = "RTX-4090", num_steps: int = 6) -> str:
    """Return what the same script prints on the same card without the hook, its values watched as there."""
    from vramprobe.emulate.enter import entrance_for_command

    path = folder / "plain.py"
    path.write_text(_prepared(script, num_steps, compiles=False))
    way = entrance_for_command(require_emulation(), emulate)
    done = subprocess.run([way.python, path], env=way.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def lines(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Every line of the run's processes, or those of one kind."""
    found = [
        json.loads(line) for path in sorted((folder / "run").glob("*.jsonl")) for line in path.read_text().splitlines()
    ]
    return [line for line in found if kind in (None, line["line"])]


def told(folder: Path) -> dict[str, Any]:
    """run.json."""
    return json.loads((folder / "run" / "run.json").read_text())
