"""The registry of techniques: whole against the libraries' own lists, its ranking and its command by known answers."""

import csv
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.techniques.commands import COMBINATIONS, LEFT_OUT, arguments_of, command_of
from vramprobe.cli.verbs import app
from vramprobe.errors import UnknownName
from vramprobe.predict.questions import predict
from vramprobe.recommend.ranking import rank
from vramprobe.techniques.registry import Technique, bases, of_kind, remarks_of, techniques
from vramprobe.techniques.savings import Saving, savings

CELL = {"model": "llama-3.1-8b", "method": "lora", "batch_size": 1, "seq_len": 2048}
OPTIONS = "--model llama-3.1-8b --method lora --batch-size 1 --seq-len 2048"


def test_every_technique_runs_beside_a_base_or_says_why_not() -> None:
    for one in techniques().values():
        assert bool(one.left_out) or one.base in bases(), one.id
        assert one.docs.startswith("https://"), one.id
    for several in COMBINATIONS:
        assert several.base in bases()
        assert all(not techniques()[name].left_out for name in several.techniques)


def test_every_optimizer_of_transformers_has_a_row_or_a_reason() -> None:
    names = {one.value for one in pytest.importorskip("transformers.training_args").OptimizerNames}
    ours = {one.optim for one in techniques().values() if one.optim}
    aside = set(LEFT_OUT["optim"])
    assert names - ours - aside == {"adamw_torch_fused"}, "the base of the optimizers"
    assert (ours | aside) - names == set()
    assert ours & aside == set()


def test_every_method_of_peft_has_a_row_or_a_reason() -> None:
    mapping = pytest.importorskip("peft.mapping").PEFT_TYPE_TO_CONFIG_MAPPING
    by_class = {config.__name__: kind.value for kind, config in mapping.items()}
    classes = {match[1] for one in techniques().values() if (match := re.match(r"(\w+)\(", one.adapter))}
    ours, aside = {by_class[name] for name in classes}, set(LEFT_OUT["peft"])
    missing = {kind.value for kind in mapping} - ours - aside - {"BONE"}
    assert missing == set()
    assert ours & aside == set()


def test_every_quantization_of_transformers_has_a_row_or_a_reason() -> None:
    methods = {one.value for one in pytest.importorskip("transformers.utils.quantization_config").QuantizationMethod}
    ours = {"bitsandbytes", "hqq", "torchao", "gptq", "awq", "mxfp4", "fp8"}
    assert methods - ours - set(LEFT_OUT["quantization"]) == set()


def test_a_switch_is_the_frameworks_own_or_follows_from_the_option() -> None:
    galore = techniques()["galore_adamw"]
    assert galore.switch("trl") == "--optim galore_adamw"
    assert galore.switch("llamafactory") == "use_galore: true"
    assert galore.switch("torchtune") == ""
    assert techniques()["vera"].switch("trl").startswith("SFTTrainer(peft_config=VeraConfig(")


def test_arguments_of_a_technique_follow_those_of_its_base() -> None:
    words = command_of(bases()["full-8b"], [techniques()["sgd"]])
    assert words[:2] == ["python", "train.py"]
    assert words[-4:] == ["--optim", "adamw_torch_fused", "--optim", "sgd"]


def test_remarks_name_those_that_share_them() -> None:
    paged = [one for one in techniques().values() if one.id.startswith("paged_")]
    (remark,) = remarks_of([techniques()["sgd"], *paged])
    assert "managed memory" in remark
    assert remarks_of([techniques()["sgd"], *paged])[remark] == [one.name for one in paged]
    shown = CliRunner().invoke(app, ["techniques", "--kind", "optimizer"]).output
    assert "paged 8-bit AdamW *" in shown
    assert shown.count(remark) == 1


def test_a_saving_is_the_difference_and_its_share() -> None:
    one = Saving(
        technique="a", base="b", gpu="c", package="d", outcome="ok",
        base_bytes=1000, peak_bytes=750, base_seconds=2.0, seconds=2.5,
    )  # fmt: skip
    assert (one.saved_bytes, one.saved_share, one.slower_share) == (250, 0.25, 0.25)
    none = Saving(technique="a", base="b", gpu="c", package="d", outcome="out of memory in forward")
    assert (none.saved_bytes, none.saved_share, none.slower_share) == (None, None, None)


def test_savings_are_of_techniques_that_are_there() -> None:
    assert len(savings()) >= 30
    assert set(savings()) <= set(techniques())


def test_lora_saves_gradients_and_states_of_the_whole_model() -> None:
    """AdamW in bf16 keeps 6 bytes beside each frozen parameter's 2; LoRA of rank 16 adds 42 million parameters."""
    assert savings()["lora"].saved_bytes == pytest.approx(8.03e9 * 6 - 42e6 * 12, rel=0.1)


def test_a_ranking_knows_what_predict_knows() -> None:
    found = rank(gpu="RTX-4090", **CELL)
    by_name = {one.technique: one for one in found.ranked}
    ckpt = by_name["gradient_checkpointing"]
    assert ckpt.saved_bytes == found.peak_bytes - ckpt.to_bytes > 10 * 2**30
    assert ckpt.slower_share > 0.2
    assert ckpt.gib_per_percent == pytest.approx(ckpt.saved_bytes / 2**30 / (100 * ckpt.slower_share))
    assert ckpt.verdict == "fits"
    free = [one.gib_per_percent is None for one in found.ranked]
    assert free == sorted(free, reverse=True), "those that cost no time come first"
    assert "vera" in found.not_known


def test_a_ranking_has_the_peak_of_predict() -> None:
    own = predict(gpu="RTX-4090", **CELL)
    assert rank(gpu="RTX-4090", kind="activations", **CELL).peak_bytes == own.peak_allocated_bytes.value


def test_a_kind_that_is_none_is_told_which_there_are() -> None:
    with pytest.raises(UnknownName, match="Allowed: weights, training, optimizer"):
        of_kind("optimisers")
    assert {one.kind for one in of_kind("adapter")} == {"adapter"}


def test_the_command_lists_ranks_and_refuses_half_a_cell() -> None:
    run = CliRunner().invoke
    listed = run(app, ["techniques", "--kind", "adapter"])
    assert listed.exit_code == 0
    assert "LoRA" in listed.stdout
    assert "predicted" in listed.stdout
    told = json.loads(run(app, ["techniques", "--json"]).stdout)
    assert [one["id"] for one in told] == list(techniques())
    ranked = run(app, ["techniques", *OPTIONS.split(), "--gpu", "RTX-4090"])
    assert "--gradient-checkpointing" in ranked.stdout
    half = run(app, ["techniques", "--model", "llama-3.1-8b"], env={"COLUMNS": "200"})
    assert half.exit_code == 2
    assert "--method" in half.output


def test_a_technique_is_one_table() -> None:
    one = Technique(id="a", name="A", kind="optimizer", package="p", docs="https://a", base="full-8b", optim="b")
    assert arguments_of(one) == ["--optim", "b"]
    shipped = Path(__file__).parents[2] / "vramprobe" / "data" / "techniques.csv"
    with shipped.open(newline="") as file:
        assert {name for row in csv.DictReader(file) for name in row["technique"].split(" + ")} <= set(techniques())
