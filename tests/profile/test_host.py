"""Host memory: what a script's CPU tensors and pinned blocks take in each phase, of all ranks, and a host's verdict."""

from pathlib import Path

from profile_factory import analysed, training, write_launcher
from run_command import NO_COMPILER
from run_verb import Verb, profile_of

from vramprobe.profile.analyse import analyse
from vramprobe.profile.hook import holes
from vramprobe.units import GIB, KIB, MIB


def write_two_ranks(folder: Path) -> None:
    for rank in range(2):
        script = training(pid=100 + rank, rank=rank, world_size=2)
        for phase, step, both, pinned in (
            ("load", None, 16 * GIB, 0),
            ("forward", 1, 2 * GIB, GIB),
            ("backward", 2, 3 * GIB, GIB),
            ("save", None, (8 - 8 * rank) * GIB, 0),  # the first rank gathers
        ):
            script.say(
                "host", phase=phase, step=step, both_bytes=both, tensors_bytes=both - pinned, pinned_bytes=pinned
            )
        script.say("mapped", path="/models/one.safetensors", num_bytes=15 * GIB)
        script.write(folder)
    write_launcher(folder)


def test_ranks_that_load_a_checkpoint_each_are_added_up(tmp_path: Path, printed) -> None:
    write_two_ranks(tmp_path)
    host = analyse(tmp_path, host_memory_bytes=24 * GIB).host
    assert [(one.name, one.total_bytes // GIB, one.pinned_bytes // GIB) for one in host.phases] == [
        ("load", 32, 0),
        ("training", 6, 2),
        ("save", 8, 0),
    ]
    assert (host.peak_bytes, host.peak_phase, host.fits) == (32 * GIB, "load", False)
    assert host.mapped_bytes == 15 * GIB  # one file, however many map it
    out = printed(analyse(tmp_path, host_memory_bytes=24 * GIB))
    assert "load 32.00 GiB up to 16.00 GiB on each of 2 ranks" in out
    assert "host of 24.00 GiB: does not fit, at least 32.00 GiB in load" in out
    assert analyse(tmp_path, host_memory_bytes=32 * GIB).host.fits is True
    assert analyse(tmp_path).host.fits is None


def test_nobody_counts_the_host_beside_a_real_gpu(tmp_path: Path) -> None:
    assert analysed(tmp_path, training()).host is None


SCRIPT = """
import torch
from safetensors.torch import load_file, save_file
save_file({"weight": torch.zeros(16 << 20, dtype=torch.uint8)}, "/tmp/weights-of-test-host.safetensors")
mapped = load_file("/tmp/weights-of-test-host.safetensors")
read = torch.empty(256 << 20, dtype=torch.uint8)
pinned = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
del read
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(4):
    staged = torch.empty(32 << 20, dtype=torch.uint8)
    model(torch.ones(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    del staged
"""


def test_the_driver_counts_cpu_tensors_and_pinned_memory(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    script = NO_COMPILER + SCRIPT.replace("/tmp/weights-of-test-host.safetensors", str(file))
    host = profile_of(tmp_path, script, "--host-memory", "256MiB")[1]["host"]
    by_phase = {one["name"]: one for one in host["phases"]}
    load, steps = by_phase["load"], by_phase["training"]
    assert load["pinned_bytes"] == steps["pinned_bytes"] == 64 * MIB
    assert 0 <= load["total_bytes"] - (256 + 64) * MIB < 16 * KIB
    assert 0 <= steps["total_bytes"] - (64 + 32) * MIB < 256 * KIB  # the batch, and what the host reads
    assert (host["peak_phase"], host["fits"]) == ("load", False)
    assert host["mapped_bytes"] == file.stat().st_size


def test_only_an_emulated_driver_counts(tmp_path: Path) -> None:
    left = Verb(tmp_path, ["true"], "--host-memory", "1GiB").left(60)
    assert left.status == 1
    assert "add --emulate GPU" in left.err


CASTS = """
import torch
from safetensors import safe_open
FILE = {file!r}

def anonymous_mib():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024

torch.zeros(1, pin_memory=True)
torch.empty(1, device="meta") + 1  # which imports a thousand modules
with safe_open(FILE, "pt") as file:
    before = anonymous_mib()
    weight = file.get_slice("weight")[...]
layer = torch.nn.Linear(8192, 8192, bias=False, device="meta", dtype=torch.float32)
layer.load_state_dict({{"weight": weight.to(torch.float32)}}, assign=True)
experts = torch.stack([layer.half().weight.data for _ in range(4)])
pinned = experts.pin_memory()
state = {{name: one.clone() for name, one in layer.cuda().cpu().state_dict().items()}}
print("grown by", anonymous_mib() - before, "MiB", pinned.is_pinned(), int(pinned.count_nonzero()))
"""


def test_an_empty_checkpoint_that_is_cast_stacked_and_pinned_takes_no_host_memory(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    holes.write_holes(file, {"weight": ("BF16", [8192, 8192], 128 * MIB)})
    left, record = profile_of(tmp_path, CASTS.format(file=str(file)))
    said = next(line for line in left.out.splitlines() if line.startswith("grown by")).split()
    assert float(said[2]) < 32  # of 128 as float32, half and state, 4 times 128 stacked, and pinned
    assert said[4:] == ["True", "0"]
    host = record["host"]
    assert host["peak_bytes"] > 1024 * MIB  # counted all the same
    assert host["phases"][0]["pinned_bytes"] >= 512 * MIB
