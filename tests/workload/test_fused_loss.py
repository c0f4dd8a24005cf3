"""Liger's fused linear cross entropy: measured on the CPU with its kernels interpreted, and recorded."""

import inspect
import os
import subprocess
import sys
from typing import Any

import pytest
import yaml
from emulated import require_emulation
from factories import TINY_LLAMA_PATH, make_spec, on_ranks

from vramprobe import catalog
from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.errors import MissingDependency
from vramprobe.measure.isolation import require_packages
from vramprobe.predict.questions import predicted
from vramprobe.predict.shares import near
from vramprobe.records import store
from vramprobe.records.record import RunRecord
from vramprobe.rules.cell import _NO_FUSED_LOSS

pytest.importorskip("liger_kernel", reason="pip install vramprobe[liger]")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

GIB = 2**30
#: Runs on the CPU with Liger's kernels interpreted.
MEASURED: list[dict[str, Any]] = [
    {"method": "full", "recipe": "fp32", "batch_size": 1, "grad_accum": 2},
    {"method": "lora", "lora_r": 4},
]


COMMON = {"model": str(TINY_LLAMA_PATH), "batch_size": 2, "seq_len": 16, "timing_steps": 0}
COMMON |= {"fused_linear_cross_entropy": True}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[RunRecord]:
    """One run of the cells, as a user runs a sweep."""
    folder = tmp_path_factory.mktemp("fused")
    sweep = {"name": "fused", "defaults": COMMON, "cells": MEASURED}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    command = [sys.executable, "-m", "vramprobe", "run", folder / "sweep.yaml", "-o", folder, "--device", "cpu"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return list(store.read(folder).records)


def test_it_is_measured_on_a_cpu_too(records: list[RunRecord]) -> None:
    assert [record.outcome.kind for record in records] == ["ok", "ok"]
    assert all(record.environment.versions["liger-kernel"] for record in records)


def test_a_fused_loss_takes_most_of_what_the_logits_took() -> None:
    require_emulation()
    words = {"model": "llama-3.2-1b", "method": "qlora", "batch_size": 4, "seq_len": 4096, "device": "cuda"}
    cell = make_spec(**words, gradient_checkpointing=True)
    both = (cell.model_copy(update={"fused_linear_cross_entropy": yes}) for yes in (False, True))
    plain, fused = (predicted(one, gpu=None).peak_allocated_bytes.value for one in both)
    logits = 12 * cell.num_tokens * cell.architecture["vocab_size"]
    assert plain - fused > 0.75 * logits > 15 * GIB


def test_the_families_that_liger_leaves_out_are_refused() -> None:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as FAMILIES

    known = {entry.config["model_type"] for entry in catalog.list_models()}
    sources = {name: inspect.getsource(apply) for name, apply in FAMILIES.items()}
    fused = {name for name, source in sources.items() if "if fused_linear_cross_entropy:" in source}
    fused -= {name for name, source in sources.items() if "LinearCrossEntropy is not available" in source}  # Granite's
    assert set(_NO_FUSED_LOSS) == known - fused


def test_a_rank_is_composed_under_ddp_alone() -> None:
    cell = make_spec(model="llama-3.2-1b", device="cuda", fused_linear_cross_entropy=True)
    with pytest.raises(UnsupportedArchitecture, match="under fsdp is not composed with a fused loss"):
        near(on_ranks(cell, 2, "fsdp"))


def test_on_the_cpu_it_asks_for_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from vramprobe.workload.fused_loss import require_kernels

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    require_kernels("cuda")
    for ask in (lambda: require_kernels("cpu"), lambda: require_packages([make_spec(fused_linear_cross_entropy=True)])):
        with pytest.raises(MissingDependency, match=r"need device cuda; .*TRITON_INTERPRET=1"):
            ask()


def test_without_liger_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from vramprobe.workload.fused_loss import load_liger

    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(MissingDependency, match=r"liger-kernel's, .* Install vramprobe\[liger\]"):
        load_liger()


def test_without_liger_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep is told before its first cell, not by an error in each."""
    from vramprobe.measure import isolation

    util, found = isolation.importlib.util, isolation.importlib.util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "liger_kernel" else found(name))
    isolation.require_packages([make_spec()])
    with pytest.raises(MissingDependency, match=r"fused-loss needs liger_kernel, .*vramprobe\[measure,liger\]"):
        isolation.require_packages([make_spec(), make_spec(fused_linear_cross_entropy=True)])
