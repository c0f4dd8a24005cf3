"""An Evaluation → its page: errors by group, verdicts by GPU, every held-out record, and the plot.

In: an Evaluation. Out: file name → content. Never evaluates anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vramprobe.evaluate import Evaluation, Score
from vramprobe.report.plot import predicted_against_measured
from vramprobe.report.render import Column, to_csv, to_markdown
from vramprobe.report.rows import Cell

_SMALLEST_PERCENT = 0.0001  # the CSV has all digits


def evaluation_page(found: Evaluation, command: str) -> dict[str, bytes]:
    """evaluation.md, evaluation.csv (a row per record and tier) and the plot; the last lines say how to rebuild it."""
    parts = [
        "# Predictions of what the fit has not seen\n",
        f"{len(found.folds)} fold{'s' if len(found.folds) > 1 else ''}: {'; '.join(found.folds)}. Error is predicted "
        "less measured, of the measured; coverage is the share of measured values inside their interval.\n",
        to_markdown(SUMMARY_COLUMNS, found.summaries),
    ]
    if found.cards:
        parts += ["## Verdicts by GPU\n", to_markdown(CARD_COLUMNS, found.cards)]
    parts += [f"{line}\n" for line in remarks(found)]
    parts += ["## Records\n", to_markdown(_SCORE_COLUMNS, found.scores), f"Rebuild: `{command}`\n"]
    files = {
        "evaluation.md": "\n".join(parts).encode(),
        "evaluation.csv": to_csv(_SCORE_COLUMNS, found.scores).encode(),
    }
    cells = [_cell(score) for score in found.scores if score.tier == "allocated"]
    return files | (predicted_against_measured(cells) if cells else {})


def remarks(found: Evaluation) -> list[str]:
    """What the tables do not show: extrapolation, lower bounds, and records that say nothing."""
    lines = []
    num_extrapolated = sum(score.is_extrapolated and score.tier == "allocated" for score in found.scores)
    if num_extrapolated:
        lines.append(f"{num_extrapolated} are so far outside their fit that `predict` would refuse them unless told.")
    if found.num_lower_bounds:
        lines.append(
            f"{found.num_lower_bounds} held-out cells ran out of memory; {found.num_below_bound} of them were "
            "predicted to need less than they were seen to."
        )
    lines += [f"Left out: {count}, {reason}." for reason, count in sorted(found.left_out.items())]
    return lines


def _cell(score: Score) -> Cell:
    return Cell(
        record=score.record,
        held_out=True,
        predicted_bytes=score.predicted.value,
        low_bytes=score.predicted.low,
        high_bytes=score.predicted.high,
    )


def percent(share: float, *, signed: bool = True) -> str:
    """In percent; what is smaller than the last digit is said to be, without a sign that nobody needs."""
    if share == 0:
        return "0"
    value = 100 * share
    return f"≤ {_SMALLEST_PERCENT}" if abs(value) < _SMALLEST_PERCENT else f"{value:{'+' if signed else ''}.4f}"


def _of(name: str) -> Callable[[Any], Any]:
    return lambda row: getattr(row, name)


def _unsigned(share: float) -> str:
    return percent(share, signed=False)


SUMMARY_COLUMNS = [
    Column("group", "records", _of("group")),
    Column("tier", "tier", _of("tier")),
    Column("num_records", "n", _of("num_records"), str, is_number=True),
    Column("mean_absolute", "mean error, %", _of("mean_absolute"), _unsigned, is_number=True),
    Column("worst_absolute", "worst, %", _of("worst_absolute"), _unsigned, is_number=True),
    Column("mean_signed", "mean signed, %", _of("mean_signed"), percent, is_number=True),
    Column("worst_under_prediction", "worst under, %", _of("worst_under_prediction"), percent, is_number=True),
    Column("coverage", "coverage, %", _of("coverage"), lambda value: f"{100 * value:.0f}", is_number=True),
]
CARD_COLUMNS = [
    Column("gpu", "GPU", _of("gpu")),
    *[
        Column(name, heading, _of(name), str, is_number=True)
        for name, heading in (
            ("num_right", "right"),
            ("num_tight", "tight"),
            ("num_false_fits", "false fits"),
            ("num_false_refusals", "false refusals"),
        )
    ],
]
_SCORE_COLUMNS = [
    Column("fingerprint", None, lambda score: score.record.fingerprint),
    Column("cell_id", "cell", lambda score: score.record.cell_id),
    Column("fold", None, _of("fold")),
    Column("tier", "tier", _of("tier")),
    Column("measured_phase", "peak phase", lambda score: score.record.peak.phase),
    Column("predicted_phase", None, _of("predicted_phase")),
    Column("measured_bytes", "measured, B", _of("measured_bytes"), "{:,}".format, is_number=True),
    Column("predicted_bytes", "predicted, B", lambda score: score.predicted.value, "{:,}".format, is_number=True),
    Column("low_bytes", None, lambda score: score.predicted.low),
    Column("high_bytes", None, lambda score: score.predicted.high),
    Column("error", "error, %", _of("error"), percent, is_number=True),
    Column("is_extrapolated", None, _of("is_extrapolated")),
]
