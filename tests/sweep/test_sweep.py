"""Sweep files: products, exclusions, hold-outs, defaults; and every way to write one wrongly has its message."""

from pathlib import Path
from typing import Any

import pytest
from factories import TINY_LLAMA_PATH, make_spec

from vramprobe.errors import MissingDependency, SpecError
from vramprobe.sweep.definition import Sweep, load_sweep, select


def load(folder: Path, text: str, *, device: str = "cpu", overrides: dict[str, Any] | None = None) -> Sweep:
    file = folder / "some-sweep.yaml"
    file.write_text(text.replace("TINY", str(TINY_LLAMA_PATH)))
    return load_sweep(file, device=device, overrides=overrides)


def block(options: str, more: str = "") -> str:
    """One block: the four required options, then ``options``, one per line."""
    lines = ["model: TINY", "method: full", "batch_size: 2", "seq_len: 16"]
    given = {line.split(":")[0] for line in options.splitlines()}
    kept = [line for line in lines if line.split(":")[0] not in given] + options.splitlines()
    return f"{more}cells:\n  - " + "\n    ".join(kept) + "\n"


def complaint(folder: Path, text: str, **how: Any) -> str:
    with pytest.raises(SpecError) as caught:
        load(folder, text, **how)
    assert "some-sweep.yaml" in str(caught.value)
    return str(caught.value)


def test_one_block_is_one_cell(tmp_path: Path) -> None:
    sweep = load(tmp_path, block(""))
    assert sweep.cells == (make_spec(),)
    assert (sweep.name, sweep.description, sweep.held_out, sweep.notes) == ("some-sweep", "", frozenset(), ())


def test_lists_multiply_in_file_order_and_the_last_varies_fastest(tmp_path: Path) -> None:
    text = block("seq_len: [16, 32]\nbatch_size: [4, 1]") + block("seq_len: 8").removeprefix("cells:\n")
    sizes = [(cell.seq_len, cell.batch_size) for cell in load(tmp_path, text).cells]
    assert sizes == [(16, 4), (16, 1), (32, 4), (32, 1), (8, 2)]


def test_defaults_are_filled_in_and_a_block_and_overrides_win(tmp_path: Path) -> None:
    text = block("method: [full, lora]\nsteps: 4", "name: named\ndefaults: {steps: 5, seed: 7, lora_r: 4}\n")
    full, lora = load(tmp_path, text).cells
    assert (full.steps, full.seed, full.lora_r, lora.lora_r) == (4, 7, None, 4)
    full, lora = load(tmp_path, text, overrides={"steps": 6, "lora_r": 2, "optim": None}).cells
    assert (full.steps, full.lora_r, lora.lora_r, lora.optim) == (6, None, 2, "adamw_torch_fused")
    assert load(tmp_path, text).name == "named"


def test_defaults_order_does_not_change_the_order_of_a_block(tmp_path: Path) -> None:
    text = block("batch_size: [1, 2]\nseq_len: [16, 32]", "defaults: {seq_len: 8}\n")
    assert [(cell.batch_size, cell.seq_len) for cell in load(tmp_path, text).cells] == [
        (1, 16),
        (1, 32),
        (2, 16),
        (2, 32),
    ]


def test_adapter_options_in_a_block_are_meant(tmp_path: Path) -> None:
    assert "method full trains no adapters" in complaint(tmp_path, block("lora_r: 4"))


def test_quant_in_defaults_reaches_only_qlora(tmp_path: Path) -> None:
    text = block("method: [full, lora, qlora]", "defaults: {quant: fp4, kbit_prep: trl}\n")
    assert [(cell.quant, cell.kbit_prep) for cell in load(tmp_path, text).cells] == [("none", "none")] * 2 + [
        ("fp4", "trl")
    ]


def test_a_blocks_recipe_replaces_the_defaults_knobs(tmp_path: Path) -> None:
    text = block("recipe: mixed", "defaults: {dtype: bf16, autocast: none}\n")
    (cell,) = load(tmp_path, text).cells
    assert (cell.dtype, cell.autocast) == ("fp32", "bf16")
    (cell,) = load(tmp_path, text, overrides={"recipe": "all-bf16"}).cells
    assert (cell.dtype, cell.autocast) == ("bf16", "none")
    assert "drop one of them" in complaint(tmp_path, block("recipe: mixed\ndtype: bf16"))


