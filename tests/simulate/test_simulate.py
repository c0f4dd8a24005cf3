"""The simulation against real runs on the CPU, and against bytes known by hand."""

from __future__ import annotations

import gc
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import pytest
import torch
from factories import TINY_LLAMA, make_spec
from grids import grid
from torch._subclasses.fake_tensor import FakeTensorMode

from vramprobe.errors import SpecError
from vramprobe.log.pairing import scripts_of
from vramprobe.log.reserved import reserve
from vramprobe.log.trace import lifetimes
from vramprobe.measure.worker import run_cell
from vramprobe.records.record import record_from_json
from vramprobe.simulate import run
from vramprobe.simulate.fake.recorder import Recorder
from vramprobe.simulate.run import NotSimulated, Simulation, simulate
from vramprobe.spec import CellSpec, Method, Optim

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # measured

H = 64
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": TINY_LLAMA,
    "qwen3": TINY_LLAMA | {"model_type": "qwen3", "head_dim": 16},
    "gpt_neox": {"model_type": "gpt_neox", "hidden_size": H, "intermediate_size": 4 * H, "num_attention_heads": 4,
                 "num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 64, "hidden_act": "gelu",
                 "rotary_pct": 0.25, "bos_token_id": 0, "eos_token_id": 0},
    "gpt2": {"model_type": "gpt2", "n_embd": H, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 512,
             "bos_token_id": 0, "eos_token_id": 0},
    "opt": {"model_type": "opt", "hidden_size": H, "ffn_dim": 4 * H, "num_attention_heads": 4, "num_hidden_layers": 2,
            "vocab_size": 512, "max_position_embeddings": 64, "word_embed_proj_dim": H},
    "mixtral": TINY_LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": TINY_LLAMA | {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 32},
    "t5": {"model_type": "t5", "d_model": H, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
           "vocab_size": 512, "is_encoder_decoder": True},
}  # fmt: skip
FP32 = {"dtype": "fp32", "autocast": "none"}
LORA, QLORA = {"method": "lora", "lora_r": 8}, {"method": "qlora", "lora_r": 8}
TRL = {"kbit_prep": "trl", "lora_dtype": "bf16"}
CELLS: list[tuple[str, dict[str, Any]]] = [
    *[(family, FP32) for family in FAMILIES],
    ("llama", {}),
    ("mixtral", {}),
    ("llama", {"dtype": "fp32", "autocast": "bf16", "grad_accum": 2}),
    ("qwen3", FP32 | {"gradient_checkpointing": True, "attn": "eager"}),
    ("gpt_neox", FP32 | LORA | {"gradient_checkpointing": True, "lora_dropout": 0.1}),
    ("llama", LORA | {"dora": True}),
    ("llama", FP32 | {"padding": True}),
    ("gpt2", LORA | {"padding": True, "gradient_checkpointing": True, "attn": "eager"}),
    ("llama", QLORA),
    ("llama", QLORA | TRL | {"gradient_checkpointing": True, "quant": "nf4-single"}),
    ("gpt2", FP32 | QLORA | {"quant": "fp4"}),
    ("opt", FP32 | QLORA | {"quant": "fp4"}),
    ("gpt_neox", FP32 | QLORA | {"quant": "int8"}),
    ("llama", QLORA | {"quant": "int8"}),
    ("opt", QLORA | {"quant": "nf4-single", "dtype": "fp32", "autocast": "bf16"}),
    *[
        ("llama", FP32 | {"optim": optim, "batch_size": 1, "seq_len": 2})
        for optim in get_args(Optim)
        if optim != "adamw_torch_fused" and not optim.startswith("paged_")
    ],
]

#: Every family once, every second of the other kinds of step.
ALWAYS = [*CELLS[: len(FAMILIES)], *CELLS[len(FAMILIES) :: 5]]


def cell(family: str, *, config: dict[str, Any] | None = None, **options: Any) -> CellSpec:
    words = {"batch_size": 3, "seq_len": 48, "timing_steps": 0} | options
    return CellSpec(**(make_spec(**words).model_dump() | {"architecture": FAMILIES[family] | (config or {})}))


