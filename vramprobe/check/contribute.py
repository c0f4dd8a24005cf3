"""Contribute: records → one file to send, without what identifies a machine or a person.

In: results that pass check. Out: a new .jsonl file and what was taken out of it. Bytes, times and versions stay as they
were measured; the source is not changed.
"""

import getpass
import hashlib
import json
import re
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from vramprobe.check import CheckReport, check
from vramprobe.errors import IncomparableRecords, StoreError
from vramprobe.records import store, writing
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec

#: The folders of an absolute path; its last part stays.
_FOLDERS = re.compile(r"(?<![\w.:/…~])~?/(?:[^\s/'\":,;()<>]+/)+")
_MAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_ADDRESS = re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b")
_HIDDEN = "…"
#: Shorter names are also words.
_SHORTEST_NAME = 4


class Contribution(NamedTuple):
    """A file to send. ``stripped``: by field, in how many records something was taken out."""

    file: Path
    num_records: int
    stripped: dict[str, int]
    report: CheckReport


def contribute(results: str | Path, out: str | Path | None = None, *, strip: Sequence[str] = ()) -> Contribution:
    """Write the records under ``results`` to a new file (default: contribution-<its hash>.jsonl in this folder).

    ``strip``: further words to take out, such as a project's name. Raises IncomparableRecords where check finds an
    error, StoreError where the file cannot be written.
    """
    report = check(results)
    errors = [f"{one.where}: {one.message}" for one in report.findings if one.severity == "error"]
    if errors:
        raise IncomparableRecords(
            f"{results} does not pass `vramprobe check`, {len(errors)} errors, the first: {errors[0]}"
        )
    records = store.read(results).records
    words, stripped = _words(strip), Counter[str]()
    lines = []
    for record in records:
        clean, fields = anonymous(record, words)
        stripped.update(fields)
        lines.append(clean.to_json_line())
    text = "".join(f"{line}\n" for line in lines)
    file = Path(out or f"contribution-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl")
    _write_and_check(file, text)
    return Contribution(file, len(records), dict(stripped), report)


def anonymous(record: RunRecord, words: Sequence[str] = ()) -> tuple[RunRecord, set[str]]:
    """The record without what identifies a machine or a person, and the fields that something was taken out of."""
    values = record.model_dump(mode="json")
    environment = values["environment"]
    clean = {
        "started_at": record.started_at[:10],  # the day
        "environment": environment
        | {
            "device_uuid": None,
            "platform": environment["platform"].split("-")[0],  # without the kernel's build, often the host's own
            "isolation_reason": _without(environment["isolation_reason"], words),
        },
        "sweep": _without(record.sweep, words),
        "warnings": _without(values["warnings"], words),
        "outcome": _without(values["outcome"], words),
        "emulation": _without(values["emulation"], words),
        "spec": _without(values["spec"], words),
    }
    spec = CellSpec.model_validate_json(json.dumps(clean["spec"]))
    clean |= {"fingerprint": spec.fingerprint, "cell_id": spec.cell_id}  # a path may have been a part of them
    fields = {key for key, value in clean.items() if key != "environment" and value != values[key]}
    fields |= {key for key, value in clean["environment"].items() if value != environment[key]}
    return RunRecord.model_validate_json(json.dumps(values | clean)), fields


def _without(value: Any, words: Sequence[str]) -> Any:
    """``value`` with the folders, addresses and words taken out of every text in it."""
    if isinstance(value, dict):
        return {key: _without(one, words) for key, one in value.items()}
    if isinstance(value, list):
        return [_without(one, words) for one in value]
    if not isinstance(value, str):
        return value
    text = _FOLDERS.sub(f"{_HIDDEN}/", value)
    for pattern in (_MAIL, _ADDRESS, *(re.compile(rf"\b{re.escape(word)}\b", re.IGNORECASE) for word in words)):
        text = pattern.sub(_HIDDEN, text)
    return text


def _words(strip: Sequence[str]) -> list[str]:
    """The names of this user and this machine, and what else is to be taken out."""
    names = [socket.gethostname(), socket.gethostname().split(".")[0]]
    with suppress(KeyError, OSError):
        names.append(getpass.getuser())
    return [*strip, *(name for name in dict.fromkeys(names) if len(name) >= _SHORTEST_NAME)]


def _write_and_check(file: Path, text: str) -> None:
    """Write a new file that passes check as its source did; none is left where it does not."""
    if file.exists():
        raise StoreError(f"{file} is there already; name a new one with --out")
    writing.require_writable(file)
    file.write_text(text)
    errors = [one for one in check(file).findings if one.severity == "error"]
    if errors:
        file.unlink()
        raise StoreError(f"what was stripped does not pass check any more: {errors[0].message}")
