"""Messages of PyTorch's releases, as people reported them, and the figures in them.

``published_oom.csv``: figures (no text) that 38 public GitHub issues print, each row with its issue in ``source``;
facts, which no license covers. ``derived_non_torch_gib`` was worked out by hand from them.
"""

import csv
import io
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vramprobe.explain import messages
from vramprobe.explain.causes import explain
from vramprobe.explain.failure import in_words
from vramprobe.explain.log import WORDS
from vramprobe.explain.messages import OomMessage, form_of, forms, is_whole
from vramprobe.explain.phases import UNKNOWN
from vramprobe.explain.report import report_of
from vramprobe.units import GIB, MIB

TEXTS = tomllib.loads((Path(__file__).parent / "messages.toml").read_text(encoding="utf-8"))
OWNERS: dict[str, str] = TEXTS.pop("owners")
IN_2_9, IN_2_4, IN_1_12, ON_MPS = (TEXTS[name]["text"] for name in ("IN_2_9", "IN_2_4", "IN_1_12", "ON_MPS"))


def parse(text: str) -> OomMessage:
    form = form_of(text)
    assert form is not None
    return messages.parse(form, text)


def gib(amount: float) -> int:
    return round(amount * GIB)


def mib(amount: float) -> int:
    return round(amount * MIB)


def figure(given: Any) -> Any:
    """The value of a figure as ``messages.toml`` writes it: a number, a word, or printed amounts less each other."""
    if isinstance(given, list):
        return tuple(map(figure, given))
    if not isinstance(given, str) or not given[0].isdecimal():
        return None if given == "none" else given
    units = {"GiB": gib, "MiB": mib}
    first, *others = (units[unit](float(number)) for number, unit in map(str.split, given.split(" - ")))
    return first - sum(others)


@pytest.mark.parametrize("name", TEXTS)
def test_figures_of_each_release(name: str) -> None:
    found, figures = parse(TEXTS[name]["text"]), TEXTS[name]["figures"]
    assert {each: getattr(found, each) for each in figures} == {each: figure(given) for each, given in figures.items()}
    assert found.has_figures
    assert not found.is_cut


def test_a_cut_message_keeps_the_figures_it_has() -> None:
    found = parse(IN_2_4[: IN_2_4.index("Including")])
    assert (found.requested, found.free, found.allocated, found.is_cut) == (mib(206), mib(55.56), None, True)
    assert parse("CUDA out of memory.") == OomMessage(backend="CUDA", has_figures=False, is_cut=True)
    assert not is_whole(form_of(IN_2_4), "CUDA out of memory. Tried to allocate")


def test_private_pools_a_limit_and_an_absurd_amount() -> None:
    pools = "allocated by PyTorch, with 184.91 MiB allocated in private pools (e.g., CUDA Graphs), and"
    pooled = parse(IN_2_4.replace("allocated by PyTorch, and", pools))
    assert pooled.private_pools == mib(184.91)
    limited = parse(IN_2_4.replace("memory in use. Of", "memory in use. 40.00 GiB allowed; Of"))
    assert limited.allowed == gib(40)
    assert explain(limited, UNKNOWN).cause == "limit"
    assert parse(IN_2_4.replace("79.27 GiB memory", "17179869184.00 GiB memory")).process is None


@pytest.mark.parametrize(("line", "owner"), OWNERS.items())
def test_errors_without_figures(line: str, owner: str) -> None:
    form = form_of(line)
    assert (form.owner if form else "none") == owner
    if "268435456" in line:
        assert parse(line).requested == 268435456


@pytest.mark.parametrize("form", forms(), ids=lambda form: f"{form.program}: {form.words[0]}")
def test_each_form_is_looked_for_and_its_sentences_can_be_filled(form: messages.Form) -> None:
    for word in form.words:
        line = f"{word} {form.pattern}"  # a pattern may ask for what the word lacks
        assert any(found in line for found in WORDS), f"{word!r} is in no line that the reader looks at"
    named = {name for text in (*form.why, *form.changes) for name in re.findall(r"\{([a-z_]+)\}", text)}
    groups = {name for pattern in form.fields for name in re.findall(r"\(\?P<([a-z_]+?)(?:__\w+)?>", pattern)}
    assert named <= groups
    assert not form.why or not re.search(r"\{[a-z_]+\}", form.why[-1]) or form.program in WITH_FIGURES


#: Programs whose messages always have the figures that their sentence names.
WITH_FIGURES = {"ONNX Runtime", "DirectML", "PyTorch", "MLX", "vLLM", "TensorFlow", "Ray", "safetensors", "NumPy"}
ROWS = list(csv.DictReader((Path(__file__).parent / "published_oom.csv").read_text(encoding="utf-8").splitlines()))


