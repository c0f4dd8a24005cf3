"""The calculator in headless Chromium: what it shows of a cell is what the engine and predict say.

That the engine's numbers are predict's is tested in test_page_arithmetic.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from grids import exhaustive
from page_browser import asked, waiting, written
from page_example import content, engine_data
from test_page_arithmetic import gpu_fit

from vramprobe import api, catalog
from vramprobe.predict.changes import Change
from vramprobe.predict.verdict import verdict
from vramprobe.units import format_bytes


def test_a_click_through_the_calculator(opened: Any) -> None:
    one = opened()
    tab = one.tab
    assert one.fragment == ""
    tab.select_option("#model", "qwen2.5-7b")
    tab.click("label[for=method-full]")
    tab.fill("#batch_size", "2")
    tab.fill("#seq_len", "512")
    tab.check("#gradient_checkpointing")
    tab.select_option("#optim", "adamw_bnb_8bit")
    tab.click("#cards-choice summary")
    tab.check("#card-B200")
    tab.uncheck("#card-RTX-4090")
    tab.locator("#gpus-rows").scroll_into_view_if_needed()
    tab.wait_for_selector("#gpus-rows[data-judged]")
    prediction = asked(tab, "vramprobe.predict(spec, config, null, true)")
    assert one.tab.get_attribute("#copy-command", "disabled") is None
    peak = prediction["peak_allocated_bytes"]
    assert one.text("#peak") == format_bytes(peak["value"])
    assert one.text("#interval") == f"{format_bytes(peak['low'])} to {format_bytes(peak['high'])}"
    assert one.tab.locator("#terms tbody tr").count() == len(prediction["terms"]) + 1  # what the allocator holds
    assert [name.split("\n")[0] for name in tab.locator("#verdicts li").all_inner_texts()] == [
        "RTX A6000",
        "H100 SXM5 80GB",
        "H200 SXM",
        "B200 SXM",
    ]
    judged = asked(
        tab,
        "vramprobe.gpus.map(gpu => "
        "[gpu.slug, gpu.memory_bytes && vramprobe.verdict(vramprobe.predict(spec, config, null, true), gpu)])",
    )
    for slug, found in judged:
        if slug in ("H100-SXM", "B200"):
            assert one.text(f"#verdicts [data-gpu={slug}] .verdict")[2:] == found["verdict"]
        if found:
            assert one.text(f"#gpus-rows [data-gpu={slug}] .verdict")[2:] == found["verdict"]
    assert {found["verdict"] for _, found in judged if found} == {"fits", "tight", "does not fit"}
    assert "1.00 GiB set aside for the CUDA context" in one.text("#basis")
    assert one.text("#command").startswith("vramprobe measure --model qwen2.5-7b --method full")
    assert tab.locator("[data-option=quant]").is_hidden()
    assert one.fragment == "#m=qwen2.5-7b&t=full&b=2&s=512&gc=1&o=adamw_bnb_8bit&g=RTX-A6000,H100-SXM,H200,B200"


def test_what_a_fit_knows_beside_tensors_is_part_of_the_bar_and_of_the_verdict(opened: Any, tmp_path: Path) -> None:
    model = gpu_fit().model_copy(update={"constant_bytes": {"qlora": 1024**3}})
    fits = [{"gpu": "RTX-4090", "model": model.model_dump(mode="json")}]
    path = written(tmp_path, content(engine=engine_data(fits=fits)))
    one = opened("#gc=1&g=H100-SXM,RTX-4090", path=path)
    predicted = api.predict(
        replays=False,
        model="llama-3.1-8b",
        method="qlora",
        batch_size=1,
        seq_len=2048,
        gradient_checkpointing=True,
        engine="formula",
        fit=model,
        gpu="RTX-4090",
    )
    allocated, reserved, device = (
        predicted.peak_allocated_bytes.value,
        predicted.reserved_bytes.value,
        predicted.device_bytes.value,
    )
    assert one.text("#peak") == format_bytes(allocated)
    rows = one.tab.locator("#terms tbody tr").all_inner_texts()
    assert [row.split("\n")[0] for row in rows][-3:] == ["constant", "allocator", "context"]
    assert [row.replace("\n", "\t").split("\t")[-2] for row in rows][-3:] == [
        "1.00 GiB",
        format_bytes(reserved - allocated),
        format_bytes(device - reserved),
    ]
    assert one.text("#basis") == "predicted device memory"
    assert f"{format_bytes(reserved)} reserved (" in one.text("#where")
    assert f"{format_bytes(device)} device (" in one.text("#where")
    judged = one.text("#verdicts [data-gpu=RTX-4090] .reason")
    assert judged.startswith(f"{format_bytes(device)} (up to {format_bytes(predicted.device_bytes.high)}) of")
    alone = api.predict(
        replays=False,
        model="llama-3.1-8b",
        method="qlora",
        batch_size=1,
        seq_len=2048,
        gradient_checkpointing=True,
        engine="formula",
        fit="none",
        gpu="H100-SXM",
    ).peak_allocated_bytes  # the other card was not measured
    other = one.text("#verdicts [data-gpu=H100-SXM] .reason")
    assert other.startswith(
        "predicted allocated memory, 1.00 GiB set aside for the CUDA context: "
        f"{format_bytes(alone.value)} (up to {format_bytes(alone.high)}) of"
    )


def test_the_replay_follows_the_arithmetic_and_says_what_predict_says(opened: Any) -> None:
    one = opened("#g=T4,H100-SXM,MI300X")
    first = one.tab.evaluate(
        "() => { form.root.elements.seq_len.value = '1536'; form.root.dispatchEvent(new Event('input'));"
        "  return ['replay-state', 'where', 'interval', 'peak'].map((id) => document.getElementById(id).innerText); }"
    )
    cell = {"model": "llama-3.1-8b", "method": "qlora", "batch_size": 1, "seq_len": 1536}
    alone = api.predict(fit="none", **cell).peak_allocated_bytes
    assert first[0].startswith("By arithmetic alone so far")
    assert "reserved" not in first[1]
    assert first[2:] == [f"{format_bytes(alone.low)} to {format_bytes(alone.high)}", format_bytes(alone.value)]
    predicted = api.predict(**cell)
    allocated, reserved = predicted.peak_allocated_bytes, predicted.reserved_bytes
    assert one.text("#replay-state") == ""
    assert one.text("#peak") == format_bytes(allocated.value)
    assert one.text("#interval") == f"{format_bytes(allocated.low)} to {format_bytes(allocated.high)}"
    assert f"{format_bytes(reserved.value)} reserved (" in one.text("#where")
    assert [text.removeprefix("Note: ") for text in one.tab.locator("#notes .note").all_inner_texts()] == [
        *predicted.warnings
    ]
    basis = one.text("#basis")
    for gpu in ("T4", "H100-SXM", "MI300X"):
        judged = verdict(api.predict(gpu=gpu, **cell), catalog.find_gpu(gpu))
        assert one.text(f"#verdicts [data-gpu={gpu}] .verdict")[2:] == judged.verdict
        reason = one.text(f"#verdicts [data-gpu={gpu}] .reason span >> nth=0")
        assert judged.reason in (reason, f"{basis}: {reason}")
    one.tab.locator("#gpus-rows").scroll_into_view_if_needed()
    one.tab.wait_for_selector("#gpus-rows[data-judged]")
    for row, gpu in zip(one.cells("gpus-rows", 2), catalog.list_gpus(), strict=True):
        if gpu.total_bytes:
            assert row[2:] == verdict(api.predict(gpu=gpu.short_name, **cell), gpu).verdict, gpu.short_name


def test_the_replay_finds_the_largest_counts_that_predict_finds(opened: Any) -> None:
    """The arithmetic's first, until the worker has looked; another cell ends its search."""
    one = opened("#m=llama-3.1-8b&gc=1&g=L4,MI300X")
    first = one.tab.locator("#verdicts [data-gpu=L4] .largest")
    waiting(first).to_contain_text("by arithmetic so far, the replay is looking: largest batch")
    one.tab.evaluate(
        "() => { form.root.elements.num_layers.value = '3'; form.root.dispatchEvent(new Event('input')); }"
    )
    cell = {"model": "llama-3.1-8b", "method": "qlora", "gradient_checkpointing": True, "num_layers": 3}
    for gpu in ("MI300X", "L4"):
        batch = api.max_batch_size(gpu=gpu, seq_len=2048, **cell).fits.value
        length = api.max_seq_len(gpu=gpu, batch_size=1, **cell).fits.value
        place = waiting(one.tab.locator(f"#verdicts [data-gpu={gpu}] .largest"))
        place.to_have_text(f"largest batch {batch:,}, largest length {length:,}", timeout=60_000)
        assert one.cells("gpus-rows", 4)[in_list(gpu)].removesuffix(" …") == f"{batch:,}"
    rough = api.max_batch_size(gpu="L4", seq_len=2048, fit="none", **cell).fits.value
    assert rough != api.max_batch_size(gpu="L4", seq_len=2048, **cell).fits.value


