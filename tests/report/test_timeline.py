"""The timeline: nothing of the peak is lost to the columns, stacks add up, and the page and the picture say so."""

import io
import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated import require_emulation
from factories import make_spec
from grids import exhaustive
from matplotlib.image import imread

from vramprobe import api
from vramprobe.errors import SpecError, StoreError
from vramprobe.log.log import CAUSES, Log, PhaseMark
from vramprobe.predict import recorded
from vramprobe.records.phase_memory import Composition, Peak, PhaseMemory
from vramprobe.report import timeline_file, timeline_page
from vramprobe.report.recorded_timeline import timeline_of
from vramprobe.report.timeline import MAX_COLUMNS, STACK, Subject, Timeline, _with_ordered_frees, timeline_over
from vramprobe.report.timeline_page import page, ticks
from vramprobe.report.timeline_picture import picture
from vramprobe.units import GIB, MIB, unit_of

STEP = ("forward", "backward", "optimizer_step", "zero_grad")
WEIGHTS, GRADIENTS, TEMPORARIES = (CAUSES.index(cause) for cause in ("weights", "gradients", "temporaries"))


def history(events: list[tuple[int, int, int]], phases: list[tuple[str, int | None, int]]) -> Log:
    """From (block, bytes, cause) and (phase, step, events)."""
    marks, start = [], 0
    for name, step, count in phases:
        marks.append(PhaseMark(name, step, None, range(start, start + count)))
        start += count
    assert start == len(events)
    blocks, sizes, causes = (np.array(column) for column in zip(*events, strict=True))
    return Log(sizes, blocks, causes.astype(np.int8), marks)


def some_history(seed: int, num_events: int) -> Log:
    """Random allocations and frees of every cause; step 2 has phases of very different lengths."""
    dice, alive, events = random.Random(seed), [], [(1, 5 * MIB, 0)]
    made = 1
    while len(events) < num_events:
        if alive and dice.random() < 0.48:
            block, size, cause = alive.pop(dice.randrange(len(alive)))
            events.append((block, -size, cause))
        else:
            made += 1
            alive.append((made, dice.randint(1, 9 * MIB), dice.randrange(len(CAUSES))))
            events.append(alive[-1])
    before = num_events // 3
    lengths = [num_events - before - 4, 3, 0, 1]
    phases = [("load", None, 1), ("forward", 1, before - 1)]
    return history(events, phases + [(name, 2, length) for name, length in zip(STEP, lengths, strict=True)])


def drawn(one: Log, *, name: str = "a cell", reserved: int | None = None, max_columns: int = MAX_COLUMNS) -> Timeline:
    """Step 2 of a log."""
    tier = "allocated" if reserved is None else "requested"
    subject = Subject(name=name, word="emulated", footer="by hand", step=2, tier=tier, allocated_bytes=1)
    marks = [mark for mark in one.marks if mark.step == 2]
    return timeline_over(subject, one, marks, [reserved] * len(marks), has_micro_steps=False, max_columns=max_columns)


def alive_after(one: Log, position: int) -> dict[int, tuple[int, int]]:
    """Block → (bytes, cause), the slow way."""
    alive: dict[int, tuple[int, int]] = {}
    for index in range(position + 1):
        block, size = int(one.blocks[index]), int(one.size_bytes[index])
        if size > 0:
            alive[block] = (size, int(one.causes[index]))
        else:
            del alive[block]
    return alive


@pytest.mark.parametrize("max_columns", [4, 9, 60, 10**6])
def test_no_peak_is_lost_however_few_the_columns(max_columns: int) -> None:
    one = some_history(seed=max_columns, num_events=900)
    timeline = drawn(one, max_columns=max_columns)
    totals = np.cumsum(one.size_bytes)
    step = [mark for mark in one.marks if mark.step == 2]
    assert timeline.peak_bytes == totals[step[0].events.start - 1 :].max()
    for span, mark in zip(timeline.phases, step, strict=True):
        highest = totals[mark.events.start - 1 : mark.events.stop].max()
        assert span.peak_bytes == highest == timeline.total_bytes[span.first : span.stop].max()
        assert span.end_bytes == totals[mark.events.stop - 1]
    assert len(timeline.live_bytes) <= max_columns + len(STEP)  # each phase has one at least


def test_every_column_is_a_moment_of_its_own_and_its_stack_adds_up() -> None:
    one = _with_ordered_frees(some_history(seed=1, num_events=400))
    timeline = drawn(one, max_columns=50)
    first = next(mark.events.start for mark in one.marks if mark.step == 2)
    for column, events in enumerate(timeline.events.tolist()):
        alive = alive_after(one, first + events - 1)
        by_cause = {cause: sum(size for size, number in alive.values() if CAUSES[number] == cause) for cause in CAUSES}
        shown = dict(zip(timeline.causes, timeline.live_bytes[column].tolist(), strict=True))
        assert shown == {cause: by_cause[cause] for cause in timeline.causes}
        assert timeline.total_bytes[column] == sum(size for size, _ in alive.values())
        sizes = [size for size, _ in sorted(alive.values(), reverse=True)]
        assert [kind.size_bytes for kind in timeline.largest[column]] == sizes[:5]  # no two are alike here


