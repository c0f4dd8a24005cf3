"""Synthetic cells and records, valid and small, for tests of everything behind the instruments.

In: what a test wants to differ. Out: a CellSpec of a tiny llama on the CPU, or a RunRecord whose ledger closes.
Never measures: the numbers are made up, but deterministic and consistent with each other.
"""

import json
import re
from pathlib import Path
from typing import Any

from vramprobe.predict.expected import expected
from vramprobe.records.outcomes import Contaminated, Error, Interrupted, Invalid, Ok, Oom, OomHost, Skipped, Timeout
from vramprobe.records.phase_memory import Composition, MemoryLedger, Peak, PhaseMemory
from vramprobe.records.record import Environment, ModelFacts, RunRecord, Started, Timing
from vramprobe.resolve import resolve
from vramprobe.spec import CellSpec

TINY_LLAMA_PATH = Path(__file__).parent / "data" / "tiny-llama"
TINY_LLAMA: dict[str, Any] = json.loads((TINY_LLAMA_PATH / "config.json").read_text())
#: By hand: embedding and head 2·256·64, last norm 64, two layers: q, o 2·64·64, k, v 2·64·32, MLP 3·64·176, norms 2·64.
TINY_LLAMA_PARAMS = 2 * 256 * 64 + 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176 + 2 * 64)
#: Of the small sweep that fits are made of, whose recipes ship, and what its records have over what is predicted.
MODELS = ("smollm2-135m", "smollm2-360m", "qwen2.5-0.5b")
TRUE = 1.06


def make_spec(**overrides: Any) -> CellSpec:
    """A cell of the tiny llama on the CPU, full fine-tuning, batch 2 × 16; ``overrides`` are resolve()'s own words."""
    words = {"model": str(TINY_LLAMA_PATH), "method": "full", "device": "cpu", "batch_size": 2, "seq_len": 16}
    return resolve(**(words | overrides))


def make_environment(**overrides: Any) -> Environment:
    """A CPU machine with fixed versions."""
    values: dict[str, Any] = {
        "device_name": "Test CPU @ 2.00GHz",
        "device_total_bytes": 16 * 1024**3,
        "isolation": "forkserver",
        "num_threads": 2,
        "platform": "Linux-6.1-x86_64",
        "python": "3.11.9",
        "versions": {
            "torch": "2.13.0+cpu",
            "transformers": "5.23.0",
            "peft": "0.21.0",
            "bitsandbytes": "0.50.0",
            "accelerate": "1.15.0",
            "vramprobe": "0.1.0",
        },
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "dirty": False,
    }
    return Environment(**(values | overrides))


def make_ledger(spec: CellSpec) -> MemoryLedger:
    """Made-up bytes that follow the cell's dtype, tokens and method, and add up exactly at the peak."""
    width = 4 if spec.dtype == "fp32" else 2
    trained = TINY_LLAMA_PARAMS if spec.method == "full" else 4096
    parts = {
        "weights_bytes": TINY_LLAMA_PARAMS * width,
        "gradients_bytes": trained * width,
        "optimizer_state_bytes": 2 * trained * width,
        "batch_bytes": spec.num_tokens * 24,
        "saved_activations_bytes": spec.num_tokens * 4000 // (4 if spec.gradient_checkpointing else 1),
        "temporaries_bytes": spec.num_tokens * 256 * 14,
    }
    held = {name: size for name, size in parts.items() if name != "temporaries_bytes"}
    at_peak = Composition(total_bytes=sum(parts.values()), **parts)
    return MemoryLedger(**held, unaccounted_bytes=0, at_peak=at_peak)


def make_record(spec: CellSpec | None = None, **overrides: Any) -> RunRecord:
    """One finished attempt at ``spec`` on the ``cpu`` instrument; ``overrides`` are RunRecord's fields.

    An outcome other than ok leaves peak, ledger, facts, phases and timing empty unless ``overrides`` holds them.
    """
    spec = spec or make_spec()
    values: dict[str, Any] = {
        "attempt_id": f"attempt-{spec.fingerprint}",
        "cell_id": spec.cell_id,
        "fingerprint": spec.fingerprint,
        "instrument": "cpu",
        "started_at": "2026-03-01T12:00:00Z",
        "spec": spec,
        "environment": make_environment(),
        "outcome": Ok(),
    }
    if isinstance(overrides.get("outcome", values["outcome"]), Ok):
        values |= _measured(spec)
    return RunRecord(**(values | overrides))