@exhaustive
def test_counts_on_all_other_cards_are_looked_for_once_they_are_seen(opened: Any) -> None:
    one = opened("#m=qwen2.5-0.5b&t=lora&nl=2&g=L4")
    one.tab.wait_for_selector("#gpus-rows[data-done]")
    waiting(one.tab.locator("#verdicts .largest")).not_to_contain_text("so far", timeout=60_000)
    cell = {"model": "qwen2.5-0.5b", "method": "lora", "num_layers": 2}
    assert (
        one.cells("gpus-rows", 4)[in_list("L4")] == f"{api.max_batch_size(gpu='L4', seq_len=2048, **cell).fits.value:,}"
    )
    assert one.cells("gpus-rows", 4)[in_list("H200")].endswith(" …")
    one.tab.locator("#gpus-rows").scroll_into_view_if_needed()
    one.tab.wait_for_selector("#gpus-rows[data-counted]", timeout=120_000)
    for gpu in catalog.list_gpus():
        if gpu.total_bytes and gpu.short_name in ("H200", "T4", "MI300X"):
            batch = api.max_batch_size(gpu=gpu.short_name, seq_len=2048, **cell).fits.value
            length = api.max_seq_len(gpu=gpu.short_name, batch_size=1, **cell).fits.value
            told = [one.cells("gpus-rows", column)[in_list(gpu.short_name)] for column in (4, 5)]
            assert told == [f"{batch:,}", f"{length:,}"], gpu.short_name
    assert not any("…" in text for column in (4, 5) for text in one.cells("gpus-rows", column))