def printed(gib_text: str) -> str:
    """An amount as c10's format_size prints it."""
    size = float(gib_text)
    if size == 0:
        return "0 bytes"
    return f"{size:.2f} GiB" if size >= 1 else f"{size * 1024:.2f} MiB"


def message_of(row: dict[str, str]) -> str:
    """The message that a row's figures were printed in (CUDACachingAllocator.cpp of its time)."""
    total = printed(row["total_gib"]) if row["total_gib"] else None
    allocated, free = printed(row["allocated_gib"]), printed(row["free_gib"])
    if row["message_format"] == "old":
        of = f"{total} total capacity; " if total else ""
        return (
            f"CUDA out of memory. Tried to allocate {row['tried_as_printed']} (GPU 0; {of}{allocated} already "
            f"allocated; {free} free; {printed(row['reserved_total_gib'])} reserved in total by PyTorch)"
        )
    of = f"GPU 0 has a total capacity of {total} of which {free} is free. " if total else f"of which {free} is free. "
    process = row["process_in_use_gib"]
    mine = f"Including non-PyTorch memory, this process has {printed(process)} memory in use. " if process else ""
    unused = row["reserved_unallocated_gib"]
    rest = f", and {printed(unused)} is reserved by PyTorch but unallocated." if unused else ""
    return (
        f"CUDA out of memory. Tried to allocate {row['tried_as_printed']}. {of}{mine}"
        f"Of the allocated memory {allocated} is allocated by PyTorch{rest}"
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["source"])
def test_published_figures_agree_with_what_was_derived_by_hand(row: dict[str, str]) -> None:
    found = parse(message_of(row))
    assert found.requested is not None
    assert found.allocated == pytest.approx(float(row["allocated_gib"]) * GIB, abs=0.006 * GIB)
    if row["derived_non_torch_gib"]:
        assert found.outside == pytest.approx(float(row["derived_non_torch_gib"]) * GIB, abs=0.02 * GIB)
    explanation = explain(found, UNKNOWN)
    assert explanation.changes
    for change in explanation.changes:
        assert change.num_bytes in (None, found.unused, found.neighbors)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("Lightning-AI/litgpt#459", "size"),  # 1.04 GiB of 23.26 unused: a smaller micro batch was the cure
        ("Lightning-AI/lit-llama#402", "neighbor"),  # another process holds about 10 GiB
        ("tatsu-lab/stanford_alpaca#189", "size"),  # 7 of 79 GiB outside; the thread: one A100 is too small
        ("unslothai/unsloth#1144 (a)", "size"),  # 11.89 GiB requested, 3.38 free
        ("hiyouga/LlamaFactory#1158", "size"),
    ],
)
def test_published_causes(source: str, cause: str) -> None:
    (row,) = (row for row in ROWS if row["source"] == source)
    assert explain(parse(message_of(row)), UNKNOWN).cause == cause


def test_ranks_that_share_a_gpu_by_mistake() -> None:
    others = "".join(f"Process {pid} has 10.40 GiB memory in use. " for pid in range(100, 106))
    text = IN_2_9.replace("Process 2493055 has 12.02 GiB memory in use. ", others).replace("966.00 MiB", "10.88 GiB")
    found = explain(parse(text), UNKNOWN)
    assert found.cause == "ranks on one GPU"
    assert "7 processes" in found.why


def test_contexts_of_other_ranks_are_no_neighbor() -> None:
    contexts = "".join(f"Process {pid} has {size}.00 MiB memory in use. " for pid, size in enumerate((520, 498, 506)))
    found = explain(parse(IN_2_4.replace("Including non", f"{contexts}Including non")), UNKNOWN)
    assert found.cause == "size"
    (change,) = (change for change in found.changes if "set_device" in change.text)
    assert change.num_bytes == mib(520 + 498 + 506)


def test_a_cut_message_may_name_this_process_itself() -> None:
    cut = IN_2_9[: IN_2_9.index("Including")].replace("12.02 GiB", "13.00 GiB")
    assert parse(cut).others == ()
    assert explain(parse(cut), UNKNOWN).cause == "size"


def test_a_request_that_no_gpu_could_hold_is_a_bug() -> None:
    for amount in ("1072693248.00 GiB", "17179869184.00 GiB"):
        found = explain(parse(IN_1_12.replace("1.65 GiB", amount)), UNKNOWN)
        assert found.cause == "bug"
        assert not any("batch" in change.text for change in found.changes)
    form = form_of("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.")
    assert form.cause == "bug"


def test_a_form_without_its_figures_is_a_sentence() -> None:
    for form in forms():
        said = explain(messages.parse(form, form.words[0]), UNKNOWN, form).why
        assert " " in said, form
        assert said != form.program


def test_an_absurd_request_is_a_bug_in_every_form_that_names_one() -> None:
    for form in forms():
        asked = OomMessage(backend="CUDA", program=form.program, owner=form.owner, requested=2**64 - 2**32)
        assert explain(asked, UNKNOWN, form).cause == "bug", form


