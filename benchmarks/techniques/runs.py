"""One technique's run: its command under ``vramprobe profile`` on an emulated GPU, and what is kept of the profile.

In: a base, the technique or none, an interpreter that has every package. Out: an entry of the journal: a dict.
"""

import hashlib
import re
import shlex
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import journal
from benchmarks.techniques.commands import command_of
from vramprobe.records.profile import ProfileRecord
from vramprobe.techniques.registry import Base, Technique

HERE = Path(__file__).resolve().parent
#: What every command of a Trainer has beside: it changes nothing in a step.
TRAINING = "--output_dir out --per_device_train_batch_size 1 --max_steps 8 --report_to none --save_strategy no"
LIMIT_SECONDS = 900
_ERROR = re.compile(r"(?!subprocess\.CalledProcess)[\w.]*Error: ")


def words_of(base: Base, several: list[Technique]) -> list[str]:
    """The command as a user types it beside train.py."""
    command = command_of(base, several)
    return [*command[:2], *shlex.split(TRAINING), *command[2:]]


def fingerprint(base: Base, several: list[Technique]) -> str:
    """Return a short hash of a run."""
    return hashlib.sha256("\0".join([base.gpu, *words_of(base, several)]).encode()).hexdigest()[:12]


def attempt(base: Base, several: list[Technique], python: Path) -> dict[str, Any]:
    """Run it once, and what it gave."""
    words = words_of(base, several)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        script = [str(HERE / word) if (HERE / word).is_file() else word for word in words[1:]]
        options = ["--emulate", base.gpu, "--empty-weights", "--steps-only"]
        environment = {"PYTHONPATH": str(HERE.parents[1]), "TOKENIZERS_PARALLELISM": "false"}
        command = [str(python.parent / words[0]), *script]
        ran = journal.limited(options, command, cwd=Path(folder), environment=environment, seconds=LIMIT_SECONDS)
        record, said = ran.record, f"TimeoutError: no end within {LIMIT_SECONDS} s" if ran.is_late else ran.said
        said = said.replace(folder, "FOLDER")
    entry = {
        "base": base.id,
        "techniques": [one.id for one in several],
        "fingerprint": fingerprint(base, several),
        "command": shlex.join(words),
        "gpu": base.gpu,
        "seconds": round(time.monotonic() - started),
        "packages": _versions(python, {"torch", "transformers", "peft", "trl"} | {one.package for one in several}),
    }
    if record is None or record.highest_rank is None or record.outcome.kind != "ok":
        return entry | {"outcome": _why_not(record, said, str(python.parents[1]))}
    return entry | {"outcome": "ok"} | _kept(record)


def _kept(record: ProfileRecord) -> dict[str, Any]:
    """Keep of a profile: bytes by phase and cause, the predicted step, host memory; no lines of anybody's files."""
    rank, step, host = record.highest_rank, record.step_time, record.host
    kept: dict[str, Any] = {
        "peak": rank.peak.model_dump(),
        "repeats": rank.repeats,
        "phases": {one.name: [one.allocated_bytes, one.reserved_bytes] for one in rank.phases},
        "at_peak": rank.at_peak.model_dump() if rank.at_peak else None,
        "warnings": record.warnings,
        "driver": record.environment.emulator,
    }
    if step is not None:
        kept["step"] = step.model_dump(exclude={"by_line", "unclaimed"})
    if host is not None:
        kept["host"] = {one.name: [one.total_bytes, one.pinned_bytes] for one in host.phases}
    return kept


def _why_not(record: ProfileRecord | None, said: str, environment: str) -> dict[str, Any]:
    """Say why there is no number: out of memory, or the command's last lines."""
    if record is not None and record.outcome.kind == "oom":
        oom = record.outcome
        return {
            "kind": "oom",
            "phase": oom.phase,
            "allocated_bytes": oom.allocated_bytes,
            "requested_bytes": oom.requested_bytes,
        }
    own = getattr(record.outcome, "last_lines", None) if record is not None else None
    lines = [line for line in said.splitlines() if line.strip()]
    if own and not own[-1].startswith("subprocess.CalledProcessError"):
        lines = own
    elif own:  # a launcher's last words, that its rank failed: the rank's own error stands before them
        lines = lines[: next((num for num, line in enumerate(lines, 1) if _ERROR.match(line)), len(lines))]
    plain = "\n".join(lines[-6:]).replace(str(HERE.parents[1]) + "/", "").replace(environment, "ENVIRONMENT")
    return {"kind": "error", "last_lines": plain.split("\n")}


def _versions(python: Path, packages: set[str]) -> dict[str, str | None]:
    """The versions of these packages in that environment."""
    folders = (python.parent.parent / "lib").glob("python3*/site-packages/*.dist-info")
    named = (folder.stem.rsplit("-", 1) for folder in sorted(folders))
    found = {name.lower().replace("_", "-"): version for name, version in named}
    return {name: found.get(name.lower().replace("_", "-")) for name in sorted(packages)}