def in_list(gpu: str) -> int:
    """Its row in the table of all cards."""
    return [one.short_name for one in catalog.list_gpus()].index(gpu)


@exhaustive
def test_the_replay_needs_no_worker(opened: Any) -> None:
    one = opened("#m=qwen2.5-0.5b&g=", own=True)
    shown = one.text("#where")
    one.tab.add_init_script("delete window.Worker")
    one.tab.reload()
    one.tab.wait_for_selector("html[data-ready]")
    assert " reserved (" in shown == one.text("#where")


@exhaustive
def test_older_libraries_are_a_choice(opened: Any) -> None:
    one = opened("#m=mixtral-8x7b&gc=1&g=H100-SXM")
    cell = {
        "model": "mixtral-8x7b",
        "method": "qlora",
        "batch_size": 1,
        "seq_len": 2048,
        "gradient_checkpointing": True,
    }
    today = format_bytes(api.predict(**cell).peak_allocated_bytes.value)
    assert one.text("#peak") == today
    assert "--stack transformers-4.57" in one.text("#notes")
    one.tab.click("#more summary")
    one.tab.select_option("#stack", "transformers-4.48")
    assert one.fragment == "#m=mixtral-8x7b&gc=1&st=transformers-4.48&g=H100-SXM"
    then = api.predict(stack="transformers-4.48", **cell)
    assert one.text("#peak") == format_bytes(then.peak_allocated_bytes.value) != today
    judged = verdict(api.predict(stack="transformers-4.48", gpu="H100-SXM", **cell), catalog.find_gpu("H100-SXM"))
    assert one.text("#verdicts .verdict")[2:] == judged.verdict
    assert one.text("#command").endswith(" --gradient-checkpointing --stack transformers-4.48")
    assert one.text("#command").startswith("vramprobe predict --model mixtral-8x7b")
    assert one.text("#command-hint") == "Predicts the same: to measure it takes those libraries."
    assert "--stack" not in one.text("#which-command")
    one.tab.select_option("#model", "gemma-2-2b")
    assert "has no arithmetic for a gemma2 under transformers 4.48" in one.text("#stack-error")


