"""Output made of emulated records says emulated, never that it was measured: pages, plots, tables, claims, fits."""

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from factories import TRUE, make_environment, make_record, make_spec, specs, synthetic

from vramprobe import api
from vramprobe.check import check
from vramprobe.cli import display
from vramprobe.errors import IncomparableRecords
from vramprobe.literature.figures import Cells
from vramprobe.records import store, writing
from vramprobe.records.phase_memory import Composition
from vramprobe.records.record import Emulation, RunRecord, Timing
from vramprobe.records.table import require_comparable
from vramprobe.report.cells import cells_of
from vramprobe.report.definition import EMULATED, worded
from vramprobe.report.plots import drawn as pictures
from vramprobe.report.publish import build
from vramprobe.report.speed import speed
from vramprobe.resolve import resolve
from vramprobe.units import word_for

CARD = "NVIDIA H100 80GB HBM3"
EMULATION = Emulation(
    card="H100-SXM",
    num_cards=1,
    emulator_version="abc",
    torch_build="2.13.0+cu130",
    contents="zeros",
    routing="even",
    context_bytes=1,
)
#: Names of files and of plots, and keys of programs, are the same for every instrument.
_KEYS = re.compile(
    r"(predicted_vs_measured|tab:measured|\bmeasured\.(md|csv|tex|html)|measured_(bytes|phase)|is_measured)"
)
_CLAIM = re.compile(r"\bmeasured\b|\bmeasurement", re.IGNORECASE)


