"""Other releases: what a stack's name means, and what a cell takes under them, by hand where that is short."""

from __future__ import annotations

from typing import Any

import pytest
from factories import TINY_LLAMA

from benchmarks.truth.published_rows import cell_of, list_published
from vramprobe import api
from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.architecture.releases import READ
from vramprobe.catalog import find_model
from vramprobe.errors import SpecError
from vramprobe.predict.predict import predict
from vramprobe.predict.stack import on_stack
from vramprobe.spec import CellSpec, resolve
from vramprobe.terms import moments
from vramprobe.terms.cell.parameters import buffers_bytes, tensors

SHAPE = {"batch_size": 4, "seq_len": 1024, "device": "cuda"}


def cell(model: str = "qwen2.5-0.5b", method: str = "lora", **words: Any) -> CellSpec:
    return resolve(model=model, method=method, **SHAPE | words)


def highest(spec: CellSpec, phase: str) -> int:
    return max(moment.total_bytes for moment in moments(spec) if moment.phase == phase)


@pytest.mark.parametrize(
    ("names", "versions"),
    [
        ("transformers-4.48", {"transformers": "4.48"}),
        ("transformers-4", {"transformers": "4.57"}),
        ("transformers-4.48.1, bitsandbytes-0.45.0", {"transformers": "4.48.1", "bitsandbytes": "0.45.0"}),
    ],
)
def test_a_stack_names_releases(names: str, versions: dict[str, str]) -> None:
    found = predict(on_stack(cell(), names))
    assert {name: found.libraries[name] for name in versions} == versions
    assert "torch" not in found.libraries


def test_all_of_transformers_5_is_taken_for_the_pinned_one() -> None:
    assert on_stack(cell(), "transformers-5") == cell()
    earlier, now = (predict(on_stack(cell(), f"transformers-{name}")) for name in ("5.2.0", "5"))
    assert earlier.peak_allocated_bytes == now.peak_allocated_bytes
    [said] = set(earlier.warnings) - set(now.warnings)
    assert said.startswith("transformers 5.2.0 is taken for 5.")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("hf-2025-03", "name releases"),
        ("torch-2.5", "name releases"),
        ("transformers-4.58", "4.42 to 4.57"),
        ("transformers-4.41", "4.42 to 4.57"),
        ("transformers-6", "5.0 to 5.23"),
        ("bitsandbytes-0.42", "0.43 to 0.50"),
        ("bitsandbytes-0.46", "name the transformers"),
    ],
)
def test_what_was_not_read_is_refused(names: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        on_stack(cell(), names)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"model": "gemma-2-2b"}, "gemma2"),
        ({"attn": "eager"}, "attn eager"),
        ({"dora": True}, "dora"),
        ({"device": "cpu"}, "device cpu"),
        ({"method": "qlora", "quant": "int8"}, "quant int8"),
        ({"model": "mistral-7b-v0.1", "seq_len": 8192}, "sliding window"),
        ({"model": "mixtral-8x7b", "lora_r": 2}, "8 experts with 2 to a token and lora_r 2"),
        ({"fused_linear_cross_entropy": True}, "fused_linear_cross_entropy"),
    ],
)
def test_a_cell_of_which_an_older_release_is_not_known_is_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=said):
        predict(on_stack(cell(**words), "transformers-4.48"))


def test_sharding_and_recordings_know_no_other_release() -> None:
    words = {"model": "llama-3-8b", "method": "lora", "batch_size": 1, "seq_len": 64, "stack": "transformers-4.48"}
    for more in ({"engine": "recipe"}, {"sharding": "zero3", "num_gpus": 2}):
        with pytest.raises(SpecError, match="stack is by arithmetic, of one GPU"):
            api.predict(**words, **more)


def test_before_4_49_the_loss_takes_a_copy_of_the_logits_and_before_4_46_none_of_16_bits() -> None:
    logits = 4 * 1024 * 151936
    now, kept, gone = (highest(on_stack(cell(), f"transformers-{one}"), "forward") for one in ("4.49", "4.48", "4.45"))
    assert kept - now == 4 * logits
    # 4.45 has no copies of queries by heads, which flash attention's output then follows
    assert kept - gone == pytest.approx(2 * logits, rel=1e-2)


@pytest.mark.parametrize(
    ("line", "names", "percent"),
    [
        (22, "transformers-4.48.1,bitsandbytes-0.43.3", -0.0007),  # -3.09 % by the pinned release
        (90, "transformers-4.45.2,bitsandbytes-0.43.3", -0.0059),  # -2.56 %
    ],
)
def test_published_runs_of_mistral_by_flash_attention_beyond_its_window(line: int, names: str, percent: float) -> None:
    (row,) = (row for row in list_published() if row.line == line)
    run = cell_of(row)
    assert isinstance(run, CellSpec)
    assert (run.model_type, run.attn, run.seq_len) == ("mistral", "flash_attention_2", 4096)
    found = predict(on_stack(run, names)).peak_allocated_bytes.value
    assert 100 * (found / row.memory_bytes - 1) == pytest.approx(percent, abs=5e-4)


