"""One run under one set of libraries, by ``vramprobe profile`` on an emulated card.

In: a Run, an interpreter and its packages. Out: a journal's entry: ``ok`` with the peaks, what was alive then and the
largest blocks with the lines that asked for them, ``oom``, ``timeout`` or ``error`` with its last words.
"""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import journal
from benchmarks.frameworks.stacks import fingerprint_of
from benchmarks.versions.runs import CARD, Run
from vramprobe.emulate.version import emulator_version
from vramprobe.records.profile import ProfileRecord, RankProfile

REPOSITORY = Path(__file__).resolve().parents[2]
_MOST_BLOCKS = 10
_MOST_LINES = 12


def attempt(run: Run, python: Path, pins: dict[str, str], *, limit_seconds: float) -> dict[str, Any]:
    """The entry of one attempt, but for the stack's name."""
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="vramprobe-version-") as home:
        work = Path(home)
        model = work / run.model
        model.mkdir()
        (model / "config.json").write_text(json.dumps(run.config))
        told = profiled(run.command(python, model), work, CARD, python=python, limit_seconds=limit_seconds)
    return {
        "run": run.name,
        "fingerprint": run.fingerprint,
        "pins_fingerprint": fingerprint_of(pins),
        "emulator_version": emulator_version(),
        "seconds": round(time.time() - started, 1),
        "ended": round(time.time()),
        **told,
    }


def profiled(
    command: list[str], work: Path, cards: str, *, python: Path, limit_seconds: float, seq_len: int | None = None
) -> dict[str, Any]:
    """The part of an entry that is this command's own. It runs in ``work``, by ``python`` or what lies beside it."""
    hidden = {str(REPOSITORY): "", str(work): "", str(python.parents[1]): "", str(Path.home()): "~/"}
    options = ["--emulate", cards, "--empty-weights", "--steps-only", "--trace", "step"]
    options += [] if seq_len is None else ["--seq-len", str(seq_len)]
    environment = {
        "PYTHONPATH": str(REPOSITORY),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(work / "hf"),
        "TMPDIR": str(work),
    }
    ran = journal.limited(options, command, cwd=work, environment=environment, seconds=limit_seconds)
    said = _last_words(ran.said, hidden)
    return {"outcome": "timeout", "said": said} if ran.is_late else entry_of(ran.record, said)


def entry_of(profile: ProfileRecord | None, said: str) -> dict[str, Any]:
    """The entry's own part of a profile; ``said``: the command's last words."""
    rank = profile.highest_rank if profile is not None else None
    if profile is None or profile.outcome.kind != "ok" or rank is None or rank.peak is None or not rank.repeats:
        return {"outcome": "oom" if profile is not None and profile.outcome.kind == "oom" else "error", "said": said}
    steering = (
        []
        if profile.emulation is None
        else [read.line for read in profile.emulation.reads if read.could_have_steered and read.line]
    )
    return {
        "outcome": "ok",
        "peak_bytes": rank.peak.allocated_bytes,
        "reserved_bytes": rank.peak.reserved_bytes,
        "phase": rank.peak.phase,
        "phases": {one.name: one.allocated_bytes for one in rank.phases},
        "at_peak": None if rank.at_peak is None else rank.at_peak.model_dump(),
        "largest": _largest(rank),
        "num_steps": rank.num_steps,
        "steering_lines": steering,
        "warnings": profile.warnings,
    }


def _largest(rank: RankProfile) -> list[dict[str, Any]]:
    blocks = sorted(rank.largest, key=lambda one: -one.total_bytes)[:_MOST_BLOCKS]
    return [one.model_dump(exclude_none=True) for one in blocks]


def _last_words(said: str, hidden: dict[str, str]) -> str:
    """Without this machine's paths: the journal is published."""
    text = "\n".join(said.replace("\r", "\n").splitlines()[-_MOST_LINES:])
    for words, instead in hidden.items():
        text = text.replace(f"{words}{os.sep}", instead)
    return text
