"""Cells of any config.json for the tests of terms/: made, walked with open sizes or their own, and run for real.

In: a config and what a test wants to differ. Out: a CellSpec of it on the CPU, its Setup, its record, or a failed
assertion where arithmetic and record disagree.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

from factories import make_spec

from vramprobe.architecture import architecture
from vramprobe.bounds.tensors import tensors
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec
from vramprobe.terms import ledger_terms, moments
from vramprobe.terms.cell.setup import Setup, setup_of
from vramprobe.terms.tape.sizes import OpenSizes

#: What oneDNN packs a 16-bit product's operands into, up to 2 MiB: it shows only on models as tiny as these. Here more
#: than was ever seen on them.
SCRATCH_BYTES = 160_000
LORA = {"method": "lora", "lora_r": 8, "lora_dtype": "fp32"}
QLORA = LORA | {"method": "qlora"}
#: Numbers that meet a tensor, and losses: a few scalars more or less.
_SCALARS_BYTES = 64


def cell(config: dict[str, Any], **words: Any) -> CellSpec:
    """A cell of this config.json on the CPU."""
    return CellSpec(**(make_spec(**words).model_dump() | {"architecture": config}))


def setup_for(spec: CellSpec) -> Setup:
    """The setup of a cell, as moments() makes it."""
    arch = architecture(spec.architecture)
    return setup_of(spec, arch, tensors(spec, arch))


def closed(spec: CellSpec) -> Setup:
    """The same, but counted with the cell's own sizes: every count is then the coefficient of 1."""
    return replace(setup_for(spec), sizes=OpenSizes(4096, spec.batch_size, spec.seq_len))


def peak_of(spec: CellSpec) -> int:
    """Bytes of the highest moment."""
    return max(moment.total_bytes for moment in moments(spec))


def measured(spec: CellSpec) -> RunRecord:
    """One real run in this process; it must be believable."""
    from vramprobe.measure.worker import run_cell

    gc.collect()  # an earlier test's tensors, freed while the profiler runs, would count against this cell
    record = run_cell(spec, isolation="spawn")
    assert record.outcome.kind == "ok", record.outcome
    return record


def against_a_real_run(spec: CellSpec, *, scratch_bytes: int = SCRATCH_BYTES) -> None:
    """The ledger to the byte, and the peak but for scalars and, of 16-bit products, oneDNN's scratch."""
    record = measured(spec)
    terms = ledger_terms(spec)
    ledger = {cause: getattr(record.ledger, f"{cause}_bytes") for cause in terms}
    if spec.grad_accum > 1:  # the undivided loss, 4 bytes, is sometimes still there
        assert ledger["saved_activations"] - terms.pop("saved_activations") in (0, 4)
        del ledger["saved_activations"]
    assert terms == ledger
    scratch = 0 if spec.dtype == "fp32" and spec.autocast == "none" else scratch_bytes
    assert -_SCALARS_BYTES <= record.peak.allocated_bytes - peak_of(spec) <= scratch + _SCALARS_BYTES
