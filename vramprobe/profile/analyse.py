"""A run's raw files → its ProfileRecord.

In: the folder of a run, and cards to judge it by (cards.py). Out: the record. Runs nothing and looks at no device; what
is missing is said in the record's warnings.
"""

import re
import shlex
import signal
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from vramprobe.catalog import gpu_seen
from vramprobe.profile import cards, engines, ranks, rollout
from vramprobe.profile.analyzed_rank import AnalyzedRank, alive_at_oom, homes_of, see
from vramprobe.profile.card_times import with_times
from vramprobe.profile.data_batches import data_batches
from vramprobe.profile.data_fragmentation import data_fragmentation
from vramprobe.profile.growth import growth_of
from vramprobe.profile.host import host_memory
from vramprobe.profile.monitors import CardSeen
from vramprobe.profile.notes import last_lines_of, library_notes, not_served, unread_images, why_not
from vramprobe.profile.places import Places
from vramprobe.profile.raw import RawOom, RawRank, RawRun
from vramprobe.profile.run_files import read_run
from vramprobe.profile.served import served_here
from vramprobe.profile.step_time import measured_step_seconds, step_time
from vramprobe.profile.steps_differ import repeats, step_peaks
from vramprobe.recommend.prices import chosen, shipped_offers
from vramprobe.records.engine import RequestAnswer
from vramprobe.records.profile import ProfileEnvironment, ProfileRecord, Replaced
from vramprobe.records.profile_outcomes import (
    ProfileError,
    ProfileInterrupted,
    ProfileLost,
    ProfileOk,
    ProfileOom,
    ProfileOutcome,
)
from vramprobe.records.record import MAX_READS, Emulation, ValueRead, Verification, new_attempt_id
from vramprobe.units import format_bytes

_MAX_TAIL = 40  # last lines of stderr
_MAX_CAUGHT = 5  # places of caught OOMs that are named, of one process
_AT_WORK = ("forward", "backward", "optimizer_step", "evaluation", "generation")
_BY_SOMEBODY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNALLED = re.compile(r"(torch\.[\w.]+\.)?SignalException: .*got signal: \d+")  # torchrun's own, of a signal to it


def analyse(
    folder: Path,
    *,
    gpus: Sequence[str] | str | None = None,
    host_memory_bytes: int | None = None,
    replay_steps: int | None = None,
) -> ProfileRecord:
    """The profile of the run in ``folder``, with a verdict for each of ``gpus`` (``"all"``: of the catalog) and for a
    host with so much memory. ``replay_steps``: of the run's batches through the allocator, under several settings.

    Raises StoreError for files that are none of a run's, UnknownName for a card.
    """
    run = read_run(folder)
    record = _record(run, host_memory_bytes, replay_steps)
    record = record.model_copy(update={"served": served_here(record)})
    if gpus is None:
        return record
    found = cards.verdicts(run, record, gpus)
    timed = with_times(run, found, chosen(shipped_offers()), date.today())
    return record.model_copy(update={"cards": timed})