def test_phases_follow_each_other_and_none_is_too_narrow_to_be_seen() -> None:
    timeline = drawn(some_history(seed=2, num_events=3000), max_columns=100)
    assert [phase.name for phase in timeline.phases] == list(STEP)
    assert [phase.first for phase in timeline.phases] == [0, *(phase.stop for phase in timeline.phases[:-1])]
    assert timeline.phases[-1].stop == len(timeline.live_bytes) == len(timeline.edges) - 1
    assert (np.diff(timeline.edges) > 0).all()
    assert (timeline.edges[0], timeline.edges[-1]) == (0, pytest.approx(1))
    assert all(timeline.edges[one.stop] - timeline.edges[one.first] > 0.05 for one in timeline.phases)
    assert (np.diff(timeline.events) >= 0).all()
    assert [phase.num_events for phase in timeline.phases] == [1996, 3, 0, 1]
    assert timeline.num_events == 2000


def test_the_order_of_frees_that_follow_each_other_changes_nothing() -> None:
    """It is a hash table's in the libraries, another one each time."""
    made = [(block, 10 * block, WEIGHTS + block % 2) for block in range(1, 8)]
    phases = [("load", None, 7), ("forward", 2, 3), ("zero_grad", 2, 4)]
    pages = set()
    for order in ([0, 1, 2, 3, 4, 5, 6], [2, 0, 1, 6, 4, 3, 5]):
        frees = [(block, -size, cause) for block, size, cause in (made[index] for index in order)]
        pages.add(page(drawn(history(made + frees, phases))))
    assert len(pages) == 1


def test_known_moments() -> None:
    """Two blocks alike and a smaller one; the peak is in backward; an optimizer_step without events shows its start."""
    one = history(
        [
            (1, 100, WEIGHTS),
            (2, 30, TEMPORARIES),
            (3, 30, TEMPORARIES),
            (4, 7, GRADIENTS),
            (2, -30, TEMPORARIES),
            (3, -30, TEMPORARIES),
            (4, -7, GRADIENTS),
        ],
        [("load", None, 1), ("forward", 2, 1), ("backward", 2, 4), ("optimizer_step", 2, 0), ("zero_grad", 2, 1)],
    )
    timeline = drawn(one)
    assert timeline.causes == ("weights", "gradients", "temporaries")  # as in STACK, without those that never are
    assert timeline.total_bytes.tolist() == [100, 130, 130, 160, 167, 137, 107, 107, 107, 100]
    assert timeline.events.tolist() == [0, 1, 1, 2, 3, 4, 5, 5, 5, 6]
    assert (timeline.peak_bytes, timeline.peak_column, timeline.phase_at(4).name) == (167, 4, "backward")
    assert [(kind.cause, kind.size_bytes, kind.num_blocks) for kind in timeline.largest[4]] == [
        ("weights", 100, 1),
        ("temporaries", 30, 2),
        ("gradients", 7, 1),
    ]
    assert "In backward, after event 3 of 6: 167 B (167 B), the peak" in page(timeline)
    assert "In forward, before the first event: 100 B (100 B)" in page(timeline)


@exhaustive
@pytest.mark.parametrize("options", [{"method": "qlora", "grad_accum": 2}, {"method": "lora"}], ids=str)
def test_a_recordings_peak_and_its_parts_are_the_predictions(options: dict[str, Any]) -> None:
    require_emulation()
    spec = make_spec(device="cuda", **options)
    replay, found = recorded.replay_of(spec), recorded.predict(spec)
    timeline = timeline_of(replay, spec)
    steady = [phase for phase in replay.phases if phase.step == replay.peak.step]
    assert [span.peak_bytes for span in timeline.phases] == [phase.requested_peak_bytes for phase in steady]
    assert timeline.peak_bytes == max(phase.requested_peak_bytes for phase in steady)
    assert timeline.subject.allocated_bytes == found.peak_allocated_bytes.value
    shown = dict(zip(timeline.causes, timeline.live_bytes[timeline.peak_column].tolist(), strict=True))
    assert shown == {cause: size for cause, size in found.terms.items() if cause in STACK} | {
        cause: 0 for cause in timeline.causes if cause not in found.terms
    }


def test_a_replays_step_with_the_peak_is_drawn() -> None:
    one = some_history(seed=3, num_events=500)
    phases = [
        PhaseMemory(name=name, step=2, allocated_end_bytes=1, allocated_peak_bytes=1, reserved_peak_bytes=3 * GIB)
        for name in STEP
    ]
    replay = recorded.Replay(
        phases=phases,
        log=one,
        peak=Peak(phase="forward", step=2, allocated_bytes=5, reserved_bytes=6, load_allocated_bytes=1),
        at_peak=Composition.model_construct(total_bytes=0),
        provenance="recorded by hand",
        stack={},
    )
    found = timeline_of(replay, make_spec())
    assert [span.reserved_peak_bytes for span in found.phases] == [3 * GIB] * 4
    assert (found.subject.name, found.subject.allocated_bytes) == (make_spec().cell_id, 5)
    assert found.peak_bytes == drawn(one).peak_bytes
    assert "recorded by hand" in page(found)