def test_flash_attention_repeats_grouped_heads_until_4_47_but_never_llamas() -> None:
    def saved(model: str, release: str) -> int:
        return highest(on_stack(cell(model, attn="flash_attention_2"), f"transformers-{release}"), "backward")

    arch = architecture(find_model("qwen2.5-0.5b").config)
    repeated = 2 * 2 * 4096 * (arch.num_heads - arch.num_kv_heads) * arch.head_size * arch.num_layers
    assert saved("qwen2.5-0.5b", "4.47") - saved("qwen2.5-0.5b", "4.48") == pytest.approx(repeated, rel=0.01)
    assert saved("llama-3.2-1b", "4.47") == saved("llama-3.2-1b", "4.48")  # 4.48 copies no heads for it either


def test_grouped_heads_are_repeated_until_4_53() -> None:
    arch = architecture(find_model("qwen2.5-0.5b").config)
    repeated = 2 * 2 * 4096 * (arch.num_heads - arch.num_kv_heads) * arch.head_size * arch.num_layers
    before, after = (highest(on_stack(cell(), f"transformers-{one}"), "backward") for one in ("4.53", "4.56"))
    assert before - after == pytest.approx(repeated, rel=0.01)


def test_each_layer_of_qwen2_kept_a_rotary_table_until_4_44() -> None:
    own, shared = (architecture(on_stack(cell(), f"transformers-{one}").architecture) for one in ("4.44", "4.45"))
    tables = 24 * (2 * 32768 * 64 * 2 + 32 * 4)
    assert buffers_bytes(own, "bf16") == tables
    assert buffers_bytes(shared, "bf16") == 2 * 32 * 4


def test_a_checkpoint_that_re_enters_keeps_its_output_beside_the_gradient() -> None:
    words = {"method": "full", "batch_size": 1, "seq_len": 512, "gradient_checkpointing": True, "dtype": "bf16"}
    spec = cell("llama-3-8b", num_layers=4, **words)
    layers = [
        max(one.total_bytes for one in moments(on_stack(spec, f"transformers-{version}")) if one.label == "last layer")
        for version in ("4.57", "5")
    ]
    assert layers[0] - layers[1] >= 512 * 4096 * 2


def test_the_experts_of_transformers_4_are_linear_layers_with_adapters_of_their_own() -> None:
    spec = on_stack(cell("mixtral-8x7b", "qlora", num_layers=2), "transformers-4.57")
    arch = architecture(spec.architecture)
    assert arch.num_params == architecture(cell("mixtral-8x7b", num_layers=2).architecture).num_params
    adapters = [one for one in tensors(spec, arch) if one.role == "adapter"]
    of_experts = 8 * 3 * (4096 + 14336) * 16
    of_attention = 16 * (4 * 4096 + 2 * (4096 + 1024))
    assert sum(one.numel for one in adapters) == of_experts + of_attention + 16 * (4096 + 8)
    assert all(one.quantised for one in tensors(spec, arch) if one.role == "linear")


def test_bitsandbytes_before_0_47_computes_in_the_dtype_of_its_input() -> None:
    spec = cell("mixtral-8x7b", "qlora", num_layers=4, gradient_checkpointing=True)
    before, after = (
        highest(on_stack(spec, f"transformers-4.53,bitsandbytes-{one}"), "backward") for one in ("0.46", "0.47")
    )
    # the whole fp32 weight, and autocast's copies of its input and of itself, in the place of one of 16 bits and of the
    # fp32 scales that are there with it, twice
    assert before - after == pytest.approx(4 * 4096 * 14336 - 2 * 4 * 4096 * 14336 // 64, rel=0.001)


def test_every_family_that_was_read_is_predicted_under_the_oldest_release() -> None:
    names = {"llama": "llama-3-8b", "mistral": "mistral-7b-v0.1", "mixtral": "mixtral-8x7b", "qwen2": "qwen2.5-0.5b"}
    assert set(names) == set(READ)
    for name in names.values():
        for method in ("full", "lora", "qlora"):
            assert predict(on_stack(cell(name, method, num_layers=2), "transformers-4.42")).warnings


def test_whoever_asks_for_a_quantised_mixtral_learns_both() -> None:
    spec = cell("mixtral-8x7b", "qlora", gradient_checkpointing=True, kbit_prep="trl")
    now = [one for one in predict(spec).warnings if "--stack transformers-4.57" in one]
    then = [one for one in predict(on_stack(spec, "transformers-4.57")).warnings if "--stack transformers-5" in one]
    assert len(now) == len(then) == 1
    assert "GiB there" in now[0]
    assert "GiB there" in then[0]


def test_a_config_on_disk_says_nothing_of_the_release_that_runs_it(tmp_path: Any) -> None:
    import json

    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA | {"transformers_version": "4.48.0"}))
    assert "transformers_version" not in find_model(str(tmp_path)).config
