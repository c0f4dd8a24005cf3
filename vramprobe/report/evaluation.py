"""An Evaluation → its page: errors by group, verdicts by GPU where one can fail, every held-out record, and the plot.

In: an Evaluation. Out: a Document, or file name → content. Never evaluates anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vramprobe.predict.evaluate import CardScore, Evaluation, Score
from vramprobe.report.cells import Cell, word_of
from vramprobe.report.columns import provenance
from vramprobe.report.definition import Column, Document, Table, rows_of
from vramprobe.report.formats import files_of
from vramprobe.report.plots import PICTURES, predicted
from vramprobe.units import plural

if TYPE_CHECKING:
    import pandas as pd

_SMALLEST_PERCENT = 0.0001  # the CSV has it


def evaluation_page(found: Evaluation, command: str) -> dict[str, bytes]:
    """evaluation in every format (the CSV has a row per record and tier), and the plot."""
    document = evaluation_document(found, command)
    cells = [_cell(score) for score in found.scores if score.tier == "allocated"]
    if not cells:
        return files_of(document)
    return files_of(document.with_pictures(PICTURES["predicted_vs_measured"].about(word_of(cells)))) | predicted.plot(
        cells
    )


def evaluation_document(found: Evaluation, command: str = "") -> Document:
    """Errors by group first, every record last."""
    import pandas as pd

    wrong = pd.DataFrame([vars(card) for card in found.cards if _is_wrong(card)])
    records = Table(title="Records", columns=_SCORE_COLUMNS, rows=rows_of(_scores(found.scores)))
    summaries = pd.DataFrame([vars(one) for one in found.summaries])
    tables = [Table(title="Errors by group", columns=_SUMMARY_COLUMNS, rows=rows_of(summaries))]
    tables += [Table(title="Verdicts by GPU", columns=_CARD_COLUMNS, rows=rows_of(wrong))] if len(wrong) else []
    about = (
        f"{plural(len(found.folds), 'fold')}: {'; '.join(found.folds)}. Error is predicted "
        "less measured, of the measured; coverage is the share of measured values inside their interval."
    )
    document = Document(
        name="evaluation",
        title="Predictions of what the fit has not seen",
        about=[about],
        tables=[*tables, records],
        data=records,
        remarks=remarks(found),
        command=command,
        origin=provenance([score.record for score in found.scores if score.tier == "allocated"]),
    )
    return document.of(found.scores[0].record.instrument) if found.scores else document


def remarks(found: Evaluation) -> list[str]:
    """Return what the tables do not show: right verdicts, extrapolation, lower bounds, records that prove nothing."""
    lines = []
    if right := [card for card in found.cards if not _is_wrong(card)]:
        sizes = f"{plural(len(right), 'size')} of GPU"
        lines.append(f"Every verdict is right for {sizes}, {right[0].gpu} the smallest.")
    num_outside = sum(score.is_outside and score.tier == "allocated" for score in found.scores)
    if num_outside:
        lines.append(f"{num_outside} are outside of what was fitted, so that their intervals are wider.")
    if found.num_lower_bounds:
        lines.append(
            f"{found.num_lower_bounds} held-out cells ran out of memory; {found.num_below_bound} of them were "
            "predicted to need less than they were seen to."
        )
    lines += [f"Left out: {count}, {reason}." for reason, count in sorted(found.left_out.items())]
    return lines


def as_json(found: Evaluation) -> dict[str, Any]:
    """Everything, for machines: errors and coverage are shares of one, sizes are bytes."""
    return {
        "folds": list(found.folds),
        "summaries": [vars(one) for one in found.summaries],
        "gpus": [vars(one) for one in found.cards],
        "records": rows_of(_scores(found.scores).drop(columns=["measured_phase", "predicted_phase"])),
        "num_lower_bounds": found.num_lower_bounds,
        "num_below_bound": found.num_below_bound,
        "left_out": found.left_out,
    }


def _scores(scores: Sequence[Score]) -> pd.DataFrame:
    """A row per held-out record and tier."""
    import pandas as pd

    rows = [
        {
            "fingerprint": score.record.fingerprint,
            "cell_id": score.record.cell_id,
            "fold": score.fold,
            "tier": score.tier,
            "measured_phase": score.measured_phase,
            "predicted_phase": score.predicted_phase,
            "measured_bytes": score.measured_bytes,
            "predicted_bytes": score.predicted.value,
            "low_bytes": score.predicted.low,
            "high_bytes": score.predicted.high,
            "error": score.error,
            "is_outside": score.is_outside,
        }
        for score in scores
    ]
    return pd.DataFrame(rows, columns=[column.name for column in _SCORE_COLUMNS])


def _is_wrong(card: CardScore) -> bool:
    return bool(card.num_tight or card.num_false_fits or card.num_false_refusals)


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


def _unsigned(share: float) -> str:
    return percent(share, signed=False)


_SUMMARY_COLUMNS = [
    Column("group", "records"),
    Column("tier", "tier"),
    Column("num_records", "n", is_number=True),
    Column("mean_absolute", "mean error, %", text=_unsigned, is_number=True),
    Column("worst_absolute", "worst, %", text=_unsigned, is_number=True),
    Column("mean_signed", "mean signed, %", text=percent, is_number=True),
    Column("worst_under_prediction", "worst under, %", text=percent, is_number=True),
    Column("coverage", "coverage, %", text=lambda value: f"{100 * value:.0f}", is_number=True),
]
_CARD_COLUMNS = [
    Column("gpu", "GPU"),
    Column("num_right", "right", is_number=True),
    Column("num_tight", "tight", is_number=True),
    Column("num_false_fits", "false fits", is_number=True),
    Column("num_false_refusals", "false refusals", is_number=True),
]
_SCORE_COLUMNS = [
    Column("fingerprint"),
    Column("cell_id", "cell"),
    Column("fold"),
    Column("tier", "tier"),
    Column("measured_phase", "peak phase"),
    Column("predicted_phase"),
    Column("measured_bytes", "measured, B", text="{:,}".format, is_number=True),
    Column("predicted_bytes", "predicted, B", text="{:,}".format, is_number=True),
    Column("low_bytes"),
    Column("high_bytes"),
    Column("error", "error, %", text=percent, is_number=True),
    Column("is_outside"),
]