# -- the page and the picture ----------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Tags, attributes and texts; every tag that is opened must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        key = self._open[-1] if self._open else ""
        self.texts[key] = self.texts.get(key, "") + data


def timeline(num_events: int = 500, **words: Any) -> Timeline:
    return drawn(some_history(seed=3, num_events=num_events), **words)


def data_of(text: str) -> dict[str, Any]:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def test_the_page_needs_nothing_else_and_says_what_it_is() -> None:
    text = page(timeline())
    read = Reader(text)
    assert "Emulated: the real CUDA software on no GPU." in text
    assert not [value for name, value in read.attributes if name in ("src", "href", "xlink:href", "srcset")]
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    assert {"script", "svg", "table"} <= set(read.tags)
    assert text == page(timeline())
    data = data_of(text)
    shown = timeline()
    assert len(data["moments"]) == len(data["largest"]) == len(data["edges"]) - 1 == len(shown.live_bytes)
    assert data["texts"][data["moments"][data["peak"]][0]].endswith(f"({shown.peak_bytes:,} B), the peak")


def test_what_others_wrote_is_text_and_never_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&$title"
    plain, odd = Reader(page(timeline())), Reader(page(timeline(name=evil)))
    assert odd.tags == plain.tags
    assert odd.texts["h1"] == evil
    assert picture(timeline(name=evil), "png").startswith(b"\x89PNG")
    monkeypatch.setattr(timeline_page, "phase_name", lambda phase: evil)  # of no user's making today
    odd = Reader(page(timeline()))
    assert odd.tags == plain.tags
    assert data_of(page(timeline()))["texts"][0].startswith(f"In {evil}, ")


def test_a_long_run_is_still_a_small_page() -> None:
    big = timeline(num_events=60_000)
    text = page(big)
    assert len(big.live_bytes) <= MAX_COLUMNS + len(STEP)
    assert len(text.encode()) < 1_000_000


def test_reserved_memory_is_drawn_where_it_is_known() -> None:
    known, unknown = timeline(reserved=3 * GIB), timeline()
    assert [span.reserved_peak_bytes for span in known.phases] == [3 * GIB] * 4
    assert page(known).count('<path class="reserved"') == 4 + 1  # and the legend's
    assert page(unknown).count('<path class="reserved"') == 0
    assert "3.00 GiB" in page(known)
    assert (known.subject.tier, unknown.subject.tier) == ("requested", "allocated")
    assert "With the allocator&#x27;s rounding 1 B allocated." in page(known)
    drawn = [imread(io.BytesIO(picture(one, "png"))) for one in (known, unknown)]
    assert [one.shape for one in drawn] == [(630, 1125, 4)] * 2
    assert picture(known, "png") != picture(unknown, "png")


@pytest.mark.parametrize("peak_bytes", [700, 3 * MIB, 999 * MIB, GIB, 79 * GIB, 900 * GIB])
def test_the_scale_has_a_few_round_amounts(peak_bytes: int) -> None:
    name, unit_bytes = unit_of(peak_bytes)
    assert name == ("GiB" if peak_bytes >= GIB else "MiB" if peak_bytes >= MIB else "KiB")
    amounts = ticks(peak_bytes, unit_bytes)
    assert amounts[0] == 0
    assert 4 <= len(amounts) <= 9
    assert amounts[-1] <= peak_bytes


def test_files_by_their_names(tmp_path: Path) -> None:
    one = timeline(name=r"模型 $\frac{$")  # no formula, and no glyphs for it in matplotlib's own font
    for name, beginning in (("a.html", b"<!doctype html>"), ("b.PNG", b"\x89PNG"), ("c.svg", b"<?xml")):
        path = tmp_path / name
        timeline_file.require_writable(path)
        assert not path.exists()
        timeline_file.write(one, path)
        assert path.read_bytes().startswith(beginning)
        again = path.read_bytes()
        timeline_file.require_writable(path)
        timeline_file.write(one, path)
        assert path.read_bytes() == again


def test_what_cannot_be_written_is_refused_before_anything_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "replay_of", None)
    (tmp_path / "file").touch()
    cell = {"model": "gpt2", "method": "lora", "batch_size": 1, "seq_len": 8}
    for name in ("a.pdf", "a", "html"):
        with pytest.raises(SpecError, match=r"must end in \.html, \.png or \.svg"):
            api.timeline(tmp_path / name, **cell)
    for path in (tmp_path / "file" / "a.html", tmp_path / "folder.png"):
        (tmp_path / "folder.png").mkdir(exist_ok=True)
        with pytest.raises(StoreError, match=r"cannot write the timeline to .*name another file"):
            api.timeline(path, **cell)
    with pytest.raises(StoreError, match=r"cannot write the timeline to .*Is a directory"):
        timeline_file.write(timeline(), tmp_path / "folder.png")
