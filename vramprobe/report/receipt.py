"""Receipt of a record: what it took, on which GPU, by which command and libraries, and a hash of the whole record.

In: a RunRecord. Out: the receipt as a dict of plain values, and as Markdown to paste into an issue or beside figures
of others. What identifies a machine (the GPU's UUID, paths) is not in it. Never runs a cell.
"""

import hashlib
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vramprobe.errors import SpecError, VramprobeError
from vramprobe.options import as_typed
from vramprobe.records import store
from vramprobe.records.record import RunRecord
from vramprobe.records.table import describe_outcome
from vramprobe.resolve import option_names, resolve
from vramprobe.spec import CellSpec
from vramprobe.units import format_bytes, word_for

FORMAT = 1
_ALWAYS = ("model", "method", "batch_size", "seq_len")


def receipts(results: str | Path, cell: str | None = None) -> list[dict[str, Any]]:
    """The receipt of each record of a results folder or file that counts: of several attempts at a cell the latest that
    ended. ``cell``: of that one alone, by its id or fingerprint. Raises SpecError where there is none.
    """
    records = store.latest_by_fingerprint(store.read(results).records).values()
    found = [record for record in records if cell in (None, record.cell_id, record.fingerprint)]
    if not found:
        known = ", ".join(record.cell_id for record in list(records)[:3])
        raise SpecError(f"cell: {cell!r} given, and {results} has no record of it; it has, for instance, {known}")
    return [receipt_of(record) for record in found]


def receipt_of(record: RunRecord) -> dict[str, Any]:
    """The receipt: bytes as integers with the unit last, null where it is not known; ``sha256`` is of the record's line
    in its journal, so that whoever has both can tell that they belong together.
    """
    peak, environment = record.peak, record.environment
    return {
        "receipt": FORMAT,
        "grade": word_for(record.instrument) if record.instrument in ("cuda", "emulated", "cpu") else record.instrument,
        "cell": record.cell_id,
        "outcome": describe_outcome(record.outcome) or record.outcome.kind,
        "allocated_bytes": peak and peak.allocated_bytes,
        "reserved_bytes": peak and peak.reserved_bytes,
        "device_bytes": peak and peak.device_bytes,
        "context_bytes": record.context_bytes,
        "peak_phase": peak and peak.phase,
        "step_seconds": record.timing and record.timing.median_step_seconds,
        "gpu": environment.device_said,
        "gpu_total_bytes": environment.nvml_total_bytes or environment.device_total_bytes,
        "driver": environment.driver_version,
        "cuda": environment.cuda_version,
        "alloc_conf": environment.alloc_conf,
        "command": command_of_cell(record.spec, record.emulation.card if record.emulation else None),
        "libraries": {name: version for name, version in environment.versions.items() if version is not None},
        "python": environment.python,
        "platform": environment.platform,
        "commit": environment.commit,
        "dirty": environment.dirty,
        "started_at": record.started_at,
        "fingerprint": record.fingerprint,
        "sha256": hashlib.sha256(record.to_json_line().encode()).hexdigest(),
    }


def command_of_cell(spec: CellSpec, emulated: str | None = None) -> str | None:
    """The shortest `vramprobe measure` that resolves to ``spec``; None where no options do (a model of one's own)."""
    words: dict[str, Any] = {name: getattr(spec, name) for name in _ALWAYS}
    options = [name for name in option_names() if name in CellSpec.model_fields]
    try:
        for _ in range(3):  # an option may change the defaults of others
            found = resolve(device=spec.device, **words)
            if found == spec:
                where = ["--emulate", emulated] if emulated else ["--device", spec.device]
                return shlex.join(["vramprobe", "measure", *where, *as_typed(words)])
            words |= {name: getattr(spec, name) for name in options if getattr(found, name) != getattr(spec, name)}
    except VramprobeError:
        return None
    return None


def as_text(receipts: Iterable[dict[str, Any]]) -> str:
    """The receipts as Markdown: a heading and a table of what is known for each."""
    lines: list[str] = []
    for receipt in receipts:
        lines += [f"## {receipt['cell']}, {receipt['grade']}", "", "| | |", "|---|---|"]
        for name, value in receipt.items():
            if value is None or value == {} or name in ("receipt", "grade", "cell"):
                continue
            lines.append(f"| {name.removesuffix('_bytes').replace('_', ' ')} | {_shown(name, value)} |")
        lines.append("")
    return "\n".join(lines)


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return f"{value:,} B ({format_bytes(value)})"
    if name == "libraries":
        return ", ".join(f"{package} {version}" for package, version in value.items())
    return f"`{value}`" if name in ("command", "sha256", "fingerprint") else str(value)
