"""Liger's fused linear cross entropy: measured on the CPU with its kernels interpreted, recorded, and counted."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from typing import Any

import pytest
import yaml
from emulated import require_emulation
from factories import TINY_LLAMA_PATH, make_spec, on_ranks
from grids import exhaustive, grid

from vramprobe import catalog, spec
from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.errors import MissingDependency
from vramprobe.measure.isolation import require_packages
from vramprobe.predict import recorded
from vramprobe.predict.predict import predict
from vramprobe.predict.shares import near
from vramprobe.records import store
from vramprobe.records.record import RunRecord
from vramprobe.rules.cell import _NO_FUSED_LOSS
from vramprobe.terms import moments
from vramprobe.terms.cell.setup import branch_of

pytest.importorskip("liger_kernel", reason="pip install vramprobe[liger]")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

GIB, MIB = 2**30, 2**20
#: What oneDNN packs for a 16-bit product, and what wraps a number: left out of the arithmetic.
SCRATCH_BYTES, SMALL_BYTES = 80_000, 2048
MEASURED: list[dict[str, Any]] = [
    {"method": "full", "recipe": "fp32"},
    {"method": "full", "recipe": "fp32", "batch_size": 1, "grad_accum": 2},
    {"method": "full"},
    {"method": "full", "recipe": "mixed", "gradient_checkpointing": True},
    {"method": "lora", "lora_r": 4},
    {"method": "qlora", "kbit_prep": "trl", "lora_r": 4},
]


COMMON = {
    "model": str(TINY_LLAMA_PATH),
    "batch_size": 2,
    "seq_len": 16,
    "timing_steps": 0,
    "fused_linear_cross_entropy": True,
}


@pytest.fixture(scope="module")
def records(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRecord]:
    """One run of the cells that are asked for, as a user runs a sweep; by fingerprint."""
    folder = tmp_path_factory.mktemp("fused")
    asked = [item.callspec.params["words"] for item in request.session.items if item.path == request.path
             and item.originalname == "test_arithmetic_is_what_was_measured"]  # fmt: skip
    sweep = {"name": "fused", "defaults": COMMON, "cells": asked}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    command = [sys.executable, "-m", "vramprobe", "run", folder / "sweep.yaml", "-o", folder, "--device", "cpu"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return {record.fingerprint: record for record in store.read(folder).records}


def highest_by_phase(cell: spec.CellSpec) -> dict[str, int]:
    found: dict[str, int] = {}
    for moment in moments(cell):
        found[moment.phase] = max(found.get(moment.phase, 0), moment.total_bytes)
    return found


@pytest.mark.parametrize(
    "words", grid(MEASURED, MEASURED[1], MEASURED[4]), ids=lambda words: "-".join(map(str, words.values()))
)
def test_arithmetic_is_what_was_measured(records: dict[str, RunRecord], words: dict[str, Any]) -> None:
    record = records[make_spec(**COMMON | words).fingerprint]
    assert record.outcome.kind == "ok", record.outcome
    assert record.environment.versions["liger-kernel"]
    counted = highest_by_phase(record.spec)
    is_fp32 = record.spec.dtype == "fp32" and record.spec.autocast == "none"
    for real in record.phases:
        if real.step != record.spec.steps or real.micro_step not in (None, record.spec.grad_accum):
            continue
        slack = SMALL_BYTES + (0 if is_fp32 else SCRATCH_BYTES)
        if real.name in counted:
            assert -SMALL_BYTES <= real.allocated_peak_bytes - counted[real.name] <= slack, real.name


#: On CUDA beside a recording, where a whole head's copy or product would be far above all that is left out.
CUDA: list[dict[str, Any]] = [
    {"method": "full"},
    {"method": "full", "recipe": "mixed"},  # the head is cast anew for every chunk, beside autocast's own copy
    {"method": "full", "recipe": "fp32"},
    {"method": "lora"},
    {"method": "qlora", "kbit_prep": "trl", "gradient_checkpointing": True},
]


@exhaustive
@pytest.mark.parametrize("words", CUDA, ids=lambda words: "-".join(map(str, words.values())))
def test_on_a_gpu_arithmetic_is_what_is_recorded(words: dict[str, Any]) -> None:
    require_emulation()
    cell = make_spec(
        model="llama-3.2-1b",
        num_layers=3,
        device="cuda",
        batch_size=3,
        seq_len=1000,
        fused_linear_cross_entropy=True,
        **words,
    )
    found, counted = recorded.predict(cell), highest_by_phase(cell)
    rest = found.peak_allocated_bytes.value - counted[found.peak_phase]  # cuBLAS's workspaces, and rounding to 512 B
    assert 0 <= rest <= 32 * MIB


def test_chunks_are_as_many_tokens_as_liger_says() -> None:
    """``BT = 4096*4, V = 32000, H = 4096 ==> inc_factor = 8, chunk_size = 2048``, as its comment has it."""
    cell = make_spec(model="llama-2-7b", batch_size=4, seq_len=4096, fused_linear_cross_entropy=True)
    arch = architecture(cell.architecture)
    assert branch_of(cell, arch) == (False, 2048, "none")
    assert branch_of(cell.model_copy(update={"batch_size": 1, "seq_len": 3}), arch) == (False, 1, "none")
    assert branch_of(cell.model_copy(update={"batch_size": 1, "seq_len": 1}), arch) == (False, None, "none")
    assert branch_of(cell.model_copy(update={"fused_linear_cross_entropy": False}), arch) == (False, None, "none")


def test_a_fused_loss_takes_most_of_what_the_logits_took() -> None:
    cell = make_spec(
        model="llama-3.1-8b", method="qlora", device="cuda", batch_size=4, seq_len=4096, gradient_checkpointing=True
    )
    plain, fused = (
        predict(cell.model_copy(update={"fused_linear_cross_entropy": yes})).peak_allocated_bytes.value
        for yes in (False, True)
    )
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
    assert near(on_ranks(cell, 2, "ddp")).peak_allocated_bytes.value > predict(cell).peak_allocated_bytes.value
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

    found = isolation.importlib.util.find_spec
    monkeypatch.setattr(
        isolation.importlib.util, "find_spec", lambda name: None if name == "liger_kernel" else found(name)
    )
    isolation.require_packages([make_spec()])
    with pytest.raises(MissingDependency, match=r"fused-loss needs liger_kernel, .*vramprobe\[measure,liger\]"):
        isolation.require_packages([make_spec(), make_spec(fused_linear_cross_entropy=True)])