def _record(run: RawRun, host_memory_bytes: int | None, replay_steps: int | None) -> ProfileRecord:
    launcher = run.launcher or {}
    warnings = list(run.warnings)
    found, seen_by_rank = [], []
    seen_cards = [CardSeen(**card) for card in launcher.get("cards") or ()]
    workers = engines.workers_of(run.engine_logs)
    for raw in run.ranks:
        remarks = ranks.Remarks(raw.name)
        seen = see(raw, launcher.get("folder"))
        profile = ranks.rank_profile(raw, seen, remarks, seen_cards)
        context_bytes = (launcher.get("emulator") or {}).get("context_bytes")
        homes = homes_of(raw.process, launcher.get("folder"))
        batches = data_batches(raw, context_bytes)
        creep = batches and data_fragmentation(raw, seen, context_bytes, replay_steps, len(run.ranks))
        more = {
            "rollout": rollout.stages(raw, seen),
            "batches": batches and batches.model_copy(update={"creep": creep}),
            "repeats": repeats(raw.phases, raw.num_steps),
            "step_peaks": step_peaks(raw.phases, raw.num_steps, seen),
            "growth": growth_of(raw, seen, context_bytes, homes),
            "engine": workers.get(raw.process.pid),
            "doing": raw.doing.said(homes) if raw.doing and (raw.end is None or _is_cut(launcher)) else None,
        }
        found.append(profile.model_copy(update=more))
        if unmapped := rollout.unmapped_bytes(raw):
            remarks.add(
                f"torch counts what vLLM's sleep mode unmaps, up to {format_bytes(unmapped)}, as allocated and "
                "reserved; the device tier has what the GPU holds"
            )
        seen_by_rank.append(seen)
        if raw.end is None and run.launcher is not None:
            remarks.add(
                "it has not written what it held before its server was ended: causes and lines are not known"
                if launcher.get("answers")
                else "it was killed, or ended without a word; what it did until then is shown"
            )
        for said in raw.warnings:
            remarks.add(said)
        warnings += remarks.texts
    beside = rollout.stages_beside(run.ranks, seen_by_rank)
    found = [one.model_copy(update={"rollout": beside.get(one.pid, one.rollout)}) for one in found]
    if alone := (launcher.get("options") or {}).get("one_rank"):
        warnings.append("rank {} of {} ran alone: the others did not run, and are taken to be like it".format(*alone))
    warnings += [str(one["what"]) for one in run.replaced if one.get("kind") == "missing"]
    first = run.ranks[0] if run.ranks else None
    if first is None:
        warnings.append("no process used a GPU through torch: nothing was seen")
        homes = [launcher["folder"]] if launcher.get("folder") else []
        if not 0 < (launcher.get("exit_status") or 0) < 128:  # its exception says more
            warnings += [f"a process was last seen {one.said(homes)}" for one in run.doing]
    warnings += library_notes(_libraries(launcher))
    if launcher.get("exit_status") and not launcher.get("stopped"):
        warnings += filter(None, [why_not(_tail(launcher))])
        warnings += map(not_served, (launcher.get("emulator") or {}).get("static_runtimes", ()))
    emulation, environment = _emulation(run, first), _environment(launcher, first)
    time = step_time(run, warnings.append)
    if time is not None and len(run.ranks) == 1:  # of several, a rank may have a part of each sample
        warnings += unread_images(run.replaced, time.tokens, time.samples)
    command = [str(word) for word in launcher.get("command") or (first.process.argv if first else ())]
    return ProfileRecord(
        attempt_id=new_attempt_id(),
        name=shlex.join(_script_words(command)),
        command=command,
        started_at=_started_at(launcher, first),
        instrument="emulated" if emulation or (first is None and launcher.get("emulate")) else "cuda",
        outcome=_outcome(run, seen_by_rank, warnings),
        environment=environment,
        engine=engines.account_of(run.engine_logs, workers, environment.versions),
        answers=[RequestAnswer(**one) for one in launcher.get("answers") or ()],
        emulation=emulation,
        context_bytes=emulation.context_bytes if emulation else ranks.context_bytes(run.ranks),
        ranks=found,
        host=host_memory(run.ranks, host_memory_bytes),
        step_time=time,
        measured_step_seconds=measured_step_seconds(run),
        replaced=[_only(Replaced, one) for one in run.replaced if one.get("kind") != "missing"],
        warnings=ranks.merged(dict.fromkeys(warnings)),
    )


def _script_words(command: Sequence[str]) -> Sequence[str]:
    """The command from the script on: without the interpreter's path."""
    is_python = bool(command) and Path(command[0]).name.startswith("python")
    return command[1:] if is_python and len(command) > 1 else command


def _started_at(launcher: Mapping[str, Any], first: RawRank | None) -> str:
    started_ns = launcher.get("started_ns") or (first.process.started_ns if first else 0)
    return datetime.fromtimestamp(started_ns / 1e9, UTC).isoformat(timespec="milliseconds")


def _environment(launcher: Mapping[str, Any], first: RawRank | None) -> ProfileEnvironment:
    own = {"vramprobe": launcher.get("vramprobe")}
    if first is None:
        return ProfileEnvironment(device_name=launcher.get("emulate"), versions=own)
    process, emulator = first.process, launcher.get("emulator") or {}
    more = {
        "alloc_conf": first.history.allocator.get("alloc_conf") if first.history else None,
        "emulator": str(emulator.get("version", "unknown")) if process.emulated else None,
        "versions": dict(process.versions) | own,
        "settings": dict(first.settings),
    }
    return _only(ProfileEnvironment, vars(process) | more)


def _emulation(run: RawRun, first: RawRank | None) -> Emulation | None:
    """Describe the basis of a run on an emulated card, with the values' report of the first process that has one."""
    if first is None or not first.process.emulated:
        return None
    emulator = (run.launcher or {}).get("emulator") or {}
    reports = [raw.values for raw in run.ranks if raw.values is not None]
    report: Mapping[str, Any] = reports[0] if reports else {}
    policy = report.get("policy") or {}
    verified = [raw.verification for raw in run.ranks if raw.verification is not None]
    verified = next((one for one in verified if not one.get("same")), verified[0] if verified else None)
    known = gpu_seen(first.process.device_name or "")
    return Emulation(
        card=known.short_name if known else str(first.process.device_name),
        num_cards=emulator.get("num_cards") or max(len(run.ranks), 1),
        emulator_version=str(emulator.get("version", "unknown")),
        torch_build=first.process.torch or "unknown",
        contents=policy.get("contents", "unknown"),
        routing=policy.get("routing", "unknown"),
        context_bytes=emulator.get("context_bytes", 0),
        graph_bytes=max((one["graph_bytes"] for one in reports if "graph_bytes" in one), default=None),
        is_busy=emulator.get("is_busy", False),
        num_reads=_sum(reports, "num_reads"),
        num_steering_reads=_sum(reports, "num_reads_that_could_have_steered"),
        reads=[_only(ValueRead, read) for read in report.get("reads", ())[:MAX_READS]],
        verification=None if verified is None else _only(Verification, verified),
    )


