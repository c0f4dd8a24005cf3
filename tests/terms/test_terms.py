"""The arithmetic: closed forms, hand counts on tiny shapes, and the real libraries as the last word."""

from __future__ import annotations

import math
import random
from contextlib import suppress
from typing import Any

import pytest
from arithmetic import LORA, QLORA, against_a_real_run, cell, closed, measured, setup_for
from factories import TINY_LLAMA, TINY_LLAMA_PARAMS, make_spec
from grids import grid

from vramprobe import catalog
from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.bounds.tensors import quantised_bytes, tensors
from vramprobe.errors import SpecError
from vramprobe.spec import CellSpec, resolve
from vramprobe.terms import ledger_terms, moments
from vramprobe.terms.models import operators as op
from vramprobe.terms.step.walk import walk_layers, walk_of
from vramprobe.terms.tape.account import Account
from vramprobe.terms.tape.graph import Value
from vramprobe.terms.tape.sizes import monomials, open_sizes
from vramprobe.terms.tape.tape import Tape

H, F, HEADS, HEAD, KV_HEADS, RANK = 64, 176, 4, 16, 2, LORA["lora_r"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": TINY_LLAMA | {"num_hidden_layers": 5},
    "qwen2": TINY_LLAMA | {"model_type": "qwen2", "num_hidden_layers": 3, "tie_word_embeddings": True},
    "qwen3": TINY_LLAMA | {"model_type": "qwen3", "num_hidden_layers": 3, "head_dim": 16},
    "gpt_neox": {"model_type": "gpt_neox", "hidden_size": H, "intermediate_size": 4 * H, "num_attention_heads": HEADS,
                 "num_hidden_layers": 5, "vocab_size": 512, "max_position_embeddings": 64, "hidden_act": "gelu",
                 "rotary_pct": 0.25, "bos_token_id": 0, "eos_token_id": 0},
    "gpt2": {"model_type": "gpt2", "n_embd": H, "n_head": HEADS, "n_layer": 5, "n_positions": 64, "vocab_size": 512,
             "bos_token_id": 0, "eos_token_id": 0},
    "opt": {"model_type": "opt", "hidden_size": H, "ffn_dim": 4 * H, "num_attention_heads": HEADS,
            "num_hidden_layers": 5, "vocab_size": 512, "max_position_embeddings": 64, "word_embed_proj_dim": H},
}  # fmt: skip


CPU_OPTIMIZERS = (
    "adamw_torch",
    "adamw_torch_fused",
    "adafactor",
    "sgd",
    "adagrad",
    "rmsprop",
    "adamw_bnb_8bit",
    "adamw_bnb_32bit",
    "lion_8bit",
    "lion_32bit",
    "ademamix",
)


# -- closed forms, worked out by hand ---------------------------------------------------------------------------------

Q, KV = HEADS * HEAD, KV_HEADS * HEAD
A = 2 * (2 * Q + 2 * KV) + 4 * HEADS
INPUTS = 5 * H + Q + F
P_LAYER = 2 * H * Q + 2 * H * KV + 3 * H * F + 2 * H
P_LINEAR = P_LAYER - 2 * H
P_LORA = RANK * (2 * (H + Q) + 2 * (H + KV) + 3 * (H + F))

#: case → (options, bytes per token and layer, bytes per layer) as the table writes them; a LoRA layer also keeps the
#: 8-byte number that each of its seven modules is scaled by.
TABLE: dict[str, tuple[dict[str, Any], int, int]] = {
    "full, all bf16": ({}, 16 * H + 8 * F + A + 8, 0),
    "full, fp32 + autocast": (
        {"dtype": "fp32", "autocast": "bf16"},
        2 * (8 * H + 4) + 10 * H + 8 * F + A,
        2 * P_LINEAR,
    ),
    "LoRA, bf16 adapters": (
        LORA | {"lora_dtype": "bf16", "autocast": "none"},
        2 * (4 * H + 4) + 6 * F + A + (2 * H + 2 * H + 2 * F) + 2 * RANK * 7,
        56,
    ),
    "LoRA, fp32 adapters + autocast": (LORA, 2 * (4 * H + 4) + 6 * F + A + 2 * INPUTS + 2 * RANK * 7, 2 * P_LORA + 56),
    "LoRA, fp32 adapters, no autocast": (
        LORA | {"autocast": "none"},
        2 * (4 * H + 4) + 6 * F + A + 4 * INPUTS + 4 * RANK * 7,
        56,
    ),
    "QLoRA + autocast": (QLORA, 2 * (4 * H + 4) + 12 * F + A + 2 * INPUTS + 2 * RANK * 7, 2 * P_LORA + 56),
    "QLoRA, no autocast": (
        QLORA | {"autocast": "none"},
        2 * (4 * H + 4) + 12 * F + 4 * (2 * Q + 2 * KV) + 4 * HEADS + 4 * (2 * H + F) + 4 * RANK * 7,
        56,
    ),
}


