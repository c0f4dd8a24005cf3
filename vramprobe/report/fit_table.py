"""A fit → a table: what each card adds to a prediction, as the median and how far nine in ten further records stay.

In: a CardFit. Out: a Table; ratios in percent, the device's memory beyond the allocator in bytes.
"""

from __future__ import annotations

from typing import Any

from vramprobe.model.card_fit import CardFit, Gaps, Spread
from vramprobe.report.definition import Column, Table
from vramprobe.units import format_bytes, word_for

_COLUMNS = (
    Column("card", "records of"),
    Column("num_records", "n", is_number=True),
    Column("allocated", "allocated", is_number=True),
    Column("reserved", "reserved", is_number=True),
    Column("reserved_over_allocated", "reserved / allocated", is_number=True),
    Column("device", "device − reserved", is_number=True),
)


def fit_table(model: CardFit) -> Table:
    """Return a row for all records, one per method, one per card with enough of its own; a column that no record fills
    is left out.
    """
    empty = dict.fromkeys(column.name for column in _COLUMNS)
    methods = [empty | {"card": name, "allocated": in_percent(own)} for name, own in model.overall.by_method.items()]
    cards = [_row(name, gaps) for name, gaps in model.by_card.items()] if len(model.cards) > 1 else []
    rows = [_row("all", model.overall), *methods, *cards]
    filled = [column for column in _COLUMNS if any(row[column.name] is not None for row in rows)]
    return Table(title=f"{word_for(model.instrument).capitalize()} over predicted memory", columns=filled, rows=rows)


def in_percent(spread: Spread) -> str:
    """Return a ratio's median, and how far nine in ten further records stay: ``100.02 ± 0.31 %``."""
    return f"{100 * spread.value:.2f} ± {100 * (spread.high - spread.value):.2f} %"


def _row(name: str, gaps: Gaps) -> dict[str, Any]:
    device = gaps.device_over_reserved_bytes
    return {
        "card": name,
        "num_records": gaps.num_records,
        "allocated": in_percent(gaps.allocated),
        "reserved": gaps.reserved and in_percent(gaps.reserved),
        "reserved_over_allocated": gaps.reserved_over_allocated and in_percent(gaps.reserved_over_allocated),
        "device": device and _in_bytes(device),
    }


def _in_bytes(spread: Spread) -> str:
    return f"{format_bytes(round(spread.value))} ± {format_bytes(round(spread.high - spread.value))}"