def test_metal_memory_outside_pytorch_is_no_other_process() -> None:
    found = explain(parse(ON_MPS.replace("3.95 MB", "17.90 GB").replace("17.68 GB", "0.50 GB")), UNKNOWN)
    assert (found.cause, parse(ON_MPS).outside_allocator) == ("size", mib(3.95))
    assert "restart Python" in found.changes[0].text
    below = ON_MPS.replace("3.95 MB", "14.76 GB").replace("17.68 GB", "2.30 GB").replace("private", "shared")
    assert explain(parse(below), UNKNOWN).cause == "size"  # the limit is not reached, and nothing else is as large
    shared = explain(parse(ON_MPS.replace("private", "shared")), UNKNOWN)
    assert not parse(ON_MPS.replace("private", "shared")).is_cut
    assert all("PYTORCH_CUDA_ALLOC_CONF" not in change.text for change in shared.changes)


def test_memory_that_a_gpu_shares_with_the_cpu_is_no_other_process() -> None:
    """A checkpoint is read into a GB10's one memory: ending other processes would free none of it."""
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of "
        "{total} GiB of which 120.00 MiB is free. Including non-PyTorch memory, this process has 60.06 GiB memory in "
        "use. Of the allocated memory 59.60 GiB is allocated by PyTorch, and 112.00 MiB is reserved by PyTorch but "
        "unallocated."
    )
    shared, own = (explain(parse(text.format(total=total)), UNKNOWN) for total in ("119.69", "139.81"))
    assert (shared.cause, own.cause) == ("neighbor", "neighbor")
    assert "shares with the CPU" in shared.why
    lines = in_words(report_of(io.BytesIO(text.format(total="119.69").encode())))
    assert "     59.51 GiB  the host, other processes (about)" in lines
    assert "keep less on the host" in shared.changes[0].text
    assert "end the other processes" in own.changes[0].text


def test_a_neighbor_is_named_with_its_bytes() -> None:
    found = explain(parse(IN_2_9), UNKNOWN)
    assert (found.cause, found.changes[0].num_bytes) == ("neighbor", gib(12.02))


def test_size_says_what_is_missing_and_expandable_segments_are_no_cure() -> None:
    oom = OomMessage(backend="CUDA", requested=gib(3), free=gib(1), total=gib(80), allocated=gib(77), unused=gib(1))
    found = explain(oom, UNKNOWN)
    assert found.cause == "size"
    assert "1.00 GiB" in found.why
    enough = OomMessage(backend="CUDA", requested=gib(1), free=mib(1), total=gib(80), allocated=gib(67), unused=gib(12))
    assert explain(enough, UNKNOWN).cause == "fragmentation"
    assert explain(enough, UNKNOWN).changes[0].num_bytes == gib(12)
    little = replace(enough, allocated=gib(77), unused=gib(2))  # enough for this request, but for few after it
    assert (explain(little, UNKNOWN).cause, explain(little, UNKNOWN).changes[1].num_bytes) == ("size", gib(2))
    assert "97 % of the reserved memory is allocated" in explain(little, UNKNOWN).why
    expandable = explain(enough, UNKNOWN, is_expandable=True)
    assert (expandable.cause, "expandable: of another stream" in expandable.why) == ("unknown", True)
    assert not any("expandable_segments" in change.text for change in expandable.changes)


def test_in_a_container_this_process_may_have_no_bytes() -> None:
    text = (  # mistralai/mistral-finetune#69
        "CUDA out of memory. Tried to allocate 896.00 MiB. GPU 0 has a total capacity of 21.99 GiB of which 759.38 MiB "
        "is free. Including non-PyTorch memory, this process has 0 bytes memory in use. Of the allocated memory 20.52 "
        "GiB is allocated by PyTorch, and 102.08 MiB is reserved by PyTorch but unallocated."
    )
    found = parse(text)
    assert (found.process, found.neighbors) == (None, None)
    assert found.outside == pytest.approx(0.63 * GIB, abs=0.02 * GIB)
    assert explain(found, UNKNOWN).cause == "size"


def test_in_a_container_this_process_stands_among_the_others_under_another_number() -> None:
    in_a_container = (
        "CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 23.64 GiB of which 20.00 MiB is "
        "free. Process 1234 has {} GiB memory in use. Of the allocated memory 22.10 GiB is allocated by PyTorch, and "
        "1.20 GiB is reserved by PyTorch but unallocated."
    )
    alone = parse(in_a_container.format("23.61"))
    assert (alone.process, alone.others, alone.neighbors) == (round(23.61 * GIB), (), 0)
    assert explain(alone, UNKNOWN).cause == "size"
    beside_another = parse(in_a_container.format("0.30"))  # too small to hold what PyTorch has reserved here
    assert (beside_another.process, beside_another.others) == (None, (round(0.30 * GIB),))