@pytest.mark.parametrize("case", TABLE)
@pytest.mark.parametrize(("batch_size", "seq_len"), [(2, 16), (3, 40)])
def test_saved_activations_of_a_layer_equal_the_closed_form(case: str, batch_size: int, seq_len: int) -> None:
    options, per_token, per_layer = TABLE[case]
    saved = [
        ledger_terms(
            cell(TINY_LLAMA | {"num_hidden_layers": depth}, batch_size=batch_size, seq_len=seq_len, **options)
        )["saved_activations"]
        for depth in (6, 7)
    ]
    assert saved[1] - saved[0] == batch_size * seq_len * per_token + per_layer


@pytest.mark.parametrize(("options", "width"), [({}, 2), ({"method": "qlora"}, 4), ({"dtype": "fp32"}, 4)])
def test_checkpoint_store_is_one_hidden_state_per_layer(options: dict[str, Any], width: int) -> None:
    spec = cell(FAMILIES["llama"], gradient_checkpointing=True, batch_size=2, seq_len=48, **options)
    store = next(moment for moment in moments(spec) if moment.label == "loss").terms["checkpoint_store"]
    numbers = 0 if spec.method == "full" else 8 * 7
    assert store == 5 * (2 * 48 * H * width + 5056 + numbers)  # and the CPU's random state


def test_logits_hump_of_bf16_is_14_bytes_less_the_dropped_outputs() -> None:
    spec = cell(TINY_LLAMA | {"vocab_size": 65536}, batch_size=2, seq_len=16)
    loss = max((m for m in moments(spec) if m.label == "loss" and m.phase == "backward"), key=lambda m: m.total_bytes)
    assert loss.terms["logits"] / (spec.num_tokens * 65536) == pytest.approx(12, rel=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True},
        LORA,
        LORA | {"gradient_checkpointing": True, "grad_accum": 2},
        QLORA,
        QLORA | {"quant": "int8"},
        {"dtype": "fp32", "autocast": "bf16", "grad_accum": 3, "batch_size": 1},
        {"seq_len": 1, "attn": "eager"},
    ],
    ids=str,
)
def test_three_layers_stand_for_a_deep_model(family: str, options: dict[str, Any]) -> None:
    """Three layers, walked with open sizes, against all nine walked with the cell's own."""
    spec = cell(FAMILIES[family] | {"num_hidden_layers": 9, "n_layer": 9}, **options)
    sizes = spec.batch_size, spec.seq_len
    short, whole = walk_of(setup_for(spec)), walk_layers(closed(spec), range(9))
    assert short.saved_bytes(*sizes) == whole.saved_bytes(*sizes)
    assert short.highest(*sizes) == whole.highest(*sizes)


@pytest.mark.parametrize("batch_size", [1, 2, 7])
@pytest.mark.parametrize("seq_len", [1, 2, 5, 64])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "options", [{}, {"method": "qlora"}, {"dtype": "fp32", "autocast": "bf16", "grad_accum": 2}], ids=str
)
def test_open_sizes_are_right_at_every_size(batch_size: int, seq_len: int, attn: str, options: dict[str, Any]) -> None:
    """One of the models is so narrow that which operand is the larger one depends on the number of tokens."""
    narrow = TINY_LLAMA | {
        "hidden_size": 4,
        "intermediate_size": 16,
        "num_attention_heads": 1,
        "head_dim": 4,
        "num_key_value_heads": 1,
        "vocab_size": 4,
        "tie_word_embeddings": True,
    }
    sizes = {"batch_size": batch_size, "seq_len": seq_len}
    for config in (narrow, FAMILIES["llama"], FAMILIES["gpt2"], FAMILIES["gpt_neox"]):
        spec = cell(config, attn=attn, **options, **sizes)
        open_walk, closed_walk = walk_of(setup_for(spec)), walk_of(closed(spec))
        assert open_walk.saved_bytes(**sizes) == closed_walk.saved_bytes(**sizes)
        assert open_walk.highest(**sizes) == closed_walk.highest(**sizes)


