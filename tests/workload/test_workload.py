"""The workload on tiny real models: what it builds is what the libraries build, and the ledger is exact to the byte."""

import json
from typing import Any

import pytest
import torch
from factories import TINY_LLAMA, TINY_LLAMA_PARAMS, TINY_LLAMA_PATH, make_spec

from vramprobe.errors import SpecError
from vramprobe.measure.run_cell import run_cell
from vramprobe.records.record import RunRecord
from vramprobe.workload.model import build_model
from vramprobe.workload.model_config import config_from_dict
from vramprobe.workload.training import NOBODY, Workload, set_up, watch_stack

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

H, F, KV, V, LAYERS = 64, 176, 32, 256, 2
LINEAR = 2 * H * H + 2 * H * KV + 3 * H * F  # parameters of one layer's seven linears
QUANTISED = LAYERS * LINEAR
OTHERS = TINY_LLAMA_PARAMS - QUANTISED  # embedding, head, norms
NUM_TENSORS = 3 + LAYERS * 9  # embedding, head, last norm; seven linears and two norms a layer
ROTARY = 2 * 4 * (H // TINY_LLAMA["num_attention_heads"] // 2)  # inv_freq and its original, fp32
RANK = 8
LORA = LAYERS * RANK * (2 * (H + H) + 2 * (H + KV) + 3 * (H + F))


def measured(**options: Any) -> RunRecord:
    """One real run in this process; it must be believable."""
    record = run_cell(make_spec(timing_steps=0, **options), isolation="spawn")
    assert record.outcome.kind == "ok", record.outcome
    return record


def test_hand_count_is_the_models_own() -> None:
    model = build_model(make_spec())
    assert sum(parameter.numel() for parameter in model.parameters()) == TINY_LLAMA_PARAMS
    assert len(list(model.parameters())) == NUM_TENSORS


@pytest.mark.parametrize(("dtype", "autocast"), [("bf16", "none"), ("fp32", "none"), ("fp32", "bf16")])
def test_full_fine_tuning_bytes_per_parameter(dtype: str, autocast: str) -> None:
    width = {"bf16": 2, "fp32": 4}[dtype]
    ledger = measured(dtype=dtype, autocast=autocast).ledger
    assert ledger.weights_bytes == width * TINY_LLAMA_PARAMS + ROTARY
    assert ledger.gradients_bytes == width * TINY_LLAMA_PARAMS
    assert ledger.optimizer_state_bytes == 2 * width * TINY_LLAMA_PARAMS + 4 * NUM_TENSORS  # a 4-byte step counter each
    assert ledger.batch_bytes == 2 * 8 * 2 * 16
    assert ledger.unaccounted_bytes == 0


STATE_BYTES = {
    "adamw_torch": 2 * 2 * TINY_LLAMA_PARAMS + 4 * NUM_TENSORS,
    "adamw_torch_fused": 2 * 2 * TINY_LLAMA_PARAMS + 4 * NUM_TENSORS,
    "adamw_bnb_32bit": 2 * 4 * TINY_LLAMA_PARAMS,
    "lion_32bit": 4 * TINY_LLAMA_PARAMS,
    "sgd": 0,
    "adagrad": 2 * TINY_LLAMA_PARAMS + 4 * NUM_TENSORS,
    "rmsprop": 2 * TINY_LLAMA_PARAMS + 4 * NUM_TENSORS,
}


def test_an_unknown_model_type_is_said_without_the_list_of_all() -> None:
    with pytest.raises(SpecError, match="nope") as caught:
        config_from_dict({"model_type": "nope"})
    assert len(str(caught.value)) < 200


def test_a_config_may_leave_the_vocabulary_to_its_family() -> None:
    """A published config.json may leave out what is its family's default; llama's is 32,000."""
    bare = {key: value for key, value in TINY_LLAMA.items() if key != "vocab_size"}
    spec = make_spec(batch_size=1, seq_len=2, timing_steps=0).model_copy(update={"architecture": bare})
    assert run_cell(spec, isolation="spawn").outcome.kind == "ok"


@pytest.mark.parametrize("optim", STATE_BYTES)
def test_optimizer_state_is_exact(optim: str) -> None:
    record = measured(optim=optim)
    assert record.ledger.optimizer_state_bytes == STATE_BYTES[optim]
    assert 0 <= record.ledger.unaccounted_bytes < 4096


def test_adafactor_keeps_rows_and_columns() -> None:
    matrices = [(V, H), (V, H)] + LAYERS * [(H, H), (H, H), (KV, H), (KV, H), (F, H), (F, H), (H, F)]
    factored = sum(4 * (rows + columns) for rows, columns in matrices)
    vectors = (2 * LAYERS + 1) * 4 * H  # norms keep a full second moment
    scalars = 4 * NUM_TENSORS  # ``RMS`` of each tensor is a 0-dim tensor of its gradient's fp32 copy
    assert measured(optim="adafactor").ledger.optimizer_state_bytes == factored + vectors + scalars


@pytest.mark.parametrize(("optim", "moments"), [("adamw_bnb_8bit", 2), ("lion_8bit", 1)])
def test_8bit_optimizers_keep_small_tensors_and_embeddings_in_fp32(optim: str, moments: int) -> None:
    """Blocks of 256 with an fp32 scale; tensors under 4,096 elements and trained embeddings (as in Trainer) too."""
    eight_bit = [V * H, *(LAYERS * [H * H, H * H, F * H, F * H, H * F])]  # head, no embedding; k and v are small
    assert H * KV < 4096 <= H * H
    blocks = sum(size + 4 * -(-size // 256) for size in eight_bit)
    in_fp32 = 4 * (TINY_LLAMA_PARAMS - sum(eight_bit))
    code_tables = moments * 256 * 4
    record = measured(optim=optim)
    assert record.ledger.optimizer_state_bytes == moments * (blocks + in_fp32) + code_tables


def test_lora_trains_only_adapters() -> None:
    record = measured(method="lora", lora_r=RANK)
    assert record.facts.num_trainable_params == LORA
    assert record.facts.num_params == TINY_LLAMA_PARAMS
    assert record.ledger.weights_bytes == 2 * TINY_LLAMA_PARAMS + 4 * LORA + ROTARY
    assert record.ledger.gradients_bytes == 4 * LORA
    assert record.ledger.optimizer_state_bytes == 8 * LORA + 4 * LAYERS * 7 * 2
    assert record.facts.residual_dtype == "bfloat16"
    assert record.facts.attention_kernels == ["ScaledDotProductFlashAttentionForCpu"]
    assert measured(method="lora", attn="eager").facts.attention_kernels == []


def nf4_bytes(sizes: list[int], *, double: bool) -> int:
    """Half a byte and an absmax per 64; double quantised: a byte per 64, fp32 per 256 of those, an offset."""
    total = 0
    for size in sizes:
        blocks = -(-size // 64)
        total += size // 2
        total += blocks + 4 * -(-blocks // 256) + 4 if double else 4 * blocks
    return total


LINEAR_SIZES = LAYERS * [H * H, H * H, H * KV, H * KV, H * F, H * F, H * F]


@pytest.mark.parametrize("quant", ["nf4", "fp4", "nf4-single"])
def test_4bit_weights_are_bitsandbytes_own(quant: str) -> None:
    record = measured(method="qlora", quant=quant, lora_r=RANK)
    double = quant == "nf4"
    codes = 64 + (1024 if double else 0)
    tables = record.facts.quantised_weights_bytes - nf4_bytes(LINEAR_SIZES, double=double)
    assert record.facts.num_quantised_params == QUANTISED
    assert tables == codes * len(LINEAR_SIZES)
    assert record.facts.residual_dtype == "float32"  # peft's preparation raises norms and embeddings
    assert record.ledger.weights_bytes == record.facts.quantised_weights_bytes + 4 * OTHERS + 4 * LORA + ROTARY


def test_nf4_bytes_per_parameter() -> None:
    """½ + 1/64 + 4/(64·256) with double quantisation and a number for the tensor's mean, ½ + 4/64 without; what is
    measured above is that of the tiny model's linears."""
    assert nf4_bytes([512 * 512], double=True) == 0.515869140625 * 512 * 512 + 4
    assert nf4_bytes([512 * 512], double=False) == 0.5625 * 512 * 512


def test_int8_weights_are_a_byte_and_a_row_scale() -> None:
    record = measured(method="qlora", quant="int8", lora_r=RANK)
    rows = LAYERS * (2 * H + 2 * KV + 2 * F + H)
    assert record.facts.num_quantised_params == QUANTISED
    assert record.facts.quantised_weights_bytes == QUANTISED + 4 * rows


@pytest.mark.parametrize(
    ("kbit_prep", "lora_dtype", "others", "adapters", "residual"),
    [
        ("none", None, 2 * OTHERS, 4, "bfloat16"),
        ("peft", None, 4 * OTHERS, 4, "float32"),
        ("trl", None, 2 * (OTHERS - H * (2 * LAYERS + 1)) + 4 * H * (2 * LAYERS + 1), 2, "float32"),
        ("trl", "fp32", 2 * (OTHERS - H * (2 * LAYERS + 1)) + 4 * H * (2 * LAYERS + 1), 4, "float32"),
    ],
)
def test_kbit_preparation_decides_the_residual(
    kbit_prep: str, lora_dtype: str | None, others: int, adapters: int, residual: str
) -> None:
    record = measured(method="qlora", kbit_prep=kbit_prep, lora_dtype=lora_dtype, lora_r=RANK)
    assert record.ledger.weights_bytes - record.facts.quantised_weights_bytes == others + adapters * LORA + ROTARY
    assert record.facts.residual_dtype == residual


def test_an_eighth_of_a_padded_sequence_is_masked_and_has_no_loss() -> None:
    batch = set_up(make_spec(padding=True, seq_len=17), NOBODY).batch
    assert batch["attention_mask"].sum(1).tolist() == [14, 14]  # of 17, three are padding
    assert not batch["attention_mask"][:, -3:].any()
    assert (batch["labels"] == -100).sum(1).tolist() == [3, 3]
    assert measured(padding=True).ledger.batch_bytes == 3 * 8 * 2 * 16


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, as its compiler loads
def test_torch_compile_compiles_the_prepared_model_and_leaves_its_names() -> None:
    def built(**options: Any) -> Workload:
        return set_up(make_spec(method="lora", **options), NOBODY)

    plain, compiled = built(), built(torch_compile=True)
    assert plain.model._compiled_call_impl is None
    assert compiled.model._compiled_call_impl is not None
    names = [[name for name, _ in work.model.named_parameters()] for work in (plain, compiled)]
    assert names[0] == names[1]
    layers = compiled.model.base_model.model.model.layers
    with watch_stack(compiled.model):
        assert not any(layer._forward_hooks for layer in layers)  # a hook would break the graph that is measured
    with watch_stack(plain.model):
        assert any(layer._forward_hooks for layer in plain.model.base_model.model.model.layers)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "full"},
        {"method": "full", "padding": True, "attn": "eager"},
        {"method": "full", "grad_accum": 3},
        {"method": "full", "gradient_checkpointing": True, "attn": "eager"},
        {"method": "lora", "lora_dropout": 0.1, "dora": True},
        {"method": "lora", "lora_targets": "q_v", "lora_dtype": "bf16", "autocast": "none"},
        {"method": "qlora", "gradient_checkpointing": True},
    ],
    ids=str,
)
def test_steady_steps_repeat_and_the_peak_covers_what_is_alive(options: dict[str, Any]) -> None:
    record = measured(**options, steps=4)
    by_step: dict[int | None, list[tuple[Any, ...]]] = {}
    for phase in record.phases:
        seen = (phase.name, phase.micro_step, phase.allocated_end_bytes, phase.allocated_peak_bytes)
        by_step.setdefault(phase.step, []).append(seen)
    assert by_step[2] == by_step[3] == by_step[4]
    assert len(by_step[2]) == 2 * options.get("grad_accum", 1) + 2
    ledger, at_peak = record.ledger, record.ledger.at_peak
    assert record.peak.allocated_bytes >= ledger.weights_bytes + ledger.optimizer_state_bytes + ledger.batch_bytes
    assert at_peak.total_bytes == record.peak.allocated_bytes == sum(at_peak.parts().values())
    assert at_peak.weights_bytes == ledger.weights_bytes
    assert min(at_peak.parts().values()) >= 0


def test_checkpointing_saves_less_and_costs_no_weights() -> None:
    plain, checkpointed = (measured(method="lora", seq_len=64, gradient_checkpointing=on) for on in (False, True))
    assert checkpointed.ledger.weights_bytes == plain.ledger.weights_bytes
    assert checkpointed.ledger.saved_activations_bytes < plain.ledger.saved_activations_bytes / 2


def test_random_weights_are_finite_and_tied_where_the_model_ties() -> None:
    tied = TINY_LLAMA | {"tie_word_embeddings": True}
    for quant in ("none", "nf4"):
        method = "qlora" if quant == "nf4" else "full"
        spec = make_spec(method=method, quant=quant).model_copy(update={"architecture": tied})
        model = build_model(spec)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert not any(parameter.is_meta for parameter in model.parameters())
        tokens = torch.arange(8)[None]
        assert torch.isfinite(model(input_ids=tokens, labels=tokens).loss)


def test_pretrained_weights_come_from_a_local_checkpoint(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_from_dict(TINY_LLAMA))
    model.save_pretrained(tmp_path)
    record = measured(model=str(tmp_path), weights="pretrained", method="lora", lora_r=RANK)
    assert record.ledger.weights_bytes == 2 * TINY_LLAMA_PARAMS + 4 * LORA + ROTARY


def test_pretrained_without_a_checkpoint_says_what_to_do() -> None:
    record = run_cell(make_spec(model=str(TINY_LLAMA_PATH), weights="pretrained"), isolation="spawn")
    assert record.outcome.kind == "error"
    assert record.outcome.error_type == "MissingDependency"
    assert "use weights random" in record.outcome.message
    assert record.outcome.traceback is None


def test_encoder_decoder_trains(tmp_path: Any) -> None:
    config = {"model_type": "t5", "d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "vocab_size": 100}
    config |= {"num_layers": 2, "num_decoder_layers": 2, "is_encoder_decoder": True}
    config |= {"decoder_start_token_id": 0, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert measured(model=str(tmp_path), method="lora", lora_targets="q_v").peak.allocated_bytes > 0
