"""The plots show what was measured, say it without colour, and come out the same each time."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from factories import make_record, make_spec, specs, synthetic

from vramprobe.records import store
from vramprobe.records.phase_memory import Peak
from vramprobe.report.cells import Cell, cells_of
from vramprobe.report.plots import LOOKS, METHODS, errors, files, label_ends, length, predicted, spread, terms
from vramprobe.report.plots.drawn import contents
from vramprobe.resolve import resolve
from vramprobe.units import GIB, MIB

QUICKSTART = Path(__file__).parents[2] / "results" / "cpu" / "quickstart"


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return cells_of(store.read(QUICKSTART).records, None)


def with_errors() -> list[Cell]:
    """Four cells of 100 MiB: (method, held out, error in percent) as in ERRORS."""
    peak = Peak(phase="backward", step=2, allocated_bytes=100 * MIB, load_allocated_bytes=1)
    return [
        Cell(
            record=make_record(make_spec(method=method), peak=peak),
            held_out=held_out,
            low_bytes=90 * MIB,
            predicted_bytes=(100 + error) * MIB,
            high_bytes=120 * MIB,
        )
        for method, held_out, error in ERRORS
    ]


ERRORS = [("full", False, 3), ("full", True, -2), ("lora", False, 1), ("lora", True, -10)]


def figure() -> Any:
    from matplotlib.figure import Figure

    return Figure(layout="constrained")


def test_predicted_against_measured_names_each_method_and_set() -> None:
    upper, lower = figure().subplots(2)
    predicted.draw_on(upper, lower, with_errors())
    labels = [text.get_text() for text in upper.get_legend().get_texts()]
    assert labels == ["full, in the fit", "full, held out", "lora, in the fit", "lora, held out"]
    heights = [float(bars[0].get_ydata()[0]) for bars in lower.containers]
    assert heights == pytest.approx([3, -2, 1, -10])  # the errors, in percent


def test_each_plot_is_the_same_each_time(cells: list[Cell]) -> None:
    once = terms.plot(cells)
    assert list(once) == ["peak_by_term.svg", "peak_by_term.png"]
    assert once == terms.plot(cells)
    assert once["peak_by_term.png"].startswith(b"\x89PNG")
    assert b"<dc:date>" not in once["peak_by_term.svg"]


def test_a_bar_is_as_long_as_the_measured_peak(cells: list[Cell]) -> None:
    chosen = terms.choose(terms.traced(cells))
    assert len({(one.record.spec.batch_size, one.record.spec.seq_len) for one in chosen}) == 1
    assert len({(one.record.spec.model, one.record.spec.method) for one in chosen}) == len(chosen)
    drawn = figure()
    terms._draw(drawn, chosen)
    (axes,) = drawn.axes
    ends: dict[float, float] = {}
    for patch in axes.patches:
        ends[round(patch.get_y(), 3)] = max(ends.get(round(patch.get_y(), 3), 0.0), patch.get_x() + patch.get_width())
    assert sorted(ends.values()) == pytest.approx(sorted(one.measured_bytes / GIB for one in chosen), rel=0.005)


def test_bars_are_of_each_methods_most_usual_way() -> None:
    """A cell of another recipe has no bar beside two of the usual one, though it comes first of its model."""
    usual = [make_record(make_spec(num_layers=depth, dtype="fp32")) for depth in (1, 2)]
    odd = make_record(make_spec(num_layers=2, dtype="bf16"))
    cells = cells_of([*usual, odd], None)
    assert [one.record.spec.dtype for one in cells] == ["fp32", "bf16", "fp32"]
    assert [one.record for one in terms.choose(cells)] == usual


def test_no_two_terms_or_methods_look_alike_without_colour() -> None:
    hatches = [hatch for name, (_, hatch) in LOOKS.items() if name not in ("batch", "weights")]
    assert len(set(hatches)) == len(hatches)
    assert len({marker for marker, _ in METHODS.values()}) == len(METHODS)


def test_nothing_traced_makes_no_plot_of_terms() -> None:
    ledger = make_record().ledger.model_copy(update={"at_peak": None})
    assert terms.plot(cells_of([make_record(ledger=ledger)], None)) == {}


def test_the_lengths_are_of_the_largest_model_with_most_methods() -> None:
    """Lengths are predicted where a recipe at hand was recorded around them; none is of the CPU."""
    some = [spec for spec in specs(("smollm2-135m", "smollm2-360m")) if spec.seq_len == 2048 or spec.method == "lora"]
    measured = cells_of(map(synthetic, some), None)
    lines = length.lines_of(measured, None)
    assert {line.spec.model for line in lines} == {"smollm2-360m"}
    ways = [(method, on) for method in ("full", "lora", "qlora") for on in (False, True)]
    assert [(line.spec.method, line.spec.gradient_checkpointing) for line in lines] == ways
    for line in lines:
        known = {at: (size, phase) for at, size, phase in line.predicted}
        assert set(known) >= {2048, 4096, 8192}
        assert all(known[at] == (size, phase) for at, size, phase in line.measured)
        assert list(known.values()) == sorted(known.values())
    assert length.plot(cells_of([make_record()], None), None) == {}


def test_positions_that_a_model_has_not_are_not_drawn() -> None:
    gpt2 = resolve(model="gpt2", method="lora", device="cuda", batch_size=2, seq_len=512, gradient_checkpointing=True)
    (line,) = length.lines_of(cells_of([synthetic(gpt2)], None), None)
    assert max(at for at, *_ in line.predicted) == 1024


def test_errors_are_of_what_the_fit_has_not_seen() -> None:
    judged = errors.judged_cells(with_errors())
    assert [cell.error_percent for cell in judged] == pytest.approx([-2, -10])
    found = errors.curves(judged, "full")
    assert found[errors.OURS] == [(pytest.approx(make_record().facts.num_params / 1e9), pytest.approx(-2))]
    params, (expected,) = make_record().facts.num_params, found["16-bytes, 16-bytes-fp32, guide-lyceum, zero-paper"]
    assert expected[1] == pytest.approx(100 * (16 * params - 100 * MIB) / (100 * MIB), rel=1e-3)
    assert errors.curves(judged, "qlora") == {}


def test_formulas_that_say_the_same_share_a_line() -> None:
    found = errors.merged(
        {errors.OURS: [(1, 0.0)], "a": [(1, 0.0)], "b": [(1, 0.01)], "c": [(1, 5.0)], "d": [(2, 5.0)]}
    )
    assert list(found) == [errors.OURS, "a, b", "c", "d"]


@pytest.mark.parametrize("wanted", [[0.5, 0.5, 0.5], [0.0, 0.0, 0.01], [0.99, 1.0, 1.0], [0.1, 0.2, 0.9], []])
def test_labels_never_overlap(wanted: list[float]) -> None:
    places = spread(wanted, 0.1)
    assert all(later - earlier >= 0.1 - 1e-9 for earlier, later in pairwise(places))
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)
    if wanted == [0.1, 0.2, 0.9]:
        assert places == pytest.approx(wanted)


def test_a_label_stands_beside_the_end_of_its_line() -> None:
    axes = figure().subplots()
    axes.set(xlim=(0, 10), ylim=(0, 10))
    label_ends(axes, [("low_$x$", 10, 1, "black"), ("high", 10, 9, "black")], least_gap=0.05, right=1.05)
    assert [(text.get_text(), text.get_position()[1]) for text in axes.texts] == [
        ("low_$x$", pytest.approx(0.1)),
        ("high", pytest.approx(0.9)),
    ]


def test_any_model_name_can_be_drawn() -> None:
    """No mathematics in a name, and a script that the font has not."""
    spec = make_spec().model_copy(update={"model": "$\\frac$_模型"})
    drawn = terms.plot(cells_of([make_record(spec)], None))
    assert re.match(rb"\x89PNG", drawn["peak_by_term.png"])


@pytest.mark.parametrize(
    "change",
    [
        lambda axes: axes.lines[0].set_ydata([1, 2.0001]),
        lambda axes: axes.lines[0].set_color("red"),
        lambda axes: axes.lines[0].set_marker("s"),
        lambda axes: axes.patches[0].set_width(3),
        lambda axes: axes.patches[0].set_hatch("/"),
        lambda axes: axes.collections[0].set_edgecolor("red"),
        lambda axes: axes.set_xticks([0, 1], ["a", "c"]),
        lambda axes: axes.set_ylim(0, 9),
        lambda axes: axes.set_yscale("log"),
        lambda axes: axes.set_title("other", loc="left"),
        lambda axes: axes.texts[0].set_text("other"),
        lambda axes: axes.legend(["other"]),
        lambda axes: axes.figure.suptitle("other"),
        lambda axes: axes.figure.set_size_inches(3, 3),
    ],
)
def test_a_picture_says_what_it_shows(change: Any) -> None:
    """Another number, colour, name or limit is another picture; its last digits, its font and resolution are not."""

    def drawn(change: Any) -> Any:
        axes = (made := figure()).subplots()
        axes.plot([0, 1], [1, 2], marker="o", label="line")
        axes.barh([1], [2])
        axes.vlines([1], 0, 1)
        axes.text(0, 1, "said")
        axes.set_xticks([0, 1], ["a", "b"])
        axes.legend()
        change(axes)
        return contents(made)

    as_it_is = drawn(lambda axes: None)
    assert drawn(change) != as_it_is
    assert drawn(lambda axes: axes.lines[0].set_ydata([1 + 1e-12, 2])) == as_it_is
    assert drawn(lambda axes: (axes.texts[0].set_fontsize(40), axes.figure.set_dpi(300))) == as_it_is


def test_files_are_named_by_the_plot() -> None:
    assert list(files("name", (1, 1), lambda drawn: None)) == ["name.svg", "name.png"]
