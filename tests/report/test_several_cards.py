"""The pages of several emulated cards: what ran stands as that, what is predicted has a mark, nothing says measured."""

import csv
import io
import lzma
import re
from pathlib import Path
from typing import Any

import pytest
from factories import TRUE, make_environment, specs, synthetic, unpadded

from vramprobe import api, catalog
from vramprobe.errors import IncomparableRecords, VramprobeError
from vramprobe.predict import at_hand
from vramprobe.records import store
from vramprobe.records.outcomes import Oom
from vramprobe.records.record import Emulation, RunRecord
from vramprobe.report import card_fits, card_largest, cards
from vramprobe.report.card_fits import standard_cell
from vramprobe.report.definition import EMULATED
from vramprobe.report.publish import build

NAMES = {"H100-SXM": "NVIDIA H100 80GB HBM3", "RTX-4090": "NVIDIA GeForce RTX 4090", "T4": "Tesla T4"}
MODELS = ("smollm2-135m", "llama-3.1-8b")


def emulated(spec: Any, card: str, **more: Any) -> RunRecord:
    machine = make_environment(device_name=NAMES[card], emulator="abc", num_threads=None)
    made = synthetic(spec, TRUE, instrument="emulated", environment=machine)
    peak = made.peak.model_copy(update={"reserved_bytes": made.peak.allocated_bytes + 2**20})
    emulation = Emulation(
        card=card,
        num_cards=1,
        emulator_version="abc",
        torch_build="2.13.0+cu130",
        contents="zeros",
        routing="even",
        context_bytes=1,
    )
    own = {"attempt_id": f"{card}-{made.fingerprint}", "emulation": emulation}
    return made.model_copy(update=own | {"peak": None if more else peak} | more)


def records() -> list[RunRecord]:
    """The standard cell of a small model on two cards, one out of memory of a larger, and other cells."""
    oom = Oom(phase="backward", step=1, requested_bytes=1, allocated_bytes=2, message="out of memory")
    found = [emulated(spec, "H100-SXM") for spec in specs(("smollm2-135m", "smollm2-360m"))]
    found += [emulated(spec, "RTX-4090") for spec in specs(("smollm2-135m",))]
    for card in ("H100-SXM", "RTX-4090"):
        found.append(emulated(standard_cell("smollm2-135m", "lora", catalog.find_gpu(card)), card))
    large = standard_cell("llama-3.1-8b", "full", catalog.find_gpu("RTX-4090"))
    return [*found, emulated(large, "RTX-4090", outcome=oom)]


def packed(folder: Path, some: list[RunRecord]) -> Path:
    """As the campaign's records are kept."""
    path = folder / "records.jsonl.xz"
    path.write_bytes(lzma.compress("".join(f"{record.to_json_line()}\n" for record in some).encode()))
    return path


def rows_of(files: dict[str, bytes], name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(files[name].decode())))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder, some = tmp_path_factory.mktemp("cards"), records()
    few = [entry for entry in catalog.list_models() if entry.name in (*MODELS, "gpt2-xl")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card_fits.catalog, "list_models", lambda: few)
        patch.setattr(card_largest, "MODELS", MODELS)
        patch.setattr(at_hand, "kept_recipe", lambda *given: pytest.fail("a page follows what a machine recorded"))
        return build(packed(folder, some), folder / "out")


def test_three_pages_in_four_formats_say_what_they_are_first(files: dict[str, bytes]) -> None:
    assert set(files) == {
        f"{page}.{kind}" for page in ("memory", "fits", "largest") for kind in ("md", "csv", "tex", "html")
    } | {"index.html"}
    for page in ("memory", "fits", "largest"):
        whole = files[f"{page}.md"].decode()
        assert (EMULATED in " ".join(whole.split())) == (page != "largest")
        text = whole.replace("Predicted, neither measured nor emulated", "")
        assert (text != whole) == (page == "largest")
        assert not re.search(r"\bmeasured\b|\bmeasurement", text, re.IGNORECASE)
        assert "vramprobe report" in text


def test_the_page_has_the_tables_beside_a_calculator(files: dict[str, bytes]) -> None:
    page = files["index.html"].decode()
    titles = [re.search(r"^# (.+)", files[f"{name}.md"].decode())[1] for name in ("memory", "fits", "largest")]
    assert all(title in page for title in titles)
    assert 'id="calculator"' in page
    assert EMULATED in " ".join(page.split())