def test_from_the_second_micro_step_on_gradients_are_alive_throughout() -> None:
    once, twice = (moments(cell(FAMILIES["llama"], grad_accum=number)) for number in (1, 2))
    gradients = twice[-1].terms["gradients"]
    assert "gradients" not in once[0].terms
    assert all(moment.terms["gradients"] >= gradients for moment in twice)


def test_cells_of_one_setup_share_a_walk() -> None:
    """Batch and length above 1, optimizer, seed, rank's alpha, more micro-steps: a walk sees none of them."""
    options = LORA | {"lora_r": 3}  # which no other test has
    first = cell(FAMILIES["llama"], grad_accum=2, **options)
    moments(first)
    walks = walk_of.cache_info().misses
    for change in (
        {"batch_size": 7},
        {"seq_len": 11},
        {"optim": "adafactor"},
        {"seed": 5},
        {"grad_accum": 8},
        {"lora_alpha": 1.0},
    ):
        moments(cell(FAMILIES["llama"], **({"grad_accum": 2} | options | change)))
    assert walk_of.cache_info().misses == walks
    moments(cell(FAMILIES["llama"], **({"grad_accum": 2, "batch_size": 1} | options)))
    assert walk_of.cache_info().misses == walks + 1


@pytest.mark.parametrize(("batch_size", "seq_len"), [(2, 3), (1, 9), (4, 1), (1, 1), (10**9, 10**300)])
def test_a_count_in_open_sizes_comes_to_what_it_would_in_the_cell(batch_size: int, seq_len: int) -> None:
    def count(b: int, s: int) -> int:
        return 5 + 7 * b + 11 * s + 13 * b * s + 17 * s * s + 19 * b * s * s - (24 * b * s // 8 * 3 - b * s) // 4

    sizes = open_sizes(batch_size, seq_len, digit_bits=8)
    counted = count(sizes.batch_size, sizes.seq_len)
    assert sizes.resolved(counted, monomials(batch_size, seq_len)) == count(batch_size, seq_len)


@pytest.mark.parametrize(
    ("count", "other", "covers"),
    [
        ((3, 3), (3, 3), True),
        ((4, 3), (3, 3), True),
        ((4, 2), (3, 3), False),
        ((0, 100), (1, 0), False),
        ((127, 0), (127, 0), True),
        ((0, 0), (0, 127), False),
    ],
)
def test_a_size_covers_another_if_no_coefficient_is_below(
    count: tuple[int, int], other: tuple[int, int], covers: bool
) -> None:
    sizes = open_sizes(batch_size=2, seq_len=2, digit_bits=8)
    large, small = (one + two * sizes.batch_size for one, two in (count, other))
    assert sizes.covers(large, small) is covers


# -- weights, gradients, state -----------------------------------------------------------------------------------------


def test_full_bf16_by_hand() -> None:
    terms = ledger_terms(make_spec())
    num_tensors = 3 + 2 * 9
    assert terms["weights"] == 2 * TINY_LLAMA_PARAMS + 2 * 4 * (16 // 2)  # and the two inv_freq buffers
    assert terms["gradients"] == 2 * TINY_LLAMA_PARAMS
    assert terms["optimizer_state"] == 4 * TINY_LLAMA_PARAMS + 4 * num_tensors
    assert terms["batch"] == 2 * 8 * 2 * 16


@pytest.mark.parametrize(
    ("quant", "bytes_per_param"), [("nf4", 0.51588), ("nf4-single", 0.5625), ("fp4", 0.5625), ("int8", 1)]
)
def test_bytes_per_quantised_parameter(quant: str, bytes_per_param: float) -> None:
    spec = resolve(model="llama-2-7b", method="qlora", quant=quant, device="cuda", batch_size=1, seq_len=8)
    quantised = [t for t in tensors(spec, architecture(spec.architecture)) if t.quantised]
    size = sum(quantised_bytes(t, quant) * t.num_copies for t in quantised)
    assert size / sum(t.numel * t.num_copies for t in quantised) == pytest.approx(bytes_per_param, rel=2e-3)


def test_quantised_bytes_of_one_tensor_by_hand() -> None:
    weight = next(
        t for t in tensors(make_spec(method="qlora"), architecture(TINY_LLAMA)) if t.name.endswith("up_proj.weight")
    )
    blocks = F * H // 64
    assert quantised_bytes(weight, "nf4-single") == F * H // 2 + 4 * blocks + 64
    assert quantised_bytes(weight, "nf4") == F * H // 2 + blocks + 64 + 4 * math.ceil(blocks / 256) + 1024 + 4
    assert quantised_bytes(weight, "int8") == F * H + 4 * F


def test_kbit_preparation_decides_the_embedding_and_the_norms() -> None:
    def dtypes(prep: str) -> dict[str, str]:
        spec = make_spec(method="qlora", kbit_prep=prep, lora_dtype="bf16")
        return {t.name: t.dtype for t in tensors(spec, architecture(TINY_LLAMA))}

    assert {dtypes("peft")[name] for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")} == {
        "fp32"
    }
    assert dtypes("trl")["model.norm.weight"] == "fp32"
    assert dtypes("trl")["model.embed_tokens.weight"] == "bf16"
    assert set(dtypes("none").values()) == {"bf16"}


def test_foreach_adamw_on_cuda_peaks_at_five_times_the_weights() -> None:
    spec = resolve(model="llama-3.2-1b", method="full", optim="adamw_torch", device="cuda", batch_size=1, seq_len=8)
    step = moments(spec)[-1]
    assert step.phase == "optimizer_step"
    assert step.total_bytes / step.terms["weights"] == pytest.approx(5.0, rel=1e-3)


def test_paged_state_counts_in_the_ledger_but_not_in_what_torch_allocates() -> None:
    spec = resolve(
        model="llama-3.2-1b", method="full", optim="paged_adamw_32bit", device="cuda", batch_size=1, seq_len=8
    )
    allocated = moments(spec)[-1].terms.get("optimizer_state", 0)
    assert allocated < 0.01 * ledger_terms(spec)["optimizer_state"]


def test_lora_target_that_is_no_linear_layer_is_an_error() -> None:
    with pytest.raises(SpecError, match=r"no_proj: no such linear layer; this model has down_proj, gate_proj"):
        ledger_terms(make_spec(method="lora", lora_targets="no_proj"))


@pytest.mark.parametrize(("option", "word"), [("padding", "padding masks"), ("torch_compile", "compiled models")])
def test_what_bends_the_step_says_that_it_is_not_covered(option: str, word: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=f"no arithmetic for {word}"):
        moments(make_spec(**{option: True}))


def test_every_supported_catalog_model_has_moments() -> None:
    for slug in ("llama-3.1-8b", "mistral-7b-v0.3", "qwen2.5-7b", "qwen3-8b", "pythia-6.9b", "gpt2-xl", "opt-350m"):
        for method in ("full", "lora", "qlora"):
            for device in ("cpu", "cuda"):
                spec = resolve(model=slug, method=method, device=device, batch_size=1, seq_len=256)
                assert min(min(moment.terms.values()) for moment in moments(spec)) > 0
    assert catalog.find_model("opt-350m").config["do_layer_norm_before"] is False  # the odd one is among them


# -- the tape ----------------------------------------------------------------------------------------------------------


def hidden(tape: Tape, numel: int) -> Value:
    """A value in the graph: what some trained parameter made."""
    return op.elementwise(tape.constant(numel, "fp32", trained=True))


@pytest.mark.parametrize(("trained", "saved_bytes"), [(False, 0), (True, 20 * 4)])
def test_a_linear_saves_its_input_only_if_its_weight_is_trained(trained: bool, saved_bytes: int) -> None:
    tape = Tape()
    out = op.linear(hidden(tape, 20), tape.constant(4 * 6, "fp32", trained=trained), None, 6)
    assert out.numel == 30
    account = Account(tape)
    account.read()
    assert account.total_bytes - out.num_bytes == saved_bytes


def test_backward_frees_what_was_saved_and_leaves_the_gradients() -> None:
    tape = Tape()
    weight = tape.constant(24, "bf16", trained=True)
    root = op.elementwise(op.linear(tape.new(20, "bf16"), weight, None, 6), saves="input").node
    tape.backward(root, tape.new(30, "bf16"))
    account = Account(tape)
    account.read()
    assert {cause: num_bytes for cause, num_bytes in account.live_bytes.items() if num_bytes} == {"gradients": 48}


@pytest.mark.parametrize(("frozen_linear", "num_copies"), [(False, 3), (True, 4)])
def test_gradients_that_meet_are_added_in_place_unless_they_are_views(frozen_linear: bool, num_copies: int) -> None:
    """Three branches of ten: the gradient above, the sum so far, the next branch's, and for views a new sum."""
    tape = Tape()
    shared = hidden(tape, 10)

    def branch() -> Value:
        return op.linear(shared, tape.constant(100, "fp32"), None, 10) if frozen_linear else op.elementwise(shared)

    root = op.add(op.add(branch(), branch()), branch()).node
    tape.backward(root, tape.new(10, "fp32"))
    [(highest, _)] = Account(tape).read()["backward", "start"]
    assert highest == shared.num_bytes + num_copies * 40


def test_checkpointed_adapters_leave_nothing_behind_between_micro_steps() -> None:
    once, twice = (
        max(m.total_bytes for m in moments(cell(FAMILIES["llama"], gradient_checkpointing=True, grad_accum=n, **LORA)))
        for n in (1, 3)
    )
    gradients = ledger_terms(cell(FAMILIES["llama"], **LORA))["gradients"]
    assert 0 <= twice - once <= gradients + 16


# -- against the real libraries ----------------------------------------------------------------------------------------


MORE_FAMILIES = FAMILIES | {"one_kv_head": FAMILIES["qwen2"] | {"num_key_value_heads": 1}}
MEASURED: list[tuple[str, dict[str, Any]]] = [
    *[(family, {}) for family in FAMILIES],
    *[(family, {"method": "lora", "gradient_checkpointing": True}) for family in ("llama", "gpt_neox", "opt")],
    *[(family, {"method": "qlora"}) for family in ("llama", "qwen3", "gpt2", "opt")],
    ("llama", {"dtype": "fp32", "autocast": "bf16", "optim": "adamw_bnb_8bit"}),
    ("llama", {"method": "qlora", "kbit_prep": "trl", "lora_dtype": "bf16", "quant": "nf4-single"}),
    ("llama", {"method": "lora", "lora_dropout": 0.1, "autocast": "none", "grad_accum": 2}),
    ("gpt_neox", {"method": "qlora", "quant": "int8", "lora_targets": "q_v"}),
    ("gpt_neox", {"method": "qlora", "quant": "int8", "gradient_checkpointing": True, "grad_accum": 2}),
    (
        "llama",
        {"method": "qlora", "quant": "int8", "gradient_checkpointing": True, "dtype": "fp32", "autocast": "none"},
    ),
    ("llama", {"method": "qlora", "quant": "fp4", "dtype": "fp32", "autocast": "bf16"}),
    ("one_kv_head", {"attn": "eager", "dtype": "fp32"}),
    ("llama", {"method": "qlora", "attn": "eager", "batch_size": 1, "gradient_checkpointing": True}),
    ("gpt_neox", {"attn": "eager", "dtype": "fp32", "batch_size": 1}),
    ("gpt2", {"method": "lora", "dtype": "fp32", "autocast": "none", "gradient_checkpointing": True, "batch_size": 1}),
    ("gpt2", {"attn": "eager", "dtype": "fp32", "optim": "adafactor"}),
    ("llama", {"attn": "eager", "gradient_checkpointing": True, "optim": "adamw_torch", "dtype": "fp32"}),
    ("llama", {"method": "lora", "dora": True}),
    ("llama", {"method": "qlora", "dora": True, "gradient_checkpointing": True}),
    ("gpt_neox", {"method": "lora", "dora": True, "dtype": "fp32", "autocast": "none", "lora_dropout": 0.1}),
    ("gpt_neox", {"method": "qlora", "dora": True, "lora_dropout": 0.1}),
]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("family", "options"),
    grid(MEASURED, *MEASURED[:9:2], MEASURED[-8]),
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_measured_ledger_to_the_byte_and_peak_within_percents(family: str, options: dict[str, Any]) -> None:
    spec = cell(MORE_FAMILIES[family], **({"batch_size": 3, "seq_len": 48, "timing_steps": 0} | options))
    against_a_real_run(spec)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_single_key_head_is_repeated_by_a_view_where_there_is_one_row(batch_size: int) -> None:
    spec = cell(MORE_FAMILIES["one_kv_head"], batch_size=batch_size, seq_len=48, timing_steps=0, attn="eager")
    assert measured(spec).ledger.saved_activations_bytes == ledger_terms(spec)["saved_activations"]


@pytest.mark.parametrize("family", grid(["llama", "gpt_neox"], "gpt_neox"))
@pytest.mark.parametrize("dtype", grid(["fp32", "bf16"], "bf16"))
@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "adamw_bnb_32bit", "lion_8bit", "lion_32bit", "ademamix"])
def test_measured_peak_of_a_bitsandbytes_step(family: str, dtype: str, optim: str) -> None:
    """So few tokens that the step is the peak, and its largest tensor is one with an 8-bit state."""
    config = FAMILIES[family] | {"vocab_size": 64, "num_hidden_layers": 2}
    spec = cell(config, batch_size=1, seq_len=2, timing_steps=0, dtype=dtype, optim=optim)
    record = measured(spec)
    highest = max(moments(spec), key=lambda moment: moment.total_bytes)
    assert (record.peak.phase, highest.phase) == ("optimizer_step", "optimizer_step")
    assert highest.total_bytes <= record.peak.allocated_bytes <= highest.total_bytes + 64