def _only(kind: Any, values: Mapping[str, Any]) -> Any:
    """``kind`` from the fields that it has; a hook may say more."""
    return kind(**{name: value for name, value in values.items() if name in kind.model_fields})


def _sum(reports: Iterable[Mapping[str, Any]], name: str) -> int | None:
    known = [one[name] for one in reports if one.get(name) is not None]
    return sum(known) if known else None


def _outcome(run: RawRun, seen: Sequence[AnalyzedRank | None], warnings: list[str]) -> ProfileOutcome:
    """Derive the command's outcome. The program's own error counts as OOM if it ran out of memory and did not go on."""
    launcher = run.launcher
    if launcher is None or launcher.get("ended_ns") is None:
        return ProfileLost(known=f"{len(run.ranks)} processes wrote until the command's end was no longer watched")
    status, number = launcher.get("exit_status"), launcher.get("signal")
    if launcher.get("stopped") or (status == 0 and not number):
        for raw in run.ranks:
            warnings += _caught(raw, launcher)
        return ProfileOk(stopped=bool(launcher.get("stopped")))
    for raw, history in zip(run.ranks, seen, strict=True):
        if raw.ooms and _ended_by(raw):
            return _oom(raw, history, launcher)
    if _is_cut(launcher) or (run.uncaught and _SIGNALLED.match(run.uncaught[0].error)):
        return ProfileInterrupted(signal=number)
    return _error(run, status, number)


def _is_cut(launcher: Mapping[str, Any]) -> bool:
    """Return True if a signal or Ctrl-C ended the command."""
    return launcher.get("signal") in _BY_SOMEBODY or launcher.get("exit_status") == 130


def _error(run: RawRun, status: int | None, number: int | None) -> ProfileError:
    """With the exception that came first: a launcher's own last lines are of what followed."""
    launcher = run.launcher or {}
    ended = ProfileError(exit_status=status, signal=number, last_lines=_tail(launcher))
    if not run.uncaught:
        return ended
    first = run.uncaught[0]
    place = Places((), [launcher["folder"]] if launcher.get("folder") else []).of_stack(first.stack)
    said = {"rank": first.rank, "exception": first.error, "line": place.line, "function": place.function}
    return ended.model_copy(update=said)


def _caught(raw: RawRank, launcher: Mapping[str, Any]) -> list[str]:
    """The OOMs of a process that went on, each place once, in order."""
    places = Places((), homes_of(raw.process, launcher.get("folder")))
    found: dict[tuple[Any, ...], list[RawOom]] = {}
    for one in raw.ooms:
        found.setdefault((one.phase, ranks.line_said(places.of_stack(one.stack))), []).append(one)
    said = []
    for (phase, line), alike in found.items():
        most = max((one.requested_bytes or 0) for one in alike)
        steps = list(dict.fromkeys(one.step for one in alike if one.step is not None))
        when = (phase or "an unknown phase") + (f" of step {steps[0]}" if len(steps) == 1 else "")
        times = f"{len(alike)} times" if len(alike) > 1 else "once"
        said.append(f"{raw.name} ran out of memory {times} and went on: in {when}, for {format_bytes(most)}, at {line}")
    more = len(said) - _MAX_CAUGHT
    return said[:_MAX_CAUGHT] + ([f"{raw.name} ran out at {more} more places and went on"] if more > 0 else [])


def _tail(launcher: Mapping[str, Any]) -> list[str]:
    return last_lines_of([str(line) for line in launcher.get("tail") or ()], _libraries(launcher))[-_MAX_TAIL:]


def _libraries(launcher: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the emulated driver's notes on NVIDIA's libraries (notes.py); none for a real GPU."""
    return (launcher.get("emulator") or {}).get("libraries") or {}


def _ended_by(raw: RawRank) -> bool:
    """Return True if the last OOM was the end: no training phase began after it."""
    last = raw.ooms[-1]
    return not any(
        phase.name in _AT_WORK and last.time_ns is not None and phase.start_ns > last.time_ns for phase in raw.phases
    )


def _oom(raw: RawRank, seen: AnalyzedRank | None, launcher: Mapping[str, Any]) -> ProfileOom:
    last = raw.ooms[-1]
    place = Places((), homes_of(raw.process, launcher.get("folder"))).of_stack(last.stack)
    more = {
        "rank": raw.process.rank,
        "alive": None if seen is None else alive_at_oom(seen, last.phase, last.step),
        "exit_status": launcher.get("exit_status"),
        "last_lines": _tail(launcher),
    }
    return _only(ProfileOom, vars(last) | vars(place) | more)
