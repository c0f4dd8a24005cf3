"""Hold the arithmetic of one rank of several against the real thing: ``python benchmarks/ranks/sharding.py``.

Each cell is a tiny llama that trains three steps on the CPU as rank 0 of a world that is not there: torch's ``fake``
process group, whose collectives return at once, under accelerate's own ``fsdp2_prepare_model``, a bare ``fully_shard``
or DDP. The cpu instrument sees each allocation. Written: benchmarks/ranks/sharding.csv and .md, arithmetic beside
observed; ``--quick`` observes the few cells of tests/predict/test_sharded_ranks.py instead and prints JSON, ``--check``
writes nothing and fails where a table is stale. Values of gradients are nonsense (nothing was reduced); sizes are not.

Two kernels of the CPU take scratch that CUDA's do not, and are put aside: oneDNN's reordered weights and
``_chunk_cat``'s padded copies. What differs with one rank already (wrapped by nothing) is no matter of sharding.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from vramprobe import api
from vramprobe.measure.cpu import CpuInstrument
from vramprobe.measure.observation import Observation
from vramprobe.spec import CellSpec
from vramprobe.terms.sharding.ranks import rank_moments
from vramprobe.workload import model as model_module
from vramprobe.workload import training
from vramprobe.workload.adapter import prepare_model
from vramprobe.workload.model import TORCH_DTYPES, build_model
from vramprobe.workload.optimizer import build_optimizer
from vramprobe.workload.stepper import Stepper

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, write_or_check

FOLDER = Path(__file__).resolve().parent
MODEL = FOLDER.parents[1] / "tests" / "data" / "tiny-llama"
PHASES = ("forward", "backward", "optimizer_step")
#: Name → what the cell differs in.
METHODS: dict[str, dict[str, Any]] = {
    "full, bf16": {"method": "full", "recipe": "all-bf16"},
    "full, bf16, checkpointing": {"method": "full", "recipe": "all-bf16", "gradient_checkpointing": True},
    "full, fp32 under bf16 policy": {"method": "full", "recipe": "mixed"},
    "full, fp32, 2 micro-steps": {"method": "full", "recipe": "fp32", "grad_accum": 2},
    "full, bf16, 6 layers": {"method": "full", "recipe": "all-bf16", "num_layers": 6},
    "LoRA, fp32 adapters under bf16 policy": {"method": "lora", "lora_r": 16},
    "LoRA, the same, checkpointing": {"method": "lora", "lora_r": 16, "gradient_checkpointing": True},
    "QLoRA, nf4 stored as bf16": {"method": "qlora", "quant": "nf4", "kbit_prep": "none"},
}
#: How the model is wrapped → the kind of sharding, and whether the arithmetic is asked for all in the root's unit.
WRAPPINGS = {
    "nothing": ("ddp", False),
    "accelerate, reshard": ("fsdp", False),
    "accelerate, no reshard": ("fsdp-shard-grad-op", False),
    "fully_shard, layers and root": ("fsdp", True),
    "DDP": ("ddp", False),
}
QUICK = [
    ("full, bf16", "accelerate, reshard", 2),
    ("full, fp32 under bf16 policy", "accelerate, reshard", 3),
    ("full, bf16, checkpointing", "accelerate, no reshard", 4),
    ("LoRA, the same, checkpointing", "accelerate, reshard", 8),
    ("full, bf16", "fully_shard, layers and root", 4),
    ("full, fp32, 2 micro-steps", "accelerate, reshard", 2),
    ("full, bf16", "DDP", 2),
    ("QLoRA, nf4 stored as bf16", "accelerate, reshard", 3),
    ("full, bf16, 6 layers", "accelerate, reshard", 4),
    ("full, bf16, 6 layers", "accelerate, no reshard", 2),
]
Case = tuple[str, str, int]  # method, wrapping, world size


def cell(method: str) -> CellSpec:
    """The tiny cell of a method."""
    words = {"model": str(MODEL), "device": "cpu", "batch_size": 2, "seq_len": 32, "optim": "adamw_torch_fused"}
    more = dict(METHODS[method])
    depth = more.pop("num_layers", None)
    spec = api.cell(**words, **more)
    return spec.model_copy(update={"architecture": spec.architecture | {"num_hidden_layers": depth}}) if depth else spec


def observe(spec: CellSpec, wrapping: str, num_gpus: int) -> dict[str, int]:
    """Rank 0's bytes: what it holds by cause, and the peak of each phase of the third step."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_gpus)
    instrument = CpuInstrument()
    try:
        gc.collect()
        with torch.backends.mkldnn.flags(enabled=False), _copied_without_scratch(), _stored_as_floats():
            instrument.start()
            held = _train(spec, wrapping, instrument)
            return held | _peaks(instrument.finish())
    finally:
        dist.destroy_process_group()


