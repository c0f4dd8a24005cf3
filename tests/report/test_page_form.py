"""The form and its links in headless Chromium: what is chosen has a link, and a refusal stands where it is mended."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from grids import exhaustive
from page_browser import asked, waiting

from vramprobe import api, catalog, spec
from vramprobe.choices import Sharding
from vramprobe.errors import SpecError
from vramprobe.units import format_bytes


def test_a_shared_link_opens_the_same_configuration(opened: Any) -> None:
    first = opened()
    first.tab.select_option("#model", "gpt2")
    first.tab.fill("#seq_len", "512")
    first.tab.fill("#lora_targets", "c_attn,c_proj")
    first.tab.select_option("#quant", "int8")
    first.tab.click("#more summary")
    first.tab.fill("#lora_dropout", "0.05")
    second = opened(first.fragment)
    for selector in ("#peak", "#interval", "#command", "#verdicts .card >> nth=0"):
        assert second.text(selector) == first.text(selector)
    assert second.tab.input_value("#lora_targets") == "c_attn,c_proj"
    assert second.tab.input_value("#lora_dropout") == "0.05"
    assert second.tab.locator("#more").get_attribute("open") is not None
    second.tab.evaluate("location.hash = '#m=gpt2&b=7'")  # of this length, gpt2 has no positions
    waiting(second.tab.locator("#seq_len-error")).to_contain_text("1024 learned positions")
    waiting(second.tab.locator("#batch_size")).to_have_value("7")
    second.tab.click("nav a[href='#gpus']")  # a place in the page takes nothing from the state
    assert second.fragment == "#m=gpt2&b=7"
    assert second.tab.evaluate("document.activeElement.id") == "gpus"
    second.tab.click("#reset")
    assert second.fragment == ""


BAD_LINKS = [
    ("#m=no-such-model&b=2", 'the model "no-such-model" of the link is not in this page'),
    ("#g=RTX-4090,RTX-1", "not in this page's catalog: RTX-1"),
    ("#zz=1", 'unknown part "zz=1"'),
    ("#m=config.json&c=%25%25", 'the part "c" of the link is damaged'),
    ("#m=%E0%A4%A", 'the part "m" of the link is damaged'),
    ("#t=loar", 'the part "t" of the link is damaged'),
    ("#ga=x", 'the part "ga" of the link is damaged'),
    ("#gc=yes", 'the part "gc" of the link is damaged'),
]


def test_a_bad_link_says_what_of_it_is_not_understood(opened: Any) -> None:
    """The first as the page opens, the others as they are pasted into its tab."""
    one = opened(BAD_LINKS[0][0], replays=False)
    for fragment, words in BAD_LINKS:
        one.tab.evaluate("fragment => { location.hash = fragment; }", fragment)
        waiting(one.tab.locator("#link-problems")).to_contain_text(words)
        if "config.json" not in fragment:
            assert one.tab.inner_text("#peak").endswith("iB"), fragment


def test_an_error_stands_at_its_option_and_no_number_is_left(opened: Any) -> None:
    one = opened("#d=fp16&kp=peft", replays=False)
    assert "mix two 16-bit formats" in one.text("#dtype-error")
    assert one.tab.get_attribute("#dtype", "aria-invalid") == "true"
    assert one.tab.get_attribute("#dtype", "aria-describedby") == "dtype-error"
    assert one.text("#peak") == "No prediction"
    assert one.tab.locator("#verdicts li").count() == 0
    one.tab.select_option("#autocast", "fp16")
    assert one.tab.locator("#dtype-error").is_hidden()
    assert one.tab.get_attribute("#dtype", "aria-invalid") is None
    assert one.text("#peak").endswith("GiB")
    one.tab.fill("#batch_size", "")
    assert one.text("#batch_size-error") == "batch_size: nothing given; must be a whole number of 1 or more"


REFUSALS = [
    ("#b=0", "batch_size", "batch_size: 0 given"),
    ("#s=1.5", "seq_len", "seq_len: 1.5 given"),
    ("#b=1e300", "batch_size", "more than 10^300 bytes"),
    ("#m=gpt2", "seq_len", "longer than the 1024 learned positions of gpt2"),
    ("#o=adam", "optim", "optim: adam given; allowed: adamw_torch, "),
    ("#q=none", "quant", "method qlora trains adapters on a quantized base"),
    ("#r=0", "lora_r", "lora_r: 0 given"),
    ("#ld=2", "lora_dropout", "lora_dropout must be in [0, 1), 2 given"),
    ("#lt=q proj", "lora_targets", "or module names such as"),
    ("#lt=c_attn", "lora_targets", "lora_targets c_attn: no such linear layer; this model has down_proj"),
    ("#nl=99", "num_layers", "num_layers 99 is not possible: this model has 32 layers, so 1 to 32"),
    ("#nl=1.5", "num_layers", "num_layers: 1.5 given"),
    ("#kp=trl&ac=none", "autocast", "set autocast bf16"),
    ("#kp=trl&ldt=fp16", "lora_dtype", "lora_dtype fp16 was given"),
    ("#t=full&d=fp16&ac=fp16", "autocast", "GradScaler refuses"),
    ("#m=gpt-oss-20b&a=sdpa", "attn", "transformers has no sdpa attention"),
    ("#m=deepseek-v3", "model", "cannot be predicted by this version"),
]


def test_every_refusal_stands_at_the_option_that_mends_it(opened: Any) -> None:
    """The first as the page opens, the others as they are pasted into its tab."""
    one = opened(REFUSALS[0][0], replays=False)
    for fragment, option, words in REFUSALS:
        one.tab.evaluate("fragment => { location.hash = fragment; }", fragment)
        waiting(one.tab.locator(f"#{option}-error")).to_contain_text(words)
        shown = one.tab.locator(".error:not([hidden])")
        assert shown.count() == 1, fragment
        assert shown.get_attribute("id") == f"{option}-error"
        assert shown.is_visible()
        assert one.tab.locator("#form-problems").is_hidden()
        assert one.tab.inner_text("#peak") == "No prediction"
        assert one.text("#command") == ""


def test_what_the_engine_refuses_is_told_in_its_words(opened: Any) -> None:
    one = opened("#m=deepseek-v3", replays=False)
    assert one.text("#no-prediction").startswith("model type 'deepseek_v3' cannot be predicted by this version")
    assert set(one.cells("gpus-rows", 2)) == {"–", "memory not known"}


def test_a_pasted_config_is_predicted_and_travels_in_the_link_while_it_is_small(opened: Any) -> None:
    one = opened("#g=", replays=False)
    tab = one.tab
    tab.select_option("#model", "config.json")
    assert "Paste the model's config.json" in one.text("#config-error")
    tab.fill("#config", '{"model_type": "llama", ')
    assert "not valid JSON" in one.text("#config-error")
    tab.fill("#config", "[1]")
    assert "no config.json" in one.text("#config-error")
    tab.fill("#config", '{"hidden_size": 4096}')
    assert "must name its model_type" in one.text("#config-error")
    config = catalog.find_model("llama-3.1-8b").config | {"name": "π 𝜋", "num_hidden_layers": 2}
    tab.fill("#config", json.dumps({key: value for key, value in config.items() if key != "intermediate_size"}))
    assert "intermediate_size" in one.text("#config-error")
    assert one.text("#peak") == "No prediction"
    tab.fill("#config", json.dumps(config, indent=2, ensure_ascii=False))
    assert one.tab.locator("#config-error").is_hidden()
    assert one.text("#peak") == opened("#nl=2&g=", replays=False).text("#peak")
    assert one.text("#command").startswith("vramprobe measure --model config.json --method qlora")
    assert one.text("#command-hint").endswith(" Save the pasted config as config.json first.")
    other = opened(one.fragment, replays=False)
    assert json.loads(other.tab.input_value("#config")) == config
    assert other.text("#peak") == one.text("#peak")
    tab.fill("#config", json.dumps(config | {"more": "x" * 5000}))
    assert "too large for a link" in one.text("#link-hint")
    assert "c=" not in one.fragment
    assert one.text("#peak") == other.text("#peak")


def test_the_form_opens_with_the_defaults_of_the_command_line(opened: Any) -> None:
    one = opened(replays=False)
    shown = asked(one.tab, "Object.fromEntries(Object.entries(spec).filter(([name]) => name !== 'rc'))")
    wanted = spec.resolve(model="llama-3.1-8b", method="qlora", device="cuda", batch_size=1, seq_len=2048)
    del shown["architecture"]
    assert (shown.pop("num_gpus"), shown.pop("sharding"), shown.pop("stack")) == (1, None, None)
    assert shown == wanted.model_dump(mode="json", exclude={"architecture", "num_gpus", "sharding"})
    assert one.text("#command") == "vramprobe measure --model llama-3.1-8b --method qlora --batch-size 1 --seq-len 2048"


def test_each_flag_of_the_table_is_a_checkbox_a_part_of_the_link_and_an_option_of_the_cell(opened: Any) -> None:
    one = opened("#m=qwen2.5-0.5b&nl=1&g=", replays=False)
    before = one.fragment
    flags = one.tab.evaluate("state.NAMES.filter(name => state.isA(name, 'flag')).map(n => [n, state.OPTIONS[n].key])")
    assert len(flags) >= 2
    for name, key in flags:
        assert spec.CellSpec.model_fields[name].annotation is bool
        assert one.tab.get_by_label(one.text(f"label[for={name}]"), exact=True).get_attribute("id") == name
        one.tab.check(f"#{name}")
        assert sorted(one.fragment[1:].split("&")) == sorted([*before[1:].split("&"), f"{key}=1"])
        assert asked(one.tab, f"spec.{name}") is True
        assert f"--{name.replace('_', '-')}" in one.text("#command").split()
        one.tab.uncheck(f"#{name}")
        assert one.fragment == before
    other = opened("&".join([before, *(f"{key}=1" for _, key in flags)]), replays=False)
    assert all(other.tab.is_checked(f"#{name}") for name, _ in flags)


def test_sharding_is_asked_for_where_there_is_more_than_one_gpu(opened: Any) -> None:
    one = opened("#n=2&sh=zero3", replays=False)
    one.tab.fill("#num_gpus", "1")
    assert one.tab.locator("#sharding").is_hidden()
    assert one.fragment == "#n=1"
    one.tab.fill("#num_gpus", "8")
    assert one.fragment == "#n=8&sh=zero3"
    assert one.tab.input_value("#sharding") == "zero3"
    assert one.text("label[for=batch_size]") == "Batch per GPU"
    assert one.tab.locator("#sharding option").all_inner_texts() == ["default", *get_args(Sharding)]
    one.tab.select_option("#sharding", "")
    assert one.tab.locator("#sharding option").first.inner_text() == "fsdp (default)"
    one.tab.select_option("#quant", "int8")
    assert "quant int8 under fsdp" in one.text("#quant-error")
    one.tab.fill("#num_gpus", "0")
    assert one.text("#num_gpus-error") == "num_gpus: 0 given; must be a whole number of 1 or more"
    one.tab.fill("#num_gpus", "")
    assert one.tab.locator("#sharding").is_hidden()
    assert one.text("label[for=batch_size]") == "Batch"


@exhaustive
def test_groups_shared_sequences_and_the_host_are_asked_for_where_there_are_several_gpus(opened: Any) -> None:
    one = opened("#t=full&m=llama-3.2-1b&gc=1", replays=False)
    hidden = [one.tab.locator(f"#{name}") for name in ("shard_size", "cp_size", "offload", "cp_rotation")]
    assert all(field.is_hidden() for field in hidden)
    one.tab.fill("#num_gpus", "16")
    assert [field.is_hidden() for field in hidden] == [True, False, False, True]
    one.tab.select_option("#sharding", "fsdp-hybrid")
    assert [field.is_hidden() for field in hidden] == [False, False, False, True]
    one.tab.fill("#shard_size", "4")
    one.tab.select_option("#offload", "params")
    assert one.fragment == "#m=llama-3.2-1b&t=full&gc=1&n=16&sh=fsdp-hybrid&ss=4&of=params"
    words = {
        "model": "llama-3.2-1b",
        "method": "full",
        "batch_size": 1,
        "seq_len": 2048,
        "num_gpus": 16,
        "gradient_checkpointing": True,
        "sharding": "fsdp-hybrid",
        "shard_size": 4,
    }
    predicted = api.predict(fit="none", offload="params", **words)
    assert one.text("#peak") == format_bytes(predicted.peak_allocated_bytes.value)
    assert one.tab.locator("#notes .note").all_inner_texts() == [f"Note: {note}" for note in predicted.warnings]
    assert any(note.startswith("on the host: ") for note in predicted.warnings)
    assert one.text("#command").endswith(" --shard-size 4 --offload params --sharding fsdp-hybrid --num-gpus 16")
    one.tab.select_option("#offload", "optimizer")
    with pytest.raises(SpecError) as refusal:
        api.predict(fit="none", offload="optimizer", **words)
    assert one.text("#offload-error") == str(refusal.value) == one.text("#no-prediction")
    one.tab.select_option("#offload", "")
    one.tab.fill("#cp_size", "2")
    assert one.text("#peak") == format_bytes(api.predict(fit="none", cp_size=2, **words).peak_allocated_bytes.value)
    waiting(one.tab.locator("#verdicts .largest").first).to_contain_text("where GPUs share each sequence")
    one.tab.select_option("#cp_rotation", "alltoall")
    by_turns = api.predict(fit="none", cp_size=2, cp_rotation="alltoall", **words)
    assert one.text("#peak") == format_bytes(by_turns.peak_allocated_bytes.value)
    assert one.text("#command").endswith(
        " --shard-size 4 --cp-size 2 --cp-rotation alltoall --sharding fsdp-hybrid --num-gpus 16"
    )
    assert one.fragment.endswith("&cp=2&cr=alltoall")
    one.tab.select_option("#cp_rotation", "")
    one.tab.select_option("#sharding", "zero3")
    assert one.fragment == "#m=llama-3.2-1b&t=full&gc=1&n=16&sh=zero3&cp=2"
    assert one.text("#cp_size-error").startswith("cp_size 2 under zero3")


@exhaustive
def test_layers_on_several_cards_are_told_card_by_card(opened: Any) -> None:
    one = opened("#gc=1&n=2&g=RTX-4090")
    assert one.text("label[for=batch_size]") == "Batch per GPU"
    one.tab.select_option("#sharding", "device-map")
    assert one.text("label[for=batch_size]") == "Batch"
    predicted = api.predict(
        model="llama-3.1-8b",
        method="qlora",
        batch_size=1,
        seq_len=2048,
        gradient_checkpointing=True,
        num_gpus=2,
        sharding="device-map",
        gpu="RTX-4090",
    )
    assert one.text("#peak") == format_bytes(predicted.peak_allocated_bytes.value)
    assert one.text("#where").startswith("allocated on the fullest GPU at the peak, in backward")
    assert one.tab.locator("#notes .note").all_inner_texts() == [f"Note: {note}" for note in predicted.warnings]
    assert sum(note.startswith("card ") for note in predicted.warnings) == 2
    assert "NCCL" not in one.text("#basis")
    assert one.text("#command").endswith(" --gradient-checkpointing --sharding device-map --num-gpus 2")
    assert one.fragment == "#gc=1&n=2&sh=device-map&g=RTX-4090"


def test_divided_layers_have_one_batch_on_all_ranks(opened: Any) -> None:
    one = opened("#t=full&gc=1&n=8&g=RTX-4090")
    one.tab.select_option("#sharding", "tp")
    assert one.text("label[for=batch_size]") == "Batch"
    words = {
        "model": "llama-3.1-8b",
        "batch_size": 1,
        "seq_len": 2048,
        "gradient_checkpointing": True,
        "num_gpus": 8,
        "sharding": "tp",
        "gpu": "RTX-4090",
    }
    predicted = api.predict(method="full", **words)
    assert one.text("#peak") == format_bytes(predicted.peak_allocated_bytes.value)
    assert one.text("#where").startswith("allocated on each GPU at the peak, in ")
    assert one.tab.locator("#notes .note").all_inner_texts() == [f"Note: {note}" for note in predicted.warnings]
    assert "for NCCL, on each rank" in one.text("#basis")
    assert one.text("#command").endswith(" --gradient-checkpointing --sharding tp --num-gpus 8")
    assert one.fragment == "#t=full&gc=1&n=8&sh=tp&g=RTX-4090"
    one.tab.click("label[for=method-qlora]")
    with pytest.raises(SpecError) as refusal:
        api.predict(method="qlora", **words)
    assert one.text("#quant-error") == str(refusal.value) == one.text("#no-prediction")
