"""The page of techniques: every run once, the numbers of the table that ships, and a plot of the frontier."""

import csv
import io
import re
from html import unescape
from pathlib import Path

from typer.testing import CliRunner

from vramprobe.cli.verbs import app
from vramprobe.report.plots.techniques import frontier, plot
from vramprobe.report.techniques import build
from vramprobe.techniques.registry import techniques
from vramprobe.techniques.savings import Saving, runs
from vramprobe.units import GIB


def test_each_run_is_a_row_once_with_the_numbers_that_ship() -> None:
    made = build("vramprobe techniques -o out")
    rows = list(csv.DictReader(io.StringIO(made["techniques.csv"].decode())))
    ran = [one for one in runs() if one.saved_bytes is not None]
    found = sorted((int(row["base_bytes"]), int(row["peak_bytes"])) for row in rows)
    assert found == sorted((one.base_bytes, one.peak_bytes) for one in ran)
    page = unescape(made["index.html"].decode())
    assert page.count('<th scope="row"') == len(rows) + len(_without(page))
    (lomo,) = [row for row in rows if row["technique"] == "LOMO"]
    assert f"{int(lomo['saved_bytes']) / GIB:.2f}" in page


def _without(page: str) -> list[str]:
    """The techniques in the page's last table."""
    return re.findall(r'<th scope="row"[^>]*>([^<]*)</th>', page[page.index("Without a number</h3>") :])


def test_every_technique_has_a_number_or_a_reason() -> None:
    page = unescape(build("x")["index.html"].decode())
    names = re.findall(r'<th scope="row"[^>]*>([^<]*)</th>', page)
    assert {one.name for one in techniques().values()} <= set(names)
    table = page[page.index("Without a number</h3>") :]
    assert all(re.findall(r'<td class="prose">([^<]*)</td>', table))


def test_the_frontier_is_what_no_other_beats_in_memory_and_in_time() -> None:
    words = {"base": "full-8b", "gpu": "H100-SXM", "package": "x", "outcome": "ok", "base_bytes": 100 * GIB}
    numbers = {"sgd": (60, 1.0), "lion_32bit": (70, 0.9), "lomo": (80, 1.1), "adalomo": (50, 1.2), "lora": (120, 0.5)}
    found = [
        Saving(technique=name, peak_bytes=peak * GIB, base_seconds=1.0, seconds=seconds, **words)
        for name, (peak, seconds) in numbers.items()
    ]
    assert [one.technique for one in frontier(found)] == ["lion_32bit", "sgd", "adalomo"]
    assert plot(found) == plot(found)


def test_the_folder_is_checked_and_wrong_use_is_refused(tmp_path: Path) -> None:
    run = CliRunner().invoke
    out = str(tmp_path / "out")
    assert run(app, ["techniques", "-o", out]).exit_code == 0
    assert run(app, ["techniques", "-o", out, "--check"]).exit_code == 0
    (tmp_path / "out" / "techniques.csv").write_text("technique\n")
    assert run(app, ["techniques", "-o", out, "--check"]).exit_code == 1
    assert run(app, ["techniques", "--check"]).exit_code == 2
    assert run(app, ["techniques", "-o", out, "--matrix"]).exit_code == 2
