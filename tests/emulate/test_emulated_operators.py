"""Operators run on an emulated GPU, forward and backward, and none ends its process."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from emulated import require_emulation
from grids import exhaustive

from benchmarks.truth import operators
from vramprobe.emulate.enter import entrance_for_command

SCRIPT = Path(__file__).with_name("operators_on_card.py")
#: One of each family of torch's table.
FAMILIES = """
    add matmul index_put sort cumsum fft.rfft linalg.svd linalg.lstsq linalg.ldl_factor cholesky_inverse
    nn.functional.batch_norm nn.functional.conv2d nn.functional.ctc_loss nn.functional.scaled_dot_product_attention
    nn.functional.embedding_bag signal.windows.hann sparse.sampled_addmm special.erfcx masked.softmax
""".split()  # noqa: SIM905


ROWS = """
import torch
on_host = torch.ones(1, 1 << 20, dtype=torch.int64)  # 8 MiB: more than the driver moves
mask = on_host.cuda()
again = torch.empty_like(mask)
again.copy_(mask)
weights = torch.ones(1 << 21, dtype=torch.int32).cuda()  # of a GPTQ layer, say: no pages for them
print(mask.to(torch.bool).all().item(), again.sum().item(), weights.sum().item())
"""


def test_the_values_of_a_mask_of_a_million_tokens_are_known() -> None:
    """Else transformers builds a mask of one byte per pair of tokens, 16 GiB on one of eight ranks."""
    way = entrance_for_command(require_emulation(), "A100-80GB")
    try:
        command = [str(way.python), "-c", ROWS]
        done = subprocess.run(command, env=way.environment, capture_output=True, text=True, check=False)
    finally:
        shutil.rmtree(way.machine, ignore_errors=True)
    assert done.stdout == "True 1048576 0\n", done.stderr[-2000:]


@exhaustive
def test_operators_of_vision_speech_and_linear_algebra_run() -> None:
    way = entrance_for_command(require_emulation(), "A100-80GB")
    try:
        command = [str(way.python), str(SCRIPT)]
        done = subprocess.run(command, env=way.environment, capture_output=True, text=True, check=False)
        events = (way.machine / "events.jsonl").read_text()
    finally:
        shutil.rmtree(way.machine, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-2000:]
    *rows, sizes = done.stdout.splitlines()
    assert [row for row in rows if not row.endswith(": ok")] == []
    assert len(rows) > 40
    found = json.loads(sizes)
    assert found["wrong"] == []
    # What cuDNN gave for these shapes on a P100 (pytorch/pytorch#2895); torch's allocator rounds to 2 MiB pieces' ends.
    assert found["kept"]["LSTM"] == pytest.approx(736_000_000, abs=1 << 20)
    assert found["kept"]["GRU"] == pytest.approx(864_000_000, abs=1 << 20)
    told = [json.loads(line) for line in events.splitlines()]
    unknown, assumed = (
        {row["name"] for row in told if row["kind"] == kind} for kind in ("lower_bound", "assumed_workspace")
    )
    assert {"cufftXtMakePlanMany", "cusolverDnXgeqrf_bufferSize"} <= unknown
    assert {"cudnnBackendGetAttribute", "cudnnGetRNNTempSpaceSizes"} <= assumed


@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", [FAMILIES, pytest.param((), marks=exhaustive)], ids=["families", "all"])
def test_torchs_own_operators_run_as_the_table_says(names: tuple[str, ...]) -> None:
    require_emulation()
    table = {row["operator"]: row["outcome"] for row in operators.read_csv(operators.TABLE)}
    found = {row["operator"]: row["outcome"] for row in operators.run(names)}
    assert len(found) >= len(names or table)
    assert {name: outcome for name, outcome in found.items() if outcome != table[name]} == {}


def test_no_operator_of_the_table_ended_by_a_signal() -> None:
    rows = operators.read_csv(operators.TABLE)
    assert len(rows) > 600
    assert [row["operator"] for row in rows if row["outcome"].startswith(("signal", "exit"))] == []
    assert sum(row["outcome"] in operators.RUNS for row in rows) > 0.95 * len(rows)