def test_no_gpu_is_a_choice_too(opened: Any) -> None:
    one = opened("#g=", replays=False)
    assert one.text("#verdicts") == "No GPU is chosen."
    assert one.text("#cards-count") == "none chosen"
    one.tab.fill("#batch_size", "2")
    assert one.fragment == "#b=2&g="


@exhaustive
def test_the_largest_counts_are_taken_over_by_a_click(opened: Any) -> None:
    one = opened("#gc=1&nl=8&g=RTX-4090")
    button = one.tab.locator("[data-gpu=RTX-4090] .largest button").first
    button.wait_for()  # until it is there, nothing says "so far" either
    waiting(one.tab.locator("#verdicts .largest")).not_to_contain_text("so far", timeout=60_000)
    largest = button.inner_text()
    button.click()
    assert one.tab.input_value("#batch_size") == largest.replace(",", "")
    assert "fits" in one.text("#verdicts [data-gpu=RTX-4090] .verdict")


def test_what_is_tight_is_not_said_not_to_fit(opened: Any) -> None:
    one = opened("#m=llama-3.1-70b&nl=4&do=1&s=1532")
    assert one.text("#verdicts [data-gpu=RTX-4090] .verdict") == "≈ tight"
    waiting(one.tab.locator("[data-gpu=RTX-4090] .largest")).to_contain_text("no batch leaves room to spare, largest")


def test_every_card_gets_the_largest_counts_that_the_engine_finds_for_it(opened: Any) -> None:
    one = opened("#m=qwen2.5-7b&t=lora&g=", replays=False)
    one.tab.wait_for_selector("#gpus-rows[data-done]")
    found = asked(one.tab, "vramprobe.gpus.map(gpu => gpu.memory_bytes && vramprobe.largest(spec, config, gpu))")
    replays = asked(one.tab, "vramprobe.gpus.map(gpu => vramprobe.canReplay(spec, gpu) && gpu.memory_bytes)")
    for column, name in ((4, "batch_size"), (5, "seq_len")):
        told = [
            (f"{one_card[name]:,}" if one_card and one_card[name] else "–") + (" …" if can_replay else "")
            for one_card, can_replay in zip(found, replays, strict=True)
        ]
        assert one.cells("gpus-rows", column) == told