@pytest.mark.parametrize(
    ("family", "options"), grid(CELLS, *ALWAYS), ids=lambda value: value if isinstance(value, str) else None
)
def test_every_phase_is_the_measured_one(family: str, options: dict[str, Any]) -> None:
    """Within 2,048 bytes: numbers wrapped as tensors (8 bytes each) and bitsandbytes' tables are left out.

    A 16-bit product packs its operands into scratch of up to 2 MiB (oneDNN), which shows on models as tiny as these.
    """
    spec = cell(family, **options)
    is_fp32 = spec.dtype == "fp32" and spec.autocast == "none"
    gc.collect()
    measured, simulated = run_cell(spec, isolation="spawn"), simulate(spec).record
    assert (measured.outcome.kind, simulated.outcome.kind) == ("ok", "ok"), (measured.outcome, simulated.outcome)
    assert simulated.instrument == "simulated"
    assert [(one.name, one.step, one.micro_step) for one in measured.phases] == [
        (one.name, one.step, one.micro_step) for one in simulated.phases
    ]
    for real, fake in zip(measured.phases, simulated.phases, strict=True):
        for moment in ("peak", "end"):
            want, got = (getattr(one, f"allocated_{moment}_bytes") for one in (real, fake))
            scratch = 160_000 if moment == "peak" and not is_fp32 else 0
            assert -2048 <= want - got <= 2048 + scratch, (real.name, real.step, moment)
    for cause in ("gradients", "optimizer_state", "batch"):
        assert getattr(simulated.ledger, f"{cause}_bytes") == getattr(measured.ledger, f"{cause}_bytes"), cause
    assert abs(simulated.ledger.weights_bytes - measured.ledger.weights_bytes) <= 512
    assert measured.peak.phase == simulated.peak.phase
    assert simulated.facts == measured.facts


def test_a_simulated_record_reads_back() -> None:
    record = simulate(cell("llama")).record
    assert record_from_json(record.to_json_line()) == record
    assert sum(record.ledger.at_peak.parts().values()) == record.peak.allocated_bytes


def test_every_method_and_optimizer_is_covered() -> None:
    assert {options.get("method", "full") for _, options in CELLS} == set(get_args(Method))
    covered = {options.get("optim", "adamw_torch_fused") for _, options in CELLS}
    assert set(get_args(Optim)) - covered == {"paged_adamw_32bit", "paged_adamw_8bit"}  # for GPUs alone


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"device": "cuda", "limit_vram": "24GiB"}, "--gpu"),
        ({"weights": "pretrained"}, "random"),
        ({"device": "cuda", "alloc_conf": "per_process_memory_fraction:0.5"}, "leave it out"),
        ({"torch_compile": True}, "what a compiler fuses"),
        ({"device": "cuda", "attn": "flash_attention_2", "padding": True}, "use attn sdpa"),
    ],
)
def test_what_is_not_covered_says_what_is(options: dict[str, Any], word: str) -> None:
    with pytest.raises(NotSimulated, match=word):
        simulate(make_spec(**options))


def test_no_layer_is_dropped_where_a_model_draws_lots() -> None:
    """A fake tensor has no value, and whoever asks for one is told yes: OPT's layers would all be left out."""
    with run.session(make_spec(), None):
        assert not torch.rand([]) < 0.0
        assert torch.rand(2, 3).shape == (2, 3)


def test_what_the_allocator_refuses_is_said_before_anything_runs() -> None:
    with patch.object(run, "_run", side_effect=AssertionError("ran")), pytest.raises(SpecError, match="nonsense"):
        simulate(make_spec(device="cuda", alloc_conf="nonsense"))


DEEP: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", QLORA | {"gradient_checkpointing": True}),
    ("gpt2", FP32 | {"optim": "adamw_torch"}),
    ("opt", FP32 | LORA | {"attn": "eager", "grad_accum": 2}),
    ("llama", FP32 | {"optim": "adafactor", "batch_size": 1, "seq_len": 2}),  # its state is made anew in each step
    # The peak moves from the logits to the gradients.
    ("gpt_neox", {"dtype": "fp32", "autocast": "bf16", "seq_len": 4}),
    # What ends a layer's backward is like what began it in size alone: the repeated block must be turned.
    ("llama", LORA | {"config": {"num_key_value_heads": 4}}),
]


@pytest.mark.parametrize(
    ("family", "options"), grid(DEEP, DEEP[2], *DEEP[4:]), ids=lambda value: value if isinstance(value, str) else None
)
def test_a_deep_model_is_put_together_from_shallow_ones(family: str, options: dict[str, Any]) -> None:
    depth = {"num_hidden_layers": 9, "n_layer": 9}
    spec = cell(family, **(options | {"config": depth | options.get("config", {})}))
    assembled, whole = simulate(spec), simulate(spec, depth="full")
    assert assembled.log is not None, "a phase did not repeat"
    assert whole.log is not None
    for mark, made, seen in zip(whole.log.marks, *scripts_of([assembled.log, whole.log]), strict=True):
        assert made.codes.tolist() == seen.codes.tolist(), (mark.name, mark.step)
        assert made.ranks.tolist() == seen.ranks.tolist(), (mark.name, mark.step)
    keeps_its_books(assembled)
    phases = whole.record.phases
    assert reserve(phases, assembled.log) == reserve(phases, whole.log)
    assert assembled.record.phases == whole.record.phases
    assert assembled.record.ledger == whole.record.ledger
    assert assembled.record.facts == whole.record.facts