#: Wide enough that scratch and caches of kilobytes are small beside the terms.
WIDE: dict[str, dict[str, Any]] = {
    name: config
    | {"num_hidden_layers": 2, "vocab_size": 2048, "max_position_embeddings": 256}
    | ({"n_embd": 256, "n_layer": 2, "n_positions": 256} if name == "gpt2" else {"hidden_size": 256})
    | {"gpt_neox": {"intermediate_size": 1024}, "opt": {"ffn_dim": 1024, "word_embed_proj_dim": 256}, "gpt2": {}}.get(
        name, {"intermediate_size": 704, "head_dim": 64}
    )
    for name, config in FAMILIES.items()
}


def random_cells(seed: int, num_cells: int) -> list[CellSpec]:
    """Possible cells drawn over everything that the arithmetic claims to cover; the same for the same seed."""
    draw, found = random.Random(seed), []
    families = list(WIDE)
    while len(found) < num_cells:
        method = draw.choice(["full", "lora", "qlora"])
        options: dict[str, Any] = {
            "method": method,
            "dtype": draw.choice(["bf16", "fp32", "fp16"]),
            "autocast": draw.choice(["bf16", "none", "fp16"]),
            "optim": draw.choice(CPU_OPTIMIZERS),
            "batch_size": draw.choice([1, 2, 3]),
            "seq_len": draw.choice([33, 64, 128]),
            "grad_accum": draw.choice([1, 1, 2, 3]),
            "gradient_checkpointing": draw.random() < 0.5,
            "attn": draw.choice(["sdpa", "eager"]),
        }
        if method != "full":
            options |= {
                "lora_r": draw.choice([4, 16]),
                "lora_dropout": draw.choice([0.0, 0.1]),
                "lora_targets": draw.choice(["all-linear", "q_v"]),
                "lora_dtype": draw.choice(["fp32", "bf16", "fp16"]),
            }
        if method == "qlora":
            options |= {
                "quant": draw.choice(["nf4", "nf4-single", "fp4", "int8"]),
                "kbit_prep": draw.choice(["none", "peft", "trl"]),
            }
        with suppress(SpecError):  # not every combination is possible
            found.append(cell(WIDE[families[len(found) % len(families)]], timing_steps=0, **options))
    return found


RANDOM = random_cells(seed=20, num_cells=12)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "spec", grid(RANDOM, *RANDOM[:2]), ids=lambda spec: f"{spec.architecture['model_type']}-{spec.cell_id}"
)
def test_measured_peak_of_random_cells(spec: CellSpec) -> None:
    """Nothing was tuned to these cells. oneDNN's scratch is the largest thing that the arithmetic leaves out."""
    predicted = max(moments(spec), key=lambda moment: moment.total_bytes)
    record = measured(spec)
    assert predicted.total_bytes == pytest.approx(record.peak.allocated_bytes, rel=0.01)
    assert predicted.phase == record.peak.phase
