"""Copies of a model, a launcher's context, and what compiles: each is told as what it is."""

from pathlib import Path

import pytest
from profile_factory import analysed, training
from run_verb import profile_of

from vramprobe.cli import display_profile
from vramprobe.profile.places import Places
from vramprobe.units import GIB, MIB

STDLIB = "/usr/lib/python3.11/copy.py"
CONTEXT_BYTES = 519 * MIB


def test_a_deepcopy_is_its_callers() -> None:
    stack = [
        ["/env/lib/python3.11/site-packages/torch/_tensor.py", 150, "__deepcopy__"],
        [STDLIB, 153, "deepcopy"],
        ["/home/me/train.py", 12, "make_ema"],
    ]
    place = Places((), ["/home/me"]).of_stack(stack)
    assert (place.line, place.function) == ("train.py:12", "make_ema")


def test_a_process_that_compiles_is_no_rank(tmp_path: Path) -> None:
    training(pid=100).write(tmp_path)
    worker = training(pid=101, num_steps=0, argv=["/env/torch/_inductor/compile_worker/__main__.py", "--pickler=x"])
    path = tmp_path / "101.jsonl"
    worker.write(tmp_path)
    path.write_text(path.read_text().splitlines()[0] + "\n")  # killed before anything else
    record = analysed(tmp_path)
    assert [rank.pid for rank in record.ranks] == [100]
    assert not [one for one in record.warnings if "killed" in one]


@pytest.mark.parametrize(
    ("contexts", "said"),
    [(1, "device, with an assumed context"), (2, "device, with the assumed contexts of 2 processes")],
)
def test_each_process_on_the_card_has_a_context(
    contexts: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = analysed(tmp_path, training(emulated=True, device_name="NVIDIA GeForce RTX 4090"), emulate="RTX-4090")
    (rank,) = record.ranks
    peak = rank.peak.model_copy(update={"device_bytes": GIB + contexts * CONTEXT_BYTES, "reserved_bytes": GIB})
    record = record.model_copy(
        update={"ranks": [rank.model_copy(update={"peak": peak})], "context_bytes": CONTEXT_BYTES}
    )
    display_profile.print_profile(record)
    assert [line for line in capsys.readouterr().out.splitlines() if line.endswith(said)]


SCRIPT = """
import copy, torch
model = torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False), torch.nn.Linear(1024, 1024, bias=False)).cuda()
ema = copy.deepcopy(model)
compiled = torch.compile(model, backend="eager")
optimizer = torch.optim.SGD(model.parameters())
for _ in range(4):
    compiled(torch.ones(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_an_ema_copy_is_weights_of_another_model(tmp_path: Path) -> None:
    left, record = profile_of(tmp_path, SCRIPT)
    assert "global hooks" not in left.err  # which are the profile's own, no concern of the script's
    (rank,) = record["ranks"]
    assert rank["at_peak"]["weights_bytes"] == 2 * 2 * 4 * MIB
    (one,) = [one for one in rank["largest"] if one["parameter"] == "another Sequential.*.weight"]
    assert (one["cause"], one["num_blocks"], one["size_bytes"]) == ("weights", 2, 4 * MIB)
    assert one["line"].endswith("train.py:4")