def _measured(spec: CellSpec) -> dict[str, Any]:
    ledger = make_ledger(spec)
    peak_bytes = ledger.at_peak.total_bytes
    idle = ledger.weights_bytes + ledger.optimizer_state_bytes + ledger.batch_bytes
    phases = [
        PhaseMemory(name="load", allocated_end_bytes=ledger.weights_bytes, allocated_peak_bytes=ledger.weights_bytes)
    ]
    for step in range(1, spec.steps + 1):
        before = idle if step > 1 else idle - ledger.optimizer_state_bytes  # the first optimizer_step makes the state
        ends = {
            "forward": before + ledger.saved_activations_bytes,
            "backward": before + ledger.gradients_bytes,
            "optimizer_step": idle + ledger.gradients_bytes,
            "zero_grad": idle,
        }
        for name, end in ends.items():
            highest = peak_bytes - idle + before if name == "backward" else end
            phases.append(PhaseMemory(name=name, step=step, allocated_end_bytes=end, allocated_peak_bytes=highest))
    return {
        "peak": Peak(phase="backward", step=2, allocated_bytes=peak_bytes, load_allocated_bytes=ledger.weights_bytes),
        "ledger": ledger,
        "phases": phases,
        "facts": ModelFacts(
            num_params=TINY_LLAMA_PARAMS,
            num_trainable_params=TINY_LLAMA_PARAMS if spec.method == "full" else 4096,
            num_quantised_params=0,
            quantised_weights_bytes=0,
            residual_dtype="bfloat16",
        ),
        "timing": Timing(step_seconds=[0.02, 0.021], load_seconds=0.1, traced_seconds=0.2, total_seconds=0.5),
    }


def make_started(record: RunRecord) -> Started:
    """The line that goes before ``record`` in a journal."""
    names = ("attempt_id", "cell_id", "fingerprint", "instrument", "started_at", "sweep")
    return Started(**{name: getattr(record, name) for name in names})


def make_oom(spec: CellSpec, *, phase: str = "backward", **overrides: Any) -> RunRecord:
    """An attempt at ``spec``, a CUDA cell, that ran out of memory on a card of 24 GiB."""
    outcome = Oom(phase=phase, step=1, requested_bytes=2**30, allocated_bytes=23 * 2**30, message="CUDA out of memory")
    environment = make_environment(device_name="Test GPU", nvml_total_bytes=24 * 2**30)
    return make_record(spec, outcome=outcome, environment=environment, **overrides)


def specs(models: tuple[str, ...] = MODELS) -> list[CellSpec]:
    """A small sweep over models, methods and lengths, for CUDA."""
    return [
        resolve(model=model, method=method, device="cuda", batch_size=2, seq_len=seq_len, gradient_checkpointing=on)
        for model in models
        for method in ("full", "lora", "qlora")
        for seq_len in (2048, 4096)
        for on in (False, True)
    ]


def synthetic(spec: CellSpec, ratio: float = 1.0, **overrides: Any) -> RunRecord:
    """A record that seems measured on an H100: its peak is ``ratio`` times what a recipe that ships says."""
    peak = overrides.pop("peak", {})
    machine = make_environment(device_name="NVIDIA H100 80GB HBM3")
    made = make_record(spec, **({"instrument": "cuda", "environment": machine} | overrides))
    found = expected(made)
    values = {
        "phase": found.peak_phase,
        "step": 2,
        "allocated_bytes": round(ratio * found.peak_allocated_bytes.value),
        "reserved_bytes": round(ratio * found.reserved_bytes.value),
        "load_allocated_bytes": 1,
    }
    own = {
        "peak": Peak(**(values | peak)),
        "facts": made.facts.model_copy(update={"num_params": spec.num_params}),
        "ledger": made.ledger.model_copy(update={"at_peak": None}),  # a tiny llama's
    }
    return made.model_copy(update=own)


def unpadded(markdown: str) -> str:
    """A page's Markdown, its tables' columns without the spaces that align them."""
    return re.sub(r" *\| *", " | ", markdown).replace("\n | ", "\n| ").replace(" | \n", " |\n")


#: One outcome of each kind.
OUTCOMES = [
    Ok(),
    Oom(phase="backward", step=1, requested_bytes=10, allocated_bytes=20, message="out of memory"),
    OomHost(message="killed"),
    Timeout(limit_seconds=60),
    Error(error_type="ValueError", message="boom"),
    Interrupted(message="SIGTERM"),
    Skipped(why="dominated", evidence="a smaller cell ran out"),
    Invalid(reasons=["step 3 differs from step 2"]),
    Contaminated(baseline_before_bytes=0, baseline_after_bytes=2**30),
]


def on_ranks(spec: CellSpec, num_gpus: int, sharding: str, **others: Any) -> CellSpec:
    """``spec`` on several GPUs, also as nobody would run it."""
    return spec.model_copy(update={"num_gpus": num_gpus, "sharding": sharding, **others})