def test_device_is_the_callers_unless_the_file_names_it(tmp_path: Path) -> None:
    assert load(tmp_path, block(""), device="cuda").cells[0].device == "cuda"
    assert load(tmp_path, block("device: cpu"), device="cuda").cells[0].device == "cpu"
    assert load(tmp_path, block("", "defaults: {device: cpu}\n"), device="cuda").cells[0].device == "cpu"
    assert load(tmp_path, block("device: cpu"), device="cpu", overrides={"device": "cuda"}).cells[0].device == "cuda"


def test_exclude_leaves_out_partial_matches_before_they_are_checked(tmp_path: Path) -> None:
    options = "model: [TINY, gpt2]\nseq_len: [16, 2048]\nexclude:\n  - {model: gpt2, seq_len: [2048, 4096]}"
    cells = load(
        tmp_path, block(options.replace("\n", "\n    ").replace("    seq", "seq").replace("    exc", "exc"))
    ).cells
    assert [(cell.model_type, cell.seq_len) for cell in cells] == [("llama", 16), ("llama", 2048), ("gpt2", 16)]


def test_an_exclude_that_does_nothing_is_a_mistake(tmp_path: Path) -> None:
    assert "exclude 1 matches no combination" in complaint(tmp_path, block("exclude: [{seq_len: 99}]"))
    assert "the block sets no optim" in complaint(tmp_path, block("exclude: [{optim: sgd}]"))
    assert "unknown option 'seqlen'" in complaint(tmp_path, block("exclude: [{seqlen: 99}]"))
    assert "exclude is a list" in complaint(tmp_path, block("exclude: {seq_len: 99}"))


def test_hold_out_is_kept_by_fingerprint(tmp_path: Path) -> None:
    text = block("") + block("seq_len: 32\nhold_out: true").removeprefix("cells:\n")
    sweep = load(tmp_path, text)
    assert sweep.held_out == {sweep.cells[1].fingerprint}
    clash = block("") + block("hold_out: true").removeprefix("cells:\n")
    assert "held out in one block and not in another" in complaint(tmp_path, clash)


def test_duplicates_are_dropped_with_a_note(tmp_path: Path) -> None:
    sweep = load(tmp_path, block("batch_size: [2, 2]") + block("steps: 3").removeprefix("cells:\n"))
    assert sweep.cells == (make_spec(),)
    assert len(sweep.notes) == 2
    assert all(make_spec().cell_id in note and "kept once" in note for note in sweep.notes)
    assert "block 2" in sweep.notes[1]


def test_autocast_none_is_a_word(tmp_path: Path) -> None:
    assert load(tmp_path, block("autocast: none\ndtype: bf16")).cells[0].autocast == "none"


