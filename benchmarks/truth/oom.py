"""Out-of-memory errors of public issues, explained and repeated: ``python benchmarks/truth/oom.py`` writes oom.md.

``explain`` reads each report of oom/reports.toml. Its run, where the thread tells it, is repeated without a GPU: the
log of its recipe, at hand or recorded now, goes through the allocator's replay on a card that has exactly what the
message leaves to PyTorch, reserved and free. Nothing is fitted; ``--check`` writes nothing.
"""

import io
import logging
import sys
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


from benchmarks.tables import as_csv, as_markdown, filled, write_or_check
from benchmarks.truth.published_verdicts import PublishedRun, card_of, judged, run_name, runs_of_others, section
from vramprobe.allocator.compiled import counting_allocator
from vramprobe.allocator.ledger import Device
from vramprobe.allocator.ledger import OutOfMemory as Full
from vramprobe.explain.messages import OomMessage
from vramprobe.explain.report import report_of
from vramprobe.log.reserved import player
from vramprobe.predict import recorded
from vramprobe.predict.at_hand import replay_at_hand
from vramprobe.predict.recipe_replay import Replay
from vramprobe.predict.shares import near
from vramprobe.records.phase_memory import TRAINING_PHASES
from vramprobe.resolve import resolve
from vramprobe.spec import CellSpec
from vramprobe.units import GIB, format_bytes

FOLDER = Path(__file__).with_suffix("")
TABLE = Path(__file__).with_suffix(".csv")
#: Phases that a repetition does not tell apart.
_ALIKE = ({"load", "to_device", "prepare"}, {"forward", "backward", "forward or backward"})
Row = dict[str, Any]


@dataclass(frozen=True)
class Repeated:
    """End of the repeated run, bytes; ``requested``: None where it fits; ``peak``: allocated on an endless card."""

    phase: str
    requested: int | None
    allocated: int
    reserved: int | None
    peak: int


def reports() -> list[dict[str, Any]]:
    """The reports, as they were collected."""
    return tomllib.loads((FOLDER / "reports.toml").read_text(encoding="utf-8"))["report"]


def spec_of(report: Mapping[str, Any]) -> CellSpec:
    """The run as a cell."""
    cell = dict(report["cell"])
    if cell["model"].endswith(".json"):
        cell["model"] = str(FOLDER / cell["model"])
    return resolve(device="cuda", **cell)


def room_of(oom: OomMessage) -> int | None:
    """Return the bytes that PyTorch had and could still get; null where the message does not tell."""
    if oom.reserved is None or oom.free is None:
        return None
    return oom.reserved + oom.free


def repeated(report: Mapping[str, Any], room: int) -> Repeated:
    """The report's run where PyTorch's segments may take ``room`` bytes."""
    spec, device = spec_of(report), Device(segment_bytes=room)
    if spec.num_gpus > 1:  # whose order of requests is not known
        peak = near(spec, records=True).peak_allocated_bytes.value
        return Repeated("fits" if peak <= room else "does not fit", None, peak, None, peak)
    replay = replay_of(spec)
    peak = max(replay.peak.allocated_bytes, replay.peak.load_allocated_bytes)
    return Repeated(*_played(replay, device), peak)


def replay_of(spec: CellSpec) -> Replay:
    """The run's log on an A100, from a recipe at hand or one that is recorded now."""
    return replay_at_hand(spec) or recorded.replay_of(spec)


def _played(replay: Replay, device: Device) -> tuple[str, int | None, int, int]:
    """Phase, request, allocated and reserved where it ends; where it fits, its peaks."""
    allocator = counting_allocator(None, device)
    play, is_set_up = player(replay.log, allocator), False
    try:
        for mark in replay.log.marks:
            if mark.name in TRAINING_PHASES and not is_set_up:
                allocator.empty_cache()
                is_set_up = True
            phase = mark.name
            play(slice(mark.events.start, mark.events.stop))
    except Full as full:
        return phase, full.segment_bytes, full.usage.allocated_bytes, full.usage.reserved_bytes
    peak = allocator.ledger.peak()
    return "fits", None, peak.allocated_bytes, peak.reserved_bytes


def compared(report: Mapping[str, Any]) -> Row:
    """One report: its figures, what ``explain`` says of it, and its repetition."""
    said = report_of(io.BytesIO(report["text"].encode()))
    assert said.oom is not None
    assert said.explanation is not None
    oom, room = said.oom, room_of(said.oom)
    row: Row = {
        **{name: report.get(name, "") for name in ("source", "gpu", "phase", "cause", "told")},
        "explained_phase": said.phase.name,
        "explained_cause": said.explanation.cause,
        "requested_bytes": oom.requested,
        "allocated_bytes": oom.allocated,
        "reserved_bytes": oom.reserved,
        "room_bytes": room,
    }
    if "cell" in report and room is not None:
        again = repeated(report, room)
        row |= {"run": run_name(spec_of(report)), "repeated_phase": again.phase}
        row |= {
            f"repeated_{name}_bytes": getattr(again, name) for name in ("requested", "allocated", "reserved", "peak")
        }
        row["predicted_peak_bytes"] = again.peak
        half_unit = max(oom.requested_half_unit, 1)
        row["is_same_request"] = again.requested is not None and abs(again.requested - oom.requested) <= half_unit
    return row | {name: report.get(name, "") for name in ("tensor", "assumed", "why")}


