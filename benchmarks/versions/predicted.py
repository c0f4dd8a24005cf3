"""What ``vramprobe predict --stack`` says of a run under a stack: arithmetic alone, beside what was emulated.

In: a Run of transformers' Trainer and a stack's packages. Out: bytes of a training step's peak, or None where there is
no arithmetic. What other packages decide is asked for in the cell's own words.
"""

from __future__ import annotations

from typing import Any

from benchmarks.versions.runs import CARD, Run
from vramprobe.catalog import find_gpu
from vramprobe.errors import VramprobeError
from vramprobe.predict.predict import predict
from vramprobe.predict.stack import on_stack
from vramprobe.spec import CellSpec, resolve

#: The batch and the length of train.py.
_SHAPE = {"batch_size": 4, "seq_len": 1024, "device": "cuda"}
_METHODS: dict[str, dict[str, Any]] = {
    "full": {"dtype": "bf16", "autocast": "bf16"},
    "lora": {},
    "qlora": {"gradient_checkpointing": True},  # prepare_model_for_kbit_training turns it on
}


def predicted_bytes(run: Run, pins: dict[str, str]) -> int | None:
    """Of a step of a run by transformers' Trainer; None also for TRL, whose defaults are each release's own."""
    if run.trainer != "trainer":
        return None
    try:
        return predict(spec_of(run, pins), gpu=find_gpu(CARD)).peak_allocated_bytes.value
    except VramprobeError:
        return None


def spec_of(run: Run, pins: dict[str, str]) -> CellSpec:
    """The cell that a run by transformers' Trainer is, under these releases. Raises VramprobeError."""
    is_fused = _release(pins["transformers"]) >= (4, 54) and _release(pins["torch"]) >= (2, 8)  # by default
    optimizer = {"optim": "adamw_torch_fused" if is_fused else "adamw_torch"}
    words = _METHODS[run.method] | _SHAPE | _adapters(run, pins) | optimizer
    spec = resolve(model=run.model, method=run.method, num_layers=run.num_layers, **words)
    return on_stack(spec, ",".join(f"{name}-{pins[name]}" for name in ("transformers", "bitsandbytes")))


def _adapters(run: Run, pins: dict[str, str]) -> dict[str, Any]:
    """What peft's releases make of the same LoraConfig."""
    peft, transformers = (_release(pins[name]) for name in ("peft", "transformers"))
    words: dict[str, Any] = {}
    if run.method == "lora" and peft < (0, 12):  # no autocast_adapter_dtype yet; on 4-bit layers they were in fp32
        words["lora_dtype"] = "bf16"
    if run.method != "full" and transformers >= (5, 0) and peft < (0, 19):  # all-linear knows no experts yet
        words["lora_targets"] = "q_proj,k_proj,v_proj,o_proj" if "mixtral" in run.model else "all-linear"
    return words


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