def test_lora_targets(tmp_path: Path) -> None:
    one = load(tmp_path, block("method: lora\nlora_targets: q_proj,v_proj")).cells
    assert [cell.lora_targets for cell in one] == [("q_proj", "v_proj")]
    three = load(tmp_path, block('method: lora\nlora_targets: [all-linear, "q_proj,v_proj", "q_proj,"]')).cells
    assert [cell.lora_targets for cell in three] == ["all-linear", ("q_proj", "v_proj"), ("q_proj",)]
    text = complaint(tmp_path, block("method: lora\nlora_targets: [q_proj, v_proj]"))
    assert "'q_proj' is one module" in text
    assert "lora_targets: q_proj,v_proj" in text
    assert "write one set of modules as q_proj,v_proj" in complaint(
        tmp_path, block("method: lora\nlora_targets: [[q_proj, v_proj]]")
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- a\n", "is list ['a']; a mapping of name, defaults and cells is expected"),
        ("just words", "is str 'just words'"),
        ("name: x\n", "has no cells"),
        ("cells: []\n", "has no cells"),
        ("cells: {model: gpt2}\n", "has no cells"),
        ("cells: [gpt2]\n", "block 1 is str 'gpt2'; a mapping of options"),
        ("cels: []\n", "unknown sweep key 'cels'. Nearest: cells"),
        ("cells:\n  - model: [gpt2\n", "line 3 is not valid YAML"),
        ("cells:\n\t- model: gpt2\n", "line 2 is not valid YAML"),
        ("cells: [{model: 2026-99-99}]\n", "YAML cannot read: month must be in 1..12"),
        ("[" * 5000, "YAML cannot read: maximum recursion depth"),
        ("cells:\n  - model: gpt2\n    model: gpt2\n", "line 3: 'model' is there twice"),
        ("cells:\n  - method: full\n    batch_size: 1\n    seq_len: 8\n", "block 1 names no model"),
        ("cells:\n  - model: gpt2\n    batch_size: 1\n    seq_len: 8\n", "block 1 names no method"),
        ("cells:\n  - model: gpt2\n    method: full\n    seq_len: 8\n", "block 1 names no batch_size"),
        ("name: a/b\n" + block(""), "becomes a folder"),
        ("defaults: 3\n" + block(""), "defaults is int 3"),
        ("defaults: {seq_len: [1, 2]}\n" + block(""), "defaults: seq_len is a list"),
        ("defaults: {seqlen: 8}\n" + block(""), "defaults: unknown option 'seqlen'. Nearest: seq_len"),
        (block("hold_out: maybe"), "hold_out is 'maybe'; write true or false"),
    ],
)
def test_a_malformed_file_says_where_and_what(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in complaint(tmp_path, text)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("batchsize: 3", "unknown option 'batchsize'. Nearest: batch_size"),
        ("gradient-checkpointing: true", "Nearest: gradient_checkpointing"),
        ("architecture: {}", "unknown option 'architecture'"),
        ("batch_size: []", "batch_size is an empty list"),
        ("batch_size: many", "batch_size is 'many'; a whole number is expected"),
        ("batch_size: 1, 2", "batch_size is '1, 2'; a whole number is expected"),
        ("batch_size: true", "batch_size is True; a whole number is expected"),
        ("batch_size: 1.5", "batch_size is 1.5; a whole number is expected"),
        ("seq_len: 1e3", "seq_len is '1e3'; a whole number is expected"),
        ("autocast: no", "autocast is False; text is expected; YAML reads yes, no, on and off as booleans"),
        (
            "autocast: null",
            "autocast is null; text is expected; leave the option out for its default, or write the word none",
        ),
        ("autocast: ~", "autocast is null"),
        ("autocast:", "autocast is null"),
        ("model: 7", "model is 7; text is expected"),
        ("num_layers: two", "num_layers is 'two'; a whole number is expected"),
        ("num_layers: 3", "num_layers 3 is not possible: this model has 2 layers"),
        ("method: lora\nlora_alpha: big", "lora_alpha is 'big'; a number is expected"),
        ("gradient_checkpointing: 1", "gradient_checkpointing is 1; true or false is expected"),
        ("dtype: {a: 1}", "dtype is {'a': 1}; text is expected"),
        ("dtype: bf15", "dtype: 'bf15' given; allowed: 'bf16', 'fp32' or 'fp16'. Nearest: bf16"),
        ("model: gtp2", "unknown model 'gtp2'. Nearest: gpt2"),
        ("batch_size: 0", "batch_size: 0 given; must be at least 1"),
    ],
)
def test_a_wrong_option_names_block_and_value(tmp_path: Path, options: str, expected: str) -> None:
    text = complaint(tmp_path, block("") + block(options).removeprefix("cells:\n"))
    assert "block 2" in text
    assert expected in text


def test_an_impossible_combination_names_what_varied(tmp_path: Path) -> None:
    text = complaint(tmp_path, block("method: [lora, full]\nquant: [none, nf4]"))
    assert "block 1 (method=lora, quant=nf4): quant nf4 needs method qlora" in text


def test_a_hub_that_cannot_be_asked_keeps_its_kind(tmp_path: Path) -> None:
    with pytest.raises(MissingDependency, match=r"block 1: model 'some-org/some-model'.*HF_HUB_OFFLINE"):
        load(tmp_path, block("model: some-org/some-model"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no sweep file .*nowhere\.yaml; .* one that ships: 24gb, 48gb"):
        load_sweep(tmp_path / "nowhere.yaml", device="cpu")
    with pytest.raises(SpecError, match="cannot be read"):
        load_sweep(tmp_path, device="cpu")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(SpecError, match="cannot be read"):
        load_sweep(tmp_path / "binary.yaml", device="cpu")


def test_unknown_overrides(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="overrides: unknown option 'batch'"):
        load(tmp_path, block(""), overrides={"batch": 3})


def test_one_pattern_may_stand_alone() -> None:
    """Text is a sequence of letters, too, and a cell has most of them."""
    sweep = load_sweep(Path(__file__).parents[2] / "configs" / "sweeps" / "quickstart.yaml", device="cpu")
    assert select(sweep, only="gpt2").cells == select(sweep, only=["gpt2"]).cells != sweep.cells