def _train(spec: CellSpec, wrapping: str, instrument: CpuInstrument) -> dict[str, int]:
    with instrument.phase("load"):
        model = _wrapped(spec, prepare_model(spec, build_model(spec)), wrapping)
    with instrument.phase("prepare"):
        optimizer = build_optimizer(spec, model)
    with instrument.phase("batch"):
        batch = training._make_batch(spec, getattr(model, "module", model))
    work, held = training.Workload(spec, model, optimizer, batch, Stepper(spec)), {}
    for step in (1, 2, 3):
        for micro_step in range(1, spec.grad_accum + 1):
            if isinstance(model, FSDPModule):  # as accelerate's no_sync does
                model.set_requires_gradient_sync(micro_step == spec.grad_accum)
            with instrument.phase("forward", step, micro_step):
                loss = training._forward(work, work.batch)
            with instrument.phase("backward", step, micro_step):
                loss.backward()
                del loss
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        held = {"gradients": _held_bytes(gradients)}
        del gradients
        with instrument.phase("optimizer_step", step):
            optimizer.step()
        state = [value for values in optimizer.state.values() for value in values.values()]
        weights = [*model.parameters(), *model.buffers(), *_scales(model)]
        held |= {"weights": _held_bytes(weights), "optimizer_state": _held_bytes(state)}
        del weights
        del state
        with instrument.phase("zero_grad", step):
            optimizer.zero_grad(set_to_none=True)
    return held


def _scales(model: nn.Module) -> list[torch.Tensor]:
    """What bitsandbytes keeps beside packed weights."""
    states = [module.quant_state for module in model.modules() if getattr(module, "quant_state", None) is not None]
    states += [state.state2 for state in states if state.nested]
    offsets = [state.offset for state in states if getattr(state, "offset", None) is not None]
    return [*(one for state in states for one in (state.absmax, state.code)), *offsets]