def published_runs() -> Iterator[PublishedRun]:
    """The reports' runs on cards of the catalog, which ran out, and those that the thread says fit there."""
    for report in reports():
        gpu = card_of(report.get("gpu", ""))
        if "cell" not in report or gpu is None:
            continue
        about = {"source": "public issues", "gpu": gpu}
        spec = spec_of(report)
        name = f"{report['source']}: {run_name(spec)}"
        yield PublishedRun(name=name, spec=spec, ran=False, why=report.get("why") or report["told"], **about)
        if "fits" in report:
            spec = spec_of({**report, "cell": report["cell"] | report["fits"]})
            name = f"{report['source']}: {run_name(spec)}"
            yield PublishedRun(name=name, spec=spec, ran=True, why=report["assumed"], **about)


def same_phase(row: Row) -> bool | None:
    """Tell whether the repetition ends in the phase that the report tells; null where either is not known."""
    told, found = row["phase"], row.get("repeated_phase")
    if not told or not found or told in ("evaluation", "save"):
        return None
    return told == found or any({told, found} <= alike for alike in _ALIKE)


def markdown(rows: Sequence[Row], verdicts: list[str]) -> str:
    """Counts, the table of repetitions, what explain says, the lines of verdicts, and what was assumed."""
    again = [row for row in rows if "run" in row]
    ended = [row for row in again if row["repeated_phase"] != "fits"]
    judged = [row for row in rows if row["cause"]]
    phases = [row for row in again if same_phase(row) is not None]
    near = [row for row in ended if _gap(row) <= 5]
    too_large = [row for row in again if row["predicted_peak_bytes"] > row["room_bytes"]]
    right = [row for row in judged if row["cause"] == row["explained_cause"]]
    says = ("report", "the thread tells", "cause shown", "by explain", "right")
    requests = ("report", "request", "the tensor of this size (by hand)", "assumed")
    return filled(
        TABLE.with_suffix(".md"),
        reports=len(rows),
        again=len(again),
        ended=len(ended),
        same_request=sum(bool(row["is_same_request"]) for row in again),
        near=len(near),
        too_large=len(too_large),
        same_phase=sum(bool(same_phase(row)) for row in phases),
        phases=len(phases),
        right=len(right),
        judged=len(judged),
        unknown=len(rows) - len(judged),
        repeated=_repeated_table(again),
        explained=as_markdown(
            says,
            "lllll",
            [(row["source"], row["told"], row["cause"] or "–", row["explained_cause"], _verdict(row)) for row in rows],
        ),
        verdicts=verdicts,
        requests=as_markdown(
            requests,
            "lrll",
            [
                (
                    row["source"],
                    _shown(row["requested_bytes"]),
                    row["tensor"] or "unknown",
                    row["assumed"] or row["why"],
                )
                for row in rows
            ],
        ),
    )


def _repeated_table(rows: Sequence[Row]) -> list[str]:
    head = ("report", "run", "phase: told, here", "requested: message, here", "allocated, GiB", "reserved, GiB")
    return as_markdown(
        (*head, "difference"),
        "lllrrrl",
        [
            (
                row["source"],
                row["run"],
                f"{row['phase'] or '–'}, {row['repeated_phase']}",
                f"{_shown(row['requested_bytes'])}, {_shown(row['repeated_requested_bytes'])}",
                _pair(row, "allocated"),
                _pair(row, "reserved"),
                row["why"] or "none",
            )
            for row in rows
        ],
    )


def _gap(row: Row) -> float:
    return 100 * abs(row["repeated_allocated_bytes"] / row["allocated_bytes"] - 1)


def _verdict(row: Row) -> str:
    if not row["cause"]:
        return "–"
    return "yes" if row["cause"] == row["explained_cause"] else "no"


def _shown(size: int | None) -> str:
    return "–" if size is None else format_bytes(size)


def _pair(row: Row, tier: str) -> str:
    here = row[f"repeated_{tier}_bytes"]
    return f"{row[f'{tier}_bytes'] / GIB:.2f}, {'–' if here is None else f'{here / GIB:.2f}'}"


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = [compared(report) for report in reports()]
    verdicts = section(list(judged([*published_runs(), *runs_of_others()])))
    made = {TABLE: as_csv(rows), TABLE.with_suffix(".md"): markdown(rows, verdicts)}
    write_or_check(made, "truth/oom.py", check="--check" in sys.argv)


if __name__ == "__main__":
    main()