def test_amounts_are_written_as_python_writes_them(opened: Any) -> None:
    sizes = [0, 1, 1023, 1024, 1024**2 - 1, 1024**3, 24 * 1024**3, 13619882884]
    sizes += [eighths * 1024**3 // 8 for eighths in range(8, 200)] + [7 * 1024**2 * n // 64 for n in range(1, 300)]
    assert opened(replays=False).tab.evaluate("sizes => sizes.map(words.bytes)", sizes) == [
        format_bytes(size) for size in sizes
    ]


@exhaustive
def test_one_gpu_of_several_is_predicted_as_the_command_says(opened: Any) -> None:
    one = opened("#m=llama-3.2-1b&gc=1&n=8&sh=zero3&g=RTX-A6000")
    cell = {
        "model": "llama-3.2-1b",
        "method": "qlora",
        "batch_size": 1,
        "seq_len": 2048,
        "num_gpus": 8,
        "gradient_checkpointing": True,
        "sharding": "zero3",
    }
    predicted = api.predict(**cell)
    judged = verdict(api.predict(gpu="RTX-A6000", **cell), catalog.find_gpu("RTX-A6000"))
    allocated, reserved = predicted.peak_allocated_bytes, predicted.reserved_bytes
    assert one.text("#peak") == format_bytes(allocated.value)
    assert one.text("#where") == (
        f"allocated on each GPU at the peak, in {predicted.peak_phase} ({predicted.peak_label}); "
        f"{format_bytes(reserved.value)} reserved ({format_bytes(reserved.low)} to {format_bytes(reserved.high)})"
    )
    assert one.text("#replay-state") == ""
    assert f"{one.text('#basis')}: {one.text('#verdicts .reason span >> nth=0')}" == judged.reason
    assert "for NCCL, on each rank" in judged.reason
    assert one.text("#verdicts .verdict")[2:] == judged.verdict
    assert one.text("#command").endswith(" --gradient-checkpointing --sharding zero3 --num-gpus 8")
    assert one.text("#command").startswith("vramprobe predict --model llama-3.2-1b")
    assert "vramprobe measure takes as many GPUs, or --emulate" in one.text("#command-hint")
    names = [row.split("\n")[0] for row in one.tab.locator("#terms tbody tr").all_inner_texts()]
    assert names == [*(name.replace("_", " ") for name in predicted.terms), "allocator"]
    assert one.tab.locator("#notes .note").all_inner_texts() == [f"Note: {note}" for note in predicted.warnings]


def test_what_would_make_a_cell_fit_is_told_with_what_it_saves_and_taken_over_by_a_click(opened: Any) -> None:
    one = opened("#m=llama-3.1-70b&g=RTX-A6000,H200")
    one.tab.wait_for_selector("#changes[data-done]")
    rows = [row.replace("\t", "\n").split("\n") for row in one.tab.locator("#changes li").all_inner_texts()]
    cell = {"model": "llama-3.1-70b", "method": "qlora", "batch_size": 1, "seq_len": 2048}
    peak = api.predict(fit="none", **cell).peak_allocated_bytes.value
    for label, change in (
        ("Gradient checkpointing", {"gradient_checkpointing": True}),
        ("Length, tokens: 1,024", {"seq_len": 1024}),
        ("k-bit preparation: none", {"kbit_prep": "none"}),
        ("Optimizer: adamw_bnb_8bit", {"optim": "adamw_bnb_8bit"}),
        ("GPUs: 8", {"num_gpus": 8, "sharding": "fsdp"}),
    ):
        less = api.predict(fit="none", replays=False, **(cell | change)).peak_allocated_bytes.value
        assert [label, f"{format_bytes(less)}, {format_bytes(peak - less)} less", "✕ does not fit"] in rows
    assert rows[0][0].startswith("Gradient checkpointing; ")
    assert rows[0][-1] == "✓ fits"
    first = one.tab.locator("#changes button").first
    first.focus()
    one.tab.keyboard.press("Enter")
    assert one.text("#verdicts [data-gpu=RTX-A6000] .verdict") == "✓ fits"
    assert one.tab.evaluate("document.activeElement.id") == "gradient_checkpointing"
    card = "vramprobe.gpus.find(gpu => gpu.slug === 'RTX-A6000')"
    alone = asked(one.tab, f"vramprobe.predict(spec, config, {card}).peak_allocated_bytes.value")
    assert rows[0][1].startswith(f"{format_bytes(alone)}, ")


@pytest.mark.parametrize(
    ("link", "cell", "gpu"),
    [
        pytest.param("#m=llama-3.1-70b", {"model": "llama-3.1-70b", "method": "qlora", "batch_size": 1,
                                          "seq_len": 2048}, "RTX-A6000", marks=exhaustive),
        ("#m=llama-3.2-1b&t=lora&b=2&do=1&ld=0.1",
         {"model": "llama-3.2-1b", "method": "lora", "batch_size": 2, "seq_len": 2048, "dora": True,
          "lora_dropout": 0.1}, "T4"),
        ("#m=llama-3.1-8b&t=full&b=3&s=4096&n=2&sh=zero2",
         {"model": "llama-3.1-8b", "method": "full", "batch_size": 3, "seq_len": 4096, "num_gpus": 2,
          "sharding": "zero2"}, "H100-SXM"),
        pytest.param("#m=qwen2.5-0.5b&b=4", {"model": "qwen2.5-0.5b", "method": "qlora", "batch_size": 4,
                                             "seq_len": 2048}, "H200", marks=exhaustive),
    ],
)  # fmt: skip
def test_the_page_and_the_command_name_the_same_changes(opened: Any, link: str, cell: dict[str, Any], gpu: str) -> None:
    one = opened(f"{link}&g={gpu}", replays=False)
    one.tab.wait_for_selector("#changes[data-done]")
    rows = [row.replace("\t", "\n").split("\n") for row in one.tab.locator("#changes li").all_inner_texts()]
    found = api.changes(gpu=gpu, replays=False, **cell)
    assert [row[1:] for row in rows] == [
        [f"{format_bytes(change.to_bytes)}, {format_bytes(change.saved_bytes)} less", shown_verdict(change)]
        for change in found
    ]
    for row, change in zip(rows, found, strict=True):
        values = [] if "num_gpus" not in cell and "num_gpus" in change.options else ["sharding"]
        told = {name: value for name, value in change.options.items() if name in values or name != "sharding"}
        assert row[0].count("; ") == len(told) - 1
        for value in told.values():
            assert value is True or (f"{value:,}" if isinstance(value, int) and value else str(value or "")) in row[0]


def shown_verdict(change: Change) -> str:
    return {"fits": "✓ fits", "tight": "≈ tight", "does not fit": "✕ does not fit"}[change.verdict]


def test_a_card_without_flash_attention_is_judged_by_its_own_kernels(opened: Any) -> None:
    one = opened("#m=llama-3.2-1b&s=4096&fl=1&g=T4,RTX-A6000")
    cell = {"model": "llama-3.2-1b", "method": "qlora", "batch_size": 1, "seq_len": 4096}
    for gpu in ("T4", "RTX-A6000"):
        predicted = api.predict(gpu=gpu, fused_linear_cross_entropy=True, **cell)
        judged = verdict(predicted, catalog.find_gpu(gpu))
        assert one.text(f"#verdicts [data-gpu={gpu}] .verdict")[2:] == judged.verdict
        assert format_bytes(judged.needed_bytes.value) in one.text(f"#verdicts [data-gpu={gpu}] .reason")
    one.tab.wait_for_selector("#gpus-rows[data-done]")
    largest = api.max_batch_size(
        gpu="T4",
        seq_len=1024,
        fit="none",
        fused_linear_cross_entropy=True,
        **{name: cell[name] for name in ("model", "method")},
    ).fits.value
    one.tab.fill("#seq_len", "1024")
    one.tab.wait_for_selector("#gpus-rows[data-done]")
    shown = asked(one.tab, "vramprobe.largest(spec, config, vramprobe.gpus.find(gpu => gpu.slug === 'T4'))")
    assert shown["batch_size"] == largest
    judge = "vramprobe.verdict(vramprobe.predict(spec, config), vramprobe.gpus.find(gpu => gpu.slug === 'T4'))"
    refused = asked(opened("#m=llama-3.2-1b&a=flash_attention_2").tab, judge)
    assert (refused["verdict"], "Ampere" in refused["reason"]) == ("does not fit", True)


@exhaustive
def test_the_changes_are_those_for_the_card_that_is_asked_for(opened: Any) -> None:
    one = opened("#gc=1", replays=False)
    one.tab.wait_for_selector("#changes[data-done]")
    assert one.text("#changes-basis") == "By arithmetic alone. It fits as it is."
    one.tab.fill("#seq_len", "65536")
    one.tab.wait_for_selector("#changes[data-done]")
    assert one.tab.input_value("#changes-card") == "RTX-4090"  # the smallest that it does not fit
    assert one.text("#changes-basis").endswith("None of them is enough.")
    one.tab.select_option("#changes-card", "H200")
    one.tab.wait_for_selector("#changes[data-done]")
    verdicts = {row.split()[-1] for row in one.tab.locator("#changes li").all_inner_texts()}
    assert verdicts == {"fits", "tight"}, "what saves least stays tight"
    one.tab.fill("#seq_len", "32768")
    assert one.tab.input_value("#changes-card") == "H200"  # as it was asked for
    one.tab.fill("#batch_size", "0")
    assert one.tab.locator("#changes li").count() == 0
    assert one.tab.locator("#changes-on").is_hidden()