def _wrapped(spec: CellSpec, model: nn.Module, wrapping: str) -> nn.Module:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if wrapping == "nothing":
        return model
    if wrapping == "DDP":
        replica = DistributedDataParallel(model)
        replica.register_comm_hook(None, _reduced)  # the fake group's all-reduce has no future with a result
        return replica
    if wrapping.startswith("accelerate"):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            reshard_after_forward="no" not in wrapping,
            cpu_ram_efficient_loading=False,
        )
        if spec.autocast != "none":
            plugin.set_mixed_precision(spec.autocast)
        stand_in = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin),
            device=torch.device("cpu"),
            is_main_process=False,
            mixed_precision="no" if spec.autocast == "none" else spec.autocast,
            torch_device_mesh=None,
        )
        return fsdp2_prepare_model(stand_in, model)
    dtype = None if spec.autocast == "none" else TORCH_DTYPES[spec.autocast]
    policy = MixedPrecisionPolicy(dtype, dtype, dtype)
    for module in list(model.modules()):
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def _reduced(state, bucket):
    """A bucket as it came, at once. Without annotations: DDP compares them, and they are text here."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@contextmanager
def _copied_without_scratch() -> Iterator[None]:
    """Gradients copied into a reduce-scatter's input as CUDA's kernel does it: in place, padding left as it is."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    def copy_in(gradients: list[torch.Tensor], buffer: torch.Tensor, num_gpus: int) -> None:
        rows, column = buffer.view(num_gpus, -1), 0
        for gradient in gradients:
            share = -(-gradient.shape[0] // num_gpus)
            width = share * (gradient.numel() // gradient.shape[0])
            for row, piece in zip(rows, gradient.split(share), strict=False):
                row[column : column + piece.numel()].copy_(piece.reshape(-1))
            column += width

    with patch.object(_fsdp_collectives, "foreach_reduce_scatter_copy_in", copy_in):
        yield


@contextmanager
def _stored_as_floats() -> Iterator[None]:
    """4-bit weights in storage of the compute dtype, as they must be for FSDP to divide them."""
    asked = model_module.quantization_config

    def config(spec: CellSpec) -> Any:
        made = asked(spec)
        made.bnb_4bit_quant_storage = TORCH_DTYPES[spec.dtype]
        return made

    with patch.object(model_module, "quantization_config", config):
        yield


def _held_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the storages behind what this rank has of them."""
    storages = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _peaks(observation: Observation) -> dict[str, int]:
    assert not observation.inconsistencies, observation.inconsistencies
    return {
        name: max(one.allocated_peak_bytes for one in observation.phases if one.step == 3 and one.name == name)
        for name in PHASES
    }


def counted(spec: CellSpec, wrapping: str, num_gpus: int) -> dict[str, int]:
    """The same by arithmetic."""
    sharding, in_root = WRAPPINGS[wrapping]
    moments = rank_moments(spec, num_gpus, sharding, all_buffers=in_root)
    at_step = moments[-1].terms
    held = {name: at_step.get(name, 0) for name in ("gradients", "weights", "optimizer_state")}
    return held | {name: max(one.total_bytes for one in moments if one.phase == name) for name in PHASES}


def rows(cases: list[Case]) -> list[dict[str, Any]]:
    """One for each case and number."""
    found = []
    for method, wrapping, num_gpus in cases:
        spec = cell(method)
        seen, said = observe(spec, wrapping, num_gpus), counted(spec, wrapping, num_gpus)
        found += [
            {
                "wrapping": wrapping,
                "method": method,
                "num_gpus": num_gpus,
                "number": name,
                "observed_bytes": seen[name],
                "arithmetic_bytes": said[name],
                "difference_bytes": said[name] - seen[name],
            }
            for name in said
        ]
    return found


def _all_cases() -> Iterator[Case]:
    for wrapping, method in itertools.product(WRAPPINGS, METHODS):
        for num_gpus in (1,) if wrapping == "nothing" else (2, 3, 4, 8):
            yield method, wrapping, num_gpus


def page(found: list[dict[str, Any]]) -> str:
    """A line for each case: what is held, and the differences of the peaks."""
    lines = [
        "# One rank of several: arithmetic beside observed",
        "",
        f"Tiny llama, batch 2 × 32, on the CPU as rank 0 of a fake process group (torch {torch.__version__}).",
        "Bytes as observed, with arithmetic less observed behind them: what is held (weights with buffers, gradients,",
        "optimizer state), then the peak of each phase. Rebuild: `python benchmarks/ranks/sharding.py`.",
        "",
    ]
    head = ["wrapped by", "method", "ranks", "weights", "gradients", "state", "forward", "backward", "optimizer step"]
    cells = []
    for key, group in itertools.groupby(found, lambda row: (row["wrapping"], row["method"], row["num_gpus"])):
        by_name = {row["number"]: row for row in group}
        shown = [
            f"{by_name[name]['observed_bytes']:,} ({by_name[name]['difference_bytes']:+,})"
            for name in ("weights", "gradients", "optimizer_state", *PHASES)
        ]
        cells.append([*key, *shown])
    return "\n".join([*lines, *as_markdown(head, "llrrrrrrr", cells)]) + "\n"


def main() -> None:
    warnings.simplefilter("ignore")
    if "--quick" in sys.argv:
        print(json.dumps(rows(QUICK)))
        return
    found = rows(list(_all_cases()))
    made = {FOLDER / "sharding.csv": as_csv(found), FOLDER / "sharding.md": page(found)}
    write_or_check(made, "ranks/sharding.py", check="--check" in sys.argv)


if __name__ == "__main__":
    main()
