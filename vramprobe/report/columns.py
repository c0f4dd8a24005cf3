"""The columns that several tables share: what a cell is, amounts in one unit, and errors in percent.

In: cells of a report. Out: Columns, with the exact value and its text. Never computes what a stage should.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vramprobe.options import OPTIONS
from vramprobe.records.record import RunRecord
from vramprobe.records.table import to_row
from vramprobe.report.cells import Cell
from vramprobe.report.definition import Column
from vramprobe.spec import CellSpec
from vramprobe.units import GIB, MIB, plural, word_for

_SMALLEST_PERCENT = 0.01  # an error below it is said to be below it; the CSV has it
_LONGEST_DETAIL = 200  # characters of a failure or a remark for people; the CSV has all


@dataclass(frozen=True)
class ByteUnit:
    """The unit of one table, so that its numbers compare."""

    name: str
    num_bytes: int
    num_decimals: int

    def text(self, value: float) -> str:
        """The number alone; the heading says the unit."""
        return f"{value / self.num_bytes:.{self.num_decimals}f}"

    def amount(self, name: str, heading: str | None) -> Column:
        """A column of bytes: exact in the CSV, in this unit for people."""
        return Column(name, heading and f"{heading}, {self.name}", text=self.text, is_number=True)


#: The unit of amounts that a GPU's memory is said in.
IN_GIB = ByteUnit("GiB", GIB, 2)


def unit_for(amounts: Iterable[int | None]) -> ByteUnit:
    """GiB where the smallest of these bytes fills one, else MiB."""
    known = [amount for amount in amounts if amount is not None]
    return IN_GIB if min(known, default=0) >= GIB else ByteUnit("MiB", MIB, 1)


def method_in_words(spec: CellSpec) -> str:
    """``full``, ``lora, r 16, all-linear``, ``qlora nf4, peft prep, r 16, q_v``."""
    if spec.method == "full":
        return "full"
    kind = "lora" if spec.method == "lora" else f"qlora {spec.quant}, {spec.kbit_prep} prep"
    targets = spec.lora_targets if isinstance(spec.lora_targets, str) else "+".join(spec.lora_targets or ())
    variants = [option.title for name, option in OPTIONS.items() if option.title and getattr(spec, name)]
    return ", ".join([kind, f"r {spec.lora_r}", targets, *variants])


def precision_in_words(spec: CellSpec) -> str:
    """The weights' dtype, ``+`` autocast, the adapters' own dtype in brackets."""
    base = spec.dtype if spec.autocast == "none" else f"{spec.dtype} + {spec.autocast}"
    return base if spec.lora_dtype is None else f"{base} ({spec.lora_dtype})"


def size_in_words(spec: CellSpec) -> str:
    """``2 × 512``, sequences by tokens, and how many such are accumulated."""
    steps = "" if spec.grad_accum == 1 else f", {spec.grad_accum} accumulated"
    return f"{spec.batch_size} × {spec.seq_len}{steps}"


def cell_row(cell: Cell) -> dict[str, Any]:
    """A cell's record as records/table.py has it, in words where tables have words, and its prediction."""
    row, spec = to_row(cell.record), cell.record.spec
    return row | {
        "model": spec.model_label,
        "method": method_in_words(spec),
        "precision": precision_in_words(spec),
        "optimizer": spec.optim,
        "batch_by_length": size_in_words(spec),
        "measured_bytes": cell.measured_bytes,
        "reserved_bytes": row["peak_reserved_bytes"],
        "device_bytes": row["peak_device_bytes"],
        "held_out": cell.held_out,
        "predicted_bytes": cell.predicted_bytes,
        "low_bytes": cell.low_bytes,
        "high_bytes": cell.high_bytes,
        "error_percent": cell.error_percent,
        "remark": cell.remark,
    }


def cell_columns() -> list[Column]:
    """The configuration. What all rows of a table share moves to its caption."""
    return [
        Column("fingerprint"),
        Column("cell_id"),
        Column("model", "model"),
        Column("method", "method"),
        Column("precision", "precision", is_condition=True),
        Column("optimizer", "optimizer", is_condition=True),
        Column("batch_by_length", "batch × length", is_number=True, is_condition=True),
        Column("gradient_checkpointing", "checkpointing", text=yes_no, is_condition=True),
    ]


def provenance(records: Sequence[RunRecord]) -> list[str]:
    """Lines on where comparable records come from: instrument, device, versions, how many, when."""
    if not records:
        return []
    attempts, cells = len(records), len({record.fingerprint for record in records})
    days = sorted({record.started_at[:10] for record in records})
    return [
        f"instrument {records[0].instrument}",
        f"device {records[0].environment.device_said}",
        *_emulators(records),
        _versions(records),
        f"{plural(attempts, 'record')} of {plural(cells, 'cell')}"
        + (f"; of {attempts - cells} more attempts only the one that counts is shown" if attempts > cells else ""),
        f"{word_for(records[0].instrument)} {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else ""),
    ]


def _emulators(records: Sequence[RunRecord]) -> list[str]:
    """Describe the basis of emulated records: the emulator, and the records' reads and verifications."""
    found = [record.emulation for record in records if record.emulation is not None]
    if not found:
        return []
    steered = sum(bool(one.num_steering_reads) for one in found)
    verified = [one.verification for one in found if one.verification is not None]
    parted = sum(not one.same for one in verified)
    return [
        f"emulator {' and '.join(sorted({one.emulator_version for one in found}))}; {steered} records with reads of "
        f"values that nobody computed and that could have steered the program; {len(verified)} verified under other "
        f"values, {parted} of them allocated otherwise"
    ]


def _versions(records: Sequence[RunRecord]) -> str:
    packages = sorted({package for record in records for package in record.environment.versions})
    known = []
    for package in packages:
        seen = dict.fromkeys(record.environment.versions.get(package) for record in records)
        known.append(f"{package} {' and '.join(version for version in seen if version) or 'absent'}")
    python = sorted({record.environment.python for record in records})
    return f"python {' and '.join(python)}, {', '.join(known)}"


def yes_no(value: bool) -> str:
    """A flag for people."""
    return "yes" if value else "no"


def signed_percent(value: float) -> str:
    """An error in percent with its sign; what is smaller than a hundredth is said to be."""
    return f"{value:+.2f}" if abs(value) >= _SMALLEST_PERCENT else f"≤ {_SMALLEST_PERCENT}"


def unsigned_percent(value: float) -> str:
    """The size of an error in percent."""
    return f"{value:.2f}" if value >= _SMALLEST_PERCENT else f"≤ {_SMALLEST_PERCENT}"


def shortened(text: str) -> str:
    """Others' words, at a length that a table bears."""
    return text if len(text) <= _LONGEST_DETAIL else text[: _LONGEST_DETAIL - 1] + "…"