def emulated(spec: Any, ratio: float = TRUE, **more: Any) -> RunRecord:
    machine = make_environment(device_name=CARD, emulator="abc", num_threads=None)
    made = synthetic(spec, ratio, instrument="emulated", environment=machine, **more)
    size = made.peak.allocated_bytes
    none = dict.fromkeys(Composition.model_fields, 0)
    alive = Composition(**(none | {"total_bytes": size, "weights_bytes": size // 2, "batch_bytes": size - size // 2}))
    ledger = made.ledger.model_copy(update={"at_peak": alive})
    return made.model_copy(update={"emulation": EMULATION, "ledger": ledger})


def records() -> list[RunRecord]:
    return [emulated(spec) for spec in specs(("smollm2-135m", "smollm2-360m"))]


def saved(folder: Path, some: list[RunRecord]) -> Path:
    for number, record in enumerate(some):
        writing.append(folder / "records.jsonl", record.model_copy(update={"attempt_id": f"attempt-{number}"}))
    return folder


@pytest.fixture(scope="module")
def drawn() -> Iterator[list[str]]:
    """The texts of every picture that is drawn."""
    from matplotlib.text import Text

    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pictures, "stamp_of", lambda figure: seen.extend(one.get_text() for one in figure.findobj(Text)) or "stamp"
        )
        yield seen


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, drawn: list[str]) -> dict[str, bytes]:
    """A whole report of emulated records."""
    folder, some = tmp_path_factory.mktemp("emulated"), records()
    with pytest.MonkeyPatch.context() as patch:
        from vramprobe.literature import claims

        patch.setattr(claims, "judge_claims", lambda records: [])
        return build(saved(folder, some), folder / "out")


def said(name: str, content: bytes) -> str:
    """The words of a file for people."""
    text = content.decode()
    if name.endswith(".html"):
        text = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
        text = html.unescape(re.sub(r"<[^>]*>", " ", text))
    return text


def test_no_picture_says_measured(built: dict[str, bytes], drawn: list[str]) -> None:
    assert {name for name in built if name.endswith(".svg")} == {
        "predicted_vs_measured.svg",
        "error_by_size.svg",
        "peak_by_term.svg",
        "peak_by_length.svg",
    }
    assert [text for text in drawn if _CLAIM.search(text)] == []
    assert sum("emulated" in text for text in drawn) >= 5


def test_no_page_says_measured(built: dict[str, bytes]) -> None:
    for name, content in built.items():
        if name.endswith((".csv", ".svg", ".png")) or name.startswith("claims."):  # keys; others' figures
            continue
        text = _KEYS.sub("", said(name, content))
        if name == "index.html":  # the calculator predicts, and the claims speak of all kinds
            text = re.sub(r"[Pp]redicted, not measured|no GPU (has been measured yet|was measured)", "", text)
            text = re.sub(r"Nothing here was measured( unless it comes from cuda)?", "", text)
        found = [text[max(at.start() - 50, 0) : at.end() + 30] for at in _CLAIM.finditer(text)]
        assert found == [], name
        assert "emulated" in text.lower(), name


def test_every_page_of_tables_says_so_first(built: dict[str, bytes]) -> None:
    pages = [name for name in built if name.endswith(".md") and name != "claims.md"]
    assert {"measured.md", "by_size.md", "by_term.md", "formulas.md"} <= set(pages)
    for name in pages:
        assert EMULATED in " ".join(built[name].decode().split()), name
    measured = built["measured.md"].decode()
    assert measured.startswith("# Emulated peak memory")
    assert "emulated, " in measured
    assert f"device emulated {CARD}" in measured
    assert "emulator abc;" in measured


def test_programs_find_the_same_keys(built: dict[str, bytes]) -> None:
    assert "measured_bytes" in built["measured.csv"].decode().splitlines()[0]
    assert "speed.md" not in built


def test_words() -> None:
    assert [word_for(name) for name in ("cuda", "cpu", "emulated")] == ["measured", "measured", "emulated"]
    text = "Measured peak: not measured, 3 measurements, one measurement, measured_bytes"
    assert worded(text, "measured") == text
    assert worded(text, "emulated") == (
        "Emulated peak: not emulated, 3 emulated runs, one emulated run, measured_bytes"
    )


def test_instruments_are_not_mixed(tmp_path: Path) -> None:
    cuda = make_record(make_spec(device="cuda"), instrument="cuda", environment=make_environment(device_name=CARD))
    with pytest.raises(IncomparableRecords, match=r"instrument is 'cuda' in .* and 'emulated' in"):
        require_comparable([cuda, emulated(specs()[0])])
    same = cuda.model_copy(update={"instrument": "emulated", "attempt_id": "other", "emulation": EMULATION})
    with pytest.raises(IncomparableRecords, match=r"instrument is 'cuda' in one attempt .* 'emulated' in another"):
        store.latest_by_fingerprint([cuda, same])
    results = saved(tmp_path, [cuda, same, *records()])
    for stage in (api.calibrate, lambda path: api.report(path, tmp_path / "out")):
        with pytest.raises(IncomparableRecords, match="instrument"):
            stage(results)
    assert any("instrument is 'cuda' in 1, 'emulated' in" in one.message for one in check(results).findings)


def test_an_emulated_step_has_no_speed() -> None:
    times = Timing(step_seconds=[0.1, 0.1], total_seconds=1.0)
    cells = cells_of([emulated(specs()[0], timing=times)], None)
    assert speed(cells, [], "") is None


def test_the_terminal_says_emulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = saved(tmp_path, records())
    display.print_calibration(api.calibrate(results))
    display.print_check(check(results))
    shown = capsys.readouterr().out
    assert _CLAIM.findall(shown.replace("emulated, not measured on a GPU", "")) == []
    assert "emulated cell" in shown
    assert f"({len(records())} of them emulated, not measured on a GPU)" in shown


def test_a_claims_figure_from_an_emulated_record_says_so() -> None:
    options = {"model": "smollm2-135m", "method": "lora", "batch_size": 2, "seq_len": 1024}
    one = emulated(resolve(device="cuda", **options))
    peak = Cells([one]).peak(options)
    assert peak.engine == f"emulated {CARD}"
    assert peak.sources[0].command.startswith("vramprobe measure --emulate H100-SXM --model smollm2-135m")
    assert peak.low == one.peak.allocated_bytes
    real = one.model_copy(update={"instrument": "cuda", "emulation": None})
    assert Cells([real, one]).peak(options).engine == f"cuda on {CARD}"


def test_a_data_set_names_the_emulated_device() -> None:
    from vramprobe.records.store import StoreContents
    from vramprobe.report.dataset.card import card

    some = records()
    text = card(StoreContents(records=tuple(some), unfinished=(), torn_tail=None, files=()), ["instrument"], "")
    assert f"instruments: emulated ({len(some)})" in text
    assert f"devices: emulated {CARD}" in text
