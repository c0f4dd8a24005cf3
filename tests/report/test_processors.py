"""Published files are the same from every processor: reports under several kernels and threads, byte for byte."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from grids import exhaustive

from vramprobe.report.plots.drawn import settled_svg
from vramprobe.units import published

ROOT = Path(__file__).parents[2]
#: Prints name → digest of a fit, an evaluation and a report, and the standard errors of constants in full.
PUBLISH = """
import hashlib, json
from pathlib import Path
from factories import specs, synthetic
from vramprobe import api
from vramprobe.model.card_fit import save_fit
from vramprobe.records import writing
from vramprobe.report.publish import build
from vramprobe.report.evaluation import evaluation_page

here = Path({folder!r})
results = here / "results"
for number, spec in enumerate(() if results.exists() else specs()):
    writing.append(results / "records.jsonl", synthetic(spec, 1.05 + number / 1000))
model = api.fit(results)
save_fit(model, here / "fit.json")
files = {{"fit.json": (here / "fit.json").read_bytes()}}
files |= {{f"evaluation/{{name}}": content for name, content in
          evaluation_page(api.evaluate(results, leave_out="family"), "x").items()}}
files |= build(results, "out", model=model, fit_path="fit.json")
digests = {{name: hashlib.sha256(content).hexdigest() for name, content in files.items()}}
errors = [one.standard_error for one in api.calibrate("results/cpu/quickstart").constants]
print(json.dumps([digests, repr(errors)]))
"""


def published_under(folder: Path, **environment: str) -> tuple[dict[str, str], str]:
    """(file → digest, standard errors with all digits) as this environment makes them."""
    done = subprocess.run(
        [sys.executable, "-c", PUBLISH.format(folder=str(folder))],
        cwd=ROOT,
        env=os.environ | environment | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        capture_output=True,
        text=True,
        check=True,
    )
    digests, errors = json.loads(done.stdout)
    return digests, errors


@exhaustive
def test_reports_are_the_same_under_other_kernels_and_threads(tmp_path: Path) -> None:
    """As on a processor with AVX2 and two threads, and on one with SSE2 alone and one thread."""
    found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    newer, newer_raw = published_under(tmp_path, OPENBLAS_CORETYPE="Haswell", OPENBLAS_NUM_THREADS="2")
    older, older_raw = published_under(
        tmp_path, OPENBLAS_CORETYPE="Prescott", OPENBLAS_NUM_THREADS="1", NPY_DISABLE_CPU_FEATURES=" ".join(found)
    )
    assert {"fit.json", "index.html", "formulas.csv", "peak_by_length.svg", "evaluation/evaluation.csv"} <= set(newer)
    assert [name for name in newer if newer[name] != older[name]] == []
    if os.uname().machine == "x86_64":
        assert newer_raw != older_raw, "the kernels give the same to the last digit, so that this test tests nothing"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0003662184016365443, 0.000366218),
        (0.0003662184016365444, 0.000366218),
        (-123456789.5, -123457000.0),
        (3e-13, 0.0),
        (-0.0, 0.0),
        (2e-12, 2e-12),
        (float("inf"), float("inf")),
        (123456789, 123456789),
        (True, True),
        ("0.12345678", "0.12345678"),
        (None, None),
    ],
)
def test_floats_are_published_with_six_digits_and_bytes_whole(value: object, expected: object) -> None:
    assert repr(published(value)) == repr(expected)


def test_every_published_number_has_the_digits_of_any_processor() -> None:
    """In the tables for programs, behind the page's numbers and in the pictures."""
    texts = [
        text
        for path in (ROOT / "results").rglob("*.csv")
        for row in csv.reader(path.read_text().splitlines())
        for text in row
        if re.fullmatch(r"-?\d+\.\d+(e[+-]?\d+)?|-?\d+e[+-]?\d+", text)
    ]
    for page in (ROOT / "results").rglob("index.html"):
        texts += re.findall(r'data-sort="(-?\d[^"]*)"', page.read_text())
    assert len(texts) > 1000
    assert [text for text in texts if published(json.loads(text)) != json.loads(text)] == []
    for path in (ROOT / "results").rglob("*.svg"):
        assert settled_svg(path.read_bytes()) == path.read_bytes(), path


def test_an_svg_keeps_what_it_draws() -> None:
    """Six digits of what is drawn; texts, colours and names of others' as they are; ids in their order."""
    svg = (
        b'<path id="m60fde2f47c" d="M 38.48234951 0.0000000001" style="fill: #0072b2"/><!-- 1.23456789 -->'
        b'<use xlink:href="#m60fde2f47c" transform="translate(1234.56789 -2) scale(0.015625)"/>v3.1415926 1.23456789'
    )
    assert settled_svg(svg) == (
        b'<path id="d1" d="M 38.4823 0" style="fill: #0072b2"/><!-- 1.23456789 -->'
        b'<use xlink:href="#d1" transform="translate(1234.57 -2) scale(0.015625)"/>v3.1415926 1.23456789'
    )