def test_memory_has_each_attempt_of_each_card(files: dict[str, bytes]) -> None:
    rows, some = rows_of(files, "memory.csv"), records()
    assert len(rows) == len({(one.environment.device_name, one.fingerprint) for one in some})
    assert {row["instrument"] for row in rows} == {"emulated"}
    exact = {(row["card"], row["fingerprint"]): row["allocated_bytes"] for row in rows}
    for record in some:
        card = record.emulation.card
        assert exact[card, record.fingerprint] == (str(record.peak.allocated_bytes) if record.peak else "")
    text = files["memory.md"].decode()
    assert re.search(r"\| llama-3\.1-8b .*\| out of memory \| +– \|", text)


def test_what_was_run_goes_before_what_is_predicted(files: dict[str, bytes]) -> None:
    found = {(row["model"], row["method"], row["card"]): row for row in rows_of(files, "fits.csv")}
    assert {model for model, _, _ in found} == set(MODELS)
    assert "No row, as no recipe ships: gpt2-xl." in files["fits.md"].decode()
    ran = {key for key, row in found.items() if row["basis"] == "emulated"}
    assert ran == {
        ("smollm2-135m", "lora", "H100-SXM"),
        ("smollm2-135m", "lora", "RTX-4090"),
        ("llama-3.1-8b", "full", "RTX-4090"),
    }
    assert found["smollm2-135m", "lora", "RTX-4090"]["verdict"] == "fits"
    assert found["llama-3.1-8b", "full", "RTX-4090"]["verdict"] == "no"
    predicted = found["smollm2-135m", "full", "RTX-4090"]
    assert (predicted["verdict"], predicted["basis"]) == ("fits", "predicted")
    text = unpadded(files["fits.md"].decode())
    assert re.search(r"\| smollm2-135m \|[^\n]*\| fits \| fits \|", text)
    assert "≈ fits" in text


def test_the_largest_batch_fits_and_one_more_does_not(files: dict[str, bytes]) -> None:
    from vramprobe.predict.expected import predict_at_hand
    from vramprobe.predict.verdict import verdict

    gpu, keys = catalog.find_gpu("RTX-4090"), ("model", "method", "card", "question")
    found = {tuple(row[key] for key in keys): row["largest"] for row in rows_of(files, "largest.csv")}
    count = int(found["llama-3.1-8b", "qlora", "RTX-4090", "batch_size"])
    said = [
        verdict(predict_at_hand(standard_cell("llama-3.1-8b", "qlora", gpu, batch_size=size), gpu), gpu).verdict
        for size in (count, count + 1)
    ]
    assert said[0] == "fits" != said[1]
    none = [row for row in rows_of(files, "largest.csv") if row["largest"] == "0"]
    assert {(row["model"], row["method"]) for row in none} == {("llama-3.1-8b", "full"), ("llama-3.1-8b", "lora")}


def test_a_card_without_bf16_gets_a_recipe_of_its_own() -> None:
    t4, h100 = catalog.find_gpu("T4"), catalog.find_gpu("H100-SXM")
    cells = [standard_cell("smollm2-135m", method, t4) for method in ("full", "lora", "qlora")]
    assert [(one.dtype, one.autocast) for one in cells] == [("fp32", "fp16"), ("fp16", "fp16"), ("fp16", "fp16")]
    assert standard_cell("smollm2-135m", "lora", h100).dtype == "bf16"
    said = card_fits.conditions("lora", [t4, h100])
    assert "On T4: r 16" in said
    assert said.startswith("On H100-SXM: ")


def test_one_card_keeps_the_page_of_one_card(tmp_path: Path) -> None:
    one = [record for record in records() if record.emulation.card == "H100-SXM"]
    assert not cards.are_of_several_cards(one)
    mixed = [*records(), one[0].model_copy(update={"instrument": "cuda", "attempt_id": "x", "emulation": None})]
    with pytest.raises(IncomparableRecords):
        api.report(packed(tmp_path, mixed), tmp_path / "out")


def test_a_packed_file_is_read_by_name_and_a_broken_one_says_so(tmp_path: Path) -> None:
    path = packed(tmp_path, records())
    assert len(store.read(path).records) == len(records())
    assert len(store.read(tmp_path).records) == len(records())
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(VramprobeError, match=r"cannot read .*restore the file from a copy"):
        store.read(path)