def keeps_its_books(simulation: Simulation) -> None:
    """Each free takes back a living block, once and whole; the bytes alive are the record's."""
    history = simulation.log
    assert history is not None
    alive: dict[int, tuple[int, int]] = {}
    for size, block, cause in zip(
        *(one.tolist() for one in (history.size_bytes, history.blocks, history.causes)), strict=True
    ):
        if size > 0:
            assert block not in alive
            alive[block] = (size, cause)
        else:
            assert alive.pop(block) == (-size, cause)
    totals = [0, *np.cumsum(history.size_bytes).tolist()]
    for mark, phase in zip(history.marks, simulation.record.phases, strict=False):
        assert totals[mark.events.stop] == phase.allocated_end_bytes
        assert max(totals[mark.events.start : mark.events.stop + 1]) == phase.allocated_peak_bytes
    assert [mark.events.start for mark in history.marks] == [0, *(mark.events.stop for mark in history.marks[:-1])]
    assert len(set(history.blocks[history.size_bytes > 0].tolist())) == (history.size_bytes > 0).sum()


def test_layers_that_do_not_repeat_are_all_run() -> None:
    kinds = ["full_attention"] * 6 + ["sliding_attention"] * 2
    config = {"num_hidden_layers": 8, "layer_types": kinds, "sliding_window": 16}
    spec = cell("gemma3_text", seq_len=64, config=config)
    with patch.object(run, "deepen", side_effect=AssertionError("taken for a model of layers that repeat")):
        assert simulate(spec).log is not None


# -- the recorder ------------------------------------------------------------------------------------------------------


def recorded(program: Any) -> tuple[list[int], int]:
    """(sizes of all allocations, bytes at the end) of a program on fake tensors; what it returns stays alive."""
    with FakeTensorMode(), Recorder(lambda *_: [], {}) as recorder:
        kept = program()
        end_bytes = sum(event.size_bytes for event in recorder.events)
    del kept
    return [event.size_bytes for event in recorder.events if event.size_bytes > 0], end_bytes


def test_views_and_in_place_operations_count_once() -> None:
    def program() -> Any:
        tensor = torch.empty(10, 10)
        view = tensor.view(-1)[10:50].reshape(8, 5).t()
        view.add_(1).mul_(2)
        return tensor.T, view, tensor.detach()

    assert recorded(program) == ([400], 400)


def test_a_view_keeps_its_storage_alive_and_the_last_one_frees_it() -> None:
    def program() -> Any:
        whole = torch.empty(1000)
        part = whole[:1]
        del whole
        other = torch.empty(10)
        del part
        return other

    assert recorded(program) == ([4000, 40], 40)


def test_frees_come_in_order_and_match_their_allocations() -> None:
    with FakeTensorMode(), Recorder(lambda *_: [], {}) as recorder:
        first, second = torch.empty(1), torch.empty(2)
        del first
        third = torch.empty(3)
        del second, third
    assert [event.size_bytes for event in recorder.events] == [4, 8, -4, 12, -8, -12]
    assert [(block.start, block.end) for block in lifetimes(recorder.events)] == [(0, 2), (1, 4), (3, 5)]


@pytest.mark.parametrize(("shared", "num_sums"), [(False, 0), (True, 1)])
def test_gradients_that_meet_are_added_in_place_where_the_engine_may(shared: bool, num_sums: int) -> None:
    """x.exp() + x.sin(): the first is the buffer's alone. x + x.exp(): it is the gradient above, still shared."""

    def program() -> Any:
        x = torch.empty(100, requires_grad=True) * 1.0
        y = x + x.exp() if shared else x.exp() + x.sin()
        grads = torch.empty(100)
        marks.append(len(recorder.events))
        y.backward(grads)
        return x

    marks: list[int] = []
    with FakeTensorMode(), Recorder(lambda *_: [], {}) as recorder:
        program()
    made = [event.size_bytes for event in recorder.events[marks[0] :] if event.size_bytes > 0]
    products = 1 if shared else 2 + 1  # exp's; exp's, sin's and cos(x)
    leaf = 1  # the gradient of x * 1.0
    assert len(made) == products + num_sums + leaf
