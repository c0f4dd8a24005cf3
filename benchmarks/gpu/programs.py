"""Own programs under ``vramprobe profile``: ``python benchmarks/gpu/programs.py FOLDER [JOBS] [--emulate GPU]``.

Each in a process of its own, four at a time (the allocator's counters are of the process alone); FOLDER gets the JSON
of each as NAME.json, and NAME.err where it ended otherwise. The programs are those of
``benchmarks/truth/own_commands.py`` at the shapes that were predicted there, and of PROGRAMS here: convolutions, an
LSTM, a compiled GPT, one that runs out of memory.
"""

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.truth.own_commands import COMMANDS, SHAPES

_LIMIT_SECONDS = 600
_LOOP = """
import sys
import torch
rows, length = map(int, sys.argv[1:3])


def train(model, batch, loss_of, precision=torch.bfloat16):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(6):
        with torch.autocast("cuda", precision, enabled=precision is not None):
            loss = loss_of(model(*batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
_VISION = (
    _LOOP
    + """
import torchvision
model = torchvision.models.{name}().cuda()
images, labels = torch.rand(rows, 3, length, length, device="cuda"), torch.zeros(rows, device="cuda", dtype=torch.long)
train(model, (images,), lambda logits: torch.nn.functional.cross_entropy(logits, labels){precision})
"""
)
#: Name → (program, (rows, length) …).
PROGRAMS: dict[str, tuple[str, tuple[tuple[int, int], ...]]] = {
    "resnet50": (_VISION.format(name="resnet50", precision=""), ((16, 224), (64, 224))),
    "resnet50 fp32": (_VISION.format(name="resnet50", precision=", None"), ((16, 224),)),
    "vit": (_VISION.format(name="vit_b_16", precision=""), ((16, 224),)),
    "lstm": (
        _LOOP
        + """
model = torch.nn.LSTM(512, 1024, num_layers=3, dropout=0.1, batch_first=True).cuda()
train(model, (torch.rand(rows, length, 512, device="cuda"),), lambda outputs: outputs[0].float().square().mean())
""",
        ((8, 256),),
    ),
    "compiled gpt": (
        _LOOP
        + """
from transformers import GPT2Config, GPT2LMHeadModel
model = torch.compile(GPT2LMHeadModel(GPT2Config(n_layer=4)).cuda())
ids = torch.zeros(rows, length, device="cuda", dtype=torch.long)
train(model, (ids,), lambda outputs: torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), ids.flatten()))
""",
        ((4, 512),),
    ),
    "batch norm and deconvolution": (
        _LOOP
        + """
nn = torch.nn
model = nn.Sequential(nn.Conv2d(3, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.GELU(), nn.Conv2d(64, 128, 3, 2, 1, groups=8),
    nn.GroupNorm(8, 128), nn.SiLU(), nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
    nn.Upsample(scale_factor=2), nn.Conv2d(64, 3, 3, 1, 1)).cuda()
train(model, (torch.rand(rows, 3, length, length, device="cuda"),), lambda outputs: outputs.float().square().mean())
""",
        ((8, 256),),
    ),
    # ends out of memory on any card of today, in the loss
    "out of memory": (COMMANDS["plain loop"], ((64, 16384),)),
}


def all_runs() -> list[tuple[str, str, tuple[int, int]]]:
    """(name, program, shape) of everything that is run."""
    own = [(name, code, shape) for name, code in COMMANDS.items() for shape in SHAPES]
    return own + [(name, code, shape) for name, (code, shapes) in PROGRAMS.items() for shape in shapes]


def run(name: str, code: str, shape: tuple[int, int], folder: Path, emulate: list[str]) -> str:
    """Profile one program; how it ended in a line."""
    label = f"{name.replace(' ', '-').replace(',', '')}_{shape[0]}x{shape[1]}"
    with tempfile.TemporaryDirectory() as home:
        script = Path(home, "train.py")
        script.write_text(code)
        words = [sys.executable, "-m", "vramprobe", "profile", "--json", *emulate, "--", sys.executable, str(script)]
        try:
            done = subprocess.run(
                [*words, *map(str, shape)], cwd=home, capture_output=True, text=True, timeout=_LIMIT_SECONDS
            )
        except subprocess.TimeoutExpired as late:
            folder.joinpath(label + ".err").write_bytes(late.stderr or b"")
            return f"{label}: not done in {_LIMIT_SECONDS} s"
    folder.joinpath(label + ".json").write_text(done.stdout)
    if done.returncode:
        folder.joinpath(label + ".err").write_text(done.stderr)
    return f"{label}: exit status {done.returncode}"


def main() -> None:
    """All programs, four at a time."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    words = sys.argv[2:]
    emulate = words[words.index("--emulate") :] if "--emulate" in words else []
    jobs = int(words[0]) if words and words[0].isdecimal() else 4
    with ThreadPoolExecutor(jobs) as pool:
        for line in pool.map(lambda one: run(*one, folder, emulate), all_runs()):
            print(line, flush=True)


if __name__ == "__main__":
    main()
