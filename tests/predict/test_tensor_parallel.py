"""One rank of layers that are divided, by arithmetic: its bytes as emulated, what is a part and what is whole."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from vramprobe.api import plan
from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.catalog import find_gpu, find_model
from vramprobe.errors import SpecError
from vramprobe.model.memory_model import workspaces_bytes
from vramprobe.predict.predict import predict
from vramprobe.predict.questions import predict as ask
from vramprobe.predict.what_fits import largest_model, min_gpus
from vramprobe.spec import CellSpec, resolve
from vramprobe.terms import Moment
from vramprobe.terms.sharding.tensor_parallel import PartModel, PartTape, part_of, part_setup
from vramprobe.terms.step.walk import play
from vramprobe.terms.tape.account import Account
from vramprobe.terms.tape.graph import Value
from vramprobe.terms.tape.sizes import monomials
from vramprobe.terms.tape.tape import Covers

PHASES = ("forward", "backward", "optimizer_step")
FULL, MIXED = {"method": "full", "recipe": "all-bf16"}, {"method": "full", "recipe": "mixed"}
Q_V = {"method": "lora", "lora_targets": "q_v"}
#: Among so many, what the tensors of rank 0 asked for on an emulated H100 at the peak of each phase of a steady step.
EMULATED: list[tuple[int, dict[str, Any], tuple[int, int, int]]] = [
    (2, FULL | {"model": "llama-3.1-8b", "num_layers": 4}, (7_729_345_268, 8_293_499_560, 8_810_447_516)),
    (8, MIXED | {"model": "llama-3.1-8b", "num_layers": 4, "gradient_checkpointing": True, "batch_size": 1,
                 "seq_len": 2048}, (6_182_134_444, 6_455_796_392, 6_015_255_196)),
    (2, Q_V | {"model": "llama-3.1-8b", "num_layers": 4}, (3_741_917_848, 3_995_918_988, 2_001_297_984)),
    (8, Q_V | {"model": "llama-3.1-8b", "gradient_checkpointing": True, "batch_size": 1, "seq_len": 4096},
     (8_568_464_400, 9_576_506_380, 2_147_558_400)),
    (2, MIXED | {"model": "llama-3.2-1b", "num_layers": 6, "grad_accum": 4},
     (7_619_072_600, 7_873_335_884, 5_088_133_600)),
    (8, FULL | {"model": "llama-3.2-1b", "num_layers": 6, "batch_size": 4, "seq_len": 1024},
     (6_897_513_064, 7_948_120_652, 694_960_608)),
    (4, MIXED | {"model": "llama-3.2-1b", "num_layers": 3, "gradient_checkpointing": True},
     (2_993_373_580, 3_423_846_784, 1_847_837_044)),
    (5, FULL | {"model": "smollm2-360m", "num_layers": 8}, (897_490_624, 998_137_524, 268_587_560)),
    (4, MIXED | {"model": "qwen2.5-7b", "num_layers": 4, "gradient_checkpointing": True},
     (8_540_489_444, 9_806_103_256, 10_336_420_556)),
    (4, FULL | {"model": "qwen2.5-7b", "num_layers": 4, "optim": "adagrad"},
     (4_083_225_380, 4_394_636_056, 7_030_303_436)),
    (4, FULL | {"model": "qwen2.5-7b", "num_layers": 4, "optim": "rmsprop"},
     (4_083_225_176, 4_394_635_852, 5_201_708_544)),
    (4, {"model": "qwen2.5-7b", "num_layers": 4, "method": "lora", "lora_dropout": 0.05, "gradient_checkpointing": True,
         "lora_targets": "q_proj,k_proj,v_proj,gate_proj,up_proj"}, (2_712_666_808, 3_013_083_820, 1_107_518_112)),
    (2, MIXED | {"model": "qwen3-8b", "num_layers": 4, "grad_accum": 2},
     (21_195_870_996, 21_490_242_312, 18_688_344_764)),
    (4, FULL | {"model": "mistral-7b-v0.3", "num_layers": 4, "optim": "adamw_torch"},
     (2_555_015_768, 2_622_108_236, 3_120_873_984)),
    (4, FULL | {"model": "mistral-7b-v0.1", "num_layers": 3, "gradient_checkpointing": True, "batch_size": 1,
                "seq_len": 5000}, (3_356_424_680, 3_676_384_676, 2_162_473_720)),
]  # fmt: skip
#: The same of 512 words, so that layers are higher than logits.
OF_512_WORDS: list[tuple[int, dict[str, Any], tuple[int, int, int]]] = [
    (2, FULL | {"model": "llama-3.1-8b", "num_layers": 2, "batch_size": 4},
     (2_748_613_236, 2_884_895_360, 1_833_140_820)),
    (4, Q_V | {"model": "llama-3.1-8b", "num_layers": 4, "lora_r": 256, "gradient_checkpointing": True,
               "batch_size": 4}, (1_011_008_064, 1_357_283_932, 660_742_720)),
    (8, FULL | {"model": "llama-3.2-1b", "num_layers": 3, "gradient_checkpointing": True},
     (289_026_420, 402_059_664, 250_757_492)),
    (4, {"model": "qwen2.5-7b", "num_layers": 4, "method": "lora", "recipe": "all-bf16", "batch_size": 4,
         "lora_targets": "q_proj,k_proj,v_proj,gate_proj,up_proj"}, (2_954_199_776, 3_033_883_372, 564_404_896)),
    (4, FULL | {"model": "qwen3-8b", "num_layers": 4, "gradient_checkpointing": True, "batch_size": 1},
     (1_324_087_996, 1_762_005_208, 1_623_515_836)),
    (8, FULL | {"model": "qwen3-8b", "num_layers": 3, "attn": "eager", "batch_size": 1},
     (908_625_040, 940_602_524, 654_563_984)),
    (8, FULL | {"model": "mistral-7b-v0.1", "num_layers": 3, "gradient_checkpointing": True, "batch_size": 1,
                "seq_len": 5000}, (998_480_824, 1_542_686_388, 730_118_904)),
]  # fmt: skip
WHOLE_LLAMA = {"model": "llama-3.1-8b", "batch_size": 1, "seq_len": 512, "sharding": "tp"}


def cell(**words: Any) -> CellSpec:
    return resolve(**{"device": "cuda", "batch_size": 2, "seq_len": 512} | words)


def highest(spec: CellSpec, num_ranks: int, phase: str) -> Moment:
    found = [one for one in part_of(spec, num_ranks).moments(spec) if one.phase == phase]
    return max(found, key=lambda one: one.total_bytes)


def asked(spec: CellSpec, num_ranks: int) -> list[int]:
    """What tensors ask for at the peak of each phase."""
    moments = [highest(spec, num_ranks, phase) for phase in PHASES]
    extra = workspaces_bytes(spec, find_gpu("H100-SXM"))
    return [one.total_bytes - one.terms.get("block_remainders", 0) + extra for one in moments]


@pytest.mark.parametrize(("num_ranks", "words", "seen"), EMULATED)
def test_a_rank_as_emulated(num_ranks: int, words: dict[str, Any], seen: tuple[int, int, int]) -> None:
    """But for the labels that are padded and shifted beside the loss, and scalars."""
    assert asked(cell(**words), num_ranks) == pytest.approx(seen, abs=36_864)


@pytest.mark.parametrize(("num_ranks", "words", "seen"), OF_512_WORDS)
def test_a_rank_of_few_words_as_emulated(
    num_ranks: int, words: dict[str, Any], seen: tuple[int, int, int], tmp_path: Path
) -> None:
    config = find_model(words["model"]).config | {"vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = cell(**{"seq_len": 1024} | words | {"model": str(tmp_path)})
    assert asked(spec, num_ranks) == pytest.approx(seen, abs=128)


class LoggingTape(PartTape):
    """A tape that knows what was allocated."""

    def __init__(self, covers: Covers) -> None:
        super().__init__(covers)
        self.sizes: list[int] = []

    def new(self, numel: int, dtype: str, cause: str | None = None) -> Value:
        made = super().new(numel, dtype, cause)
        self.sizes.append(made.num_bytes)
        return made


def test_sums_are_copies_as_emulated() -> None:
    """How often in a step of three layers hidden states, all logits, this rank's and the embedding's gradient are made;
    most sums are over where a phase is highest."""
    spec = cell(model="llama-3.1-8b", num_layers=3, **FULL)
    setup = part_setup(spec, architecture(spec.architecture), 2)
    tape = LoggingTape(setup.sizes.covers)
    play(PartModel(tape, setup, range(3)), Account(tape))
    counts = Counter(setup.sizes.resolved(size, monomials(2, 512)) for size in tape.sizes)
    hidden, logits = 2 * 1024 * 4096, 2 * 1024 * 128256
    assert [counts[size] for size in (hidden, logits, logits // 2, 2 * 128256 * 4096)] == [87, 3, 2, 1]


def test_parts_and_what_is_whole_by_hand() -> None:
    """Of Mistral's 7B with a single layer among 4: norms are whole, and so is the embedding's gradient."""
    spec = cell(model="mistral-7b-v0.3", num_layers=1, method="full", dtype="bf16", autocast="none")
    width, inner, keys, vocab = 4096, 14336, 1024, 32768
    part = (2 * width * width + 2 * width * keys + 3 * width * inner + 2 * vocab * width) // 4
    norms = 3 * width
    terms = highest(spec, 4, "optimizer_step").terms
    assert terms["weights"] == 2 * (part + norms) + 2 * 64 * 4
    assert terms["optimizer_state"] == 2 * 2 * (part + norms) + 12 * 4
    assert terms["gradients"] == 2 * (part + norms + vocab * width * 3 // 4)
    assert terms["optimizer_temporaries"] == 2 * vocab * width // 4  # the embedding's part, copied for the step


def test_adapters_are_divided_where_their_layer_s_outputs_are() -> None:
    spec = cell(model="mistral-7b-v0.3", num_layers=1, lora_r=16, lora_dtype="fp32", **Q_V)
    terms = highest(spec, 8, "optimizer_step").terms
    assert terms["gradients"] == 4 * 16 * (2 * 4096 + (4096 + 1024) // 8)


def test_a_tied_table_s_gradient_ends_as_a_part() -> None:
    spec = cell(model="llama-3.2-1b", num_layers=1, method="full", dtype="bf16", autocast="none")
    terms = highest(spec, 8, "optimizer_step").terms
    assert "optimizer_temporaries" not in terms
    assert terms["gradients"] == terms["weights"] - 2 * 32 * 4


def test_more_ranks_hold_less() -> None:
    spec = cell(model="llama-3.1-8b", method="full", gradient_checkpointing=True)
    peaks = [max(one.total_bytes for one in part_of(spec, number).moments(spec)) for number in (2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] < predict(spec).peak_allocated_bytes.value


def test_a_prediction_says_that_all_have_the_same_batch() -> None:
    found = ask(**WHOLE_LLAMA, method="full", num_gpus=8, gpu="H100-SXM")
    assert (found.num_gpus, found.sharding) == (8, "tp")
    assert found.cell_id.endswith("_tp-x8")
    assert "one rank of 8 under tp, all with the same batch, by arithmetic, not measured" in found.warnings


def test_the_fewest_are_numbers_that_divide_the_heads() -> None:
    words = WHOLE_LLAMA | {"method": "full", "recipe": "mixed", "gradient_checkpointing": True}
    found = min_gpus(gpu="H100-SXM", **words)
    assert (found.num_gpus, found.verdict.verdict) == (2, "fits")
    none = min_gpus(gpu="H100-SXM", **words | {"model": "llama-3.1-70b"})
    assert (none.num_gpus, none.verdict.verdict) == (None, "does not fit")  # on 8, which are as many as its key heads
    assert min_gpus(gpu="H200", **WHOLE_LLAMA, **Q_V).num_gpus == 1


def test_the_largest_model_is_of_those_that_divide() -> None:
    words = {"batch_size": 1, "seq_len": 512, "sharding": "tp", "num_gpus": 8, "gradient_checkpointing": True}
    found = largest_model(gpu="L4", **words, **Q_V)
    assert found.fits is not None
    assert found.fits.value == "llama-2-70b"
    assert found.not_judged["qwen2.5-7b"].startswith("num_gpus 8 under tp: num_attention_heads 28 and num_key_value")
    with pytest.raises(SpecError, match="quant nf4 under tp"):
        largest_model(gpu="L4", **words, method="qlora")


def test_a_plan_predicts_divided_layers(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(
        "name: parts\ncells:\n  - {model: qwen3-8b, method: full, batch_size: 1, seq_len: 512, sharding: tp,"
        " num_gpus: [4, 8], device: cuda}\n"
    )
    rows = plan(sweep, gpu="H100-SXM", out=tmp_path / "out").rows
    assert [(row.spec.num_gpus, row.verdict) for row in rows] == [(8, "fits"), (4, "fits")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"num_gpus": 3, "method": "full"}, "num_gpus 3 under tp: num_attention_heads 32 and num_key_value_heads 8"),
        ({"num_gpus": 1, "method": "full"}, "num_gpus 1 under tp: layers are divided among 2 GPUs or more"),
        ({"num_gpus": 2, "method": "lora"}, "lora_targets all-linear under tp"),
        ({"num_gpus": 2, "method": "qlora"}, "quant nf4 under tp"),
        ({"num_gpus": 2, "dora": True, **Q_V}, "dora under tp: peft adds"),
        ({"num_gpus": 2, "method": "full", "optim": "adafactor"}, "tp hands the optimizer DTensors"),
        ({"num_gpus": 2, "method": "full", "offload": "params"}, "offload params under tp"),
        ({"num_gpus": 8, "method": "full", "shard_size": 4}, "shard_size 4: tp makes all ranks one group"),
        ({"num_gpus": 8, "method": "full", "cp_size": 2}, "cp_size 2 under tp"),
    ],
)
def test_what_is_not_divided(words: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        ask(**WHOLE_LLAMA | words)


def test_what_there_is_no_arithmetic_for() -> None:
    with pytest.raises(UnsupportedArchitecture, match="no arithmetic for sharding tp of a gpt_neox, but of llama, "):
        ask(**WHOLE_LLAMA | {"model": "pythia-1b", "method": "full", "num_gpus": 2, "engine": "formula"})
    with pytest.raises(UnsupportedArchitecture, match="no arithmetic for sharding tp with a fused loss"):
        ask(**WHOLE_LLAMA, method="full", num_gpus=2, fused_linear_cross_entropy=True, engine="formula")
