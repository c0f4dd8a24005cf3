"""Two profiles → what grew between them: the tiers, the causes and the lines of Python.

In: two ProfileRecords, before and after. Out: a Difference, of the rank with the highest peak in each. Bytes alive at
the two peaks are compared, which need not be in one phase: both phases are named.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import computed_field

from vramprobe.profile.diff_time import TimeDifference, time_difference
from vramprobe.records.frozen import FrozenModel
from vramprobe.records.phase_memory import Composition
from vramprobe.records.profile import ProfileEnvironment, ProfileRecord, RankProfile, last_profile
from vramprobe.records.shown import Shown
from vramprobe.units import format_bytes, parse_bytes, parse_share

Place = tuple[str, str]  # "file:line function", cause
_LINE = re.compile(r":(\d+) ")
#: The peaks that a limit of growth is about; the device tier has the context in it, which is assumed.
_LIMITED = ("allocated", "reserved")


class ProfileChange(FrozenModel):
    """One amount before and after, bytes; null where a side does not know it."""

    what: str
    before_bytes: int | None
    after_bytes: int | None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def grown_bytes(self) -> int | None:
        """After less before."""
        if self.before_bytes is None or self.after_bytes is None:
            return None
        return self.after_bytes - self.before_bytes


class SettingChange(FrozenModel):
    """A setting, or a library's version, that the two runs do not share; null where a side does not have it."""

    what: str
    before: str | None
    after: str | None


class Difference(FrozenModel, Shown):
    """``tiers``: allocated, reserved, device. ``causes``: all that either has. ``lines``: those that changed, the
    largest change first; a line that moved within its function is the same one. ``settings``: those that differ,
    given or a default; empty where a side recorded none.
    ``time``: of a step, predicted; null where a side has none.
    ``warnings``: what makes the two hard to compare.
    """

    before: str  # name of the profile
    after: str
    before_phase: str | None
    after_phase: str | None
    tiers: tuple[ProfileChange, ...]
    causes: tuple[ProfileChange, ...]
    lines: tuple[ProfileChange, ...]
    settings: tuple[SettingChange, ...] = ()
    time: TimeDifference | None = None
    warnings: tuple[str, ...]

    def headline(self) -> str:
        """Return by how much the allocated peak grew."""
        peak = next((one for one in self.tiers if one.grown_bytes is not None), None)
        if peak is None or peak.grown_bytes is None:
            return f"{self.before} and {self.after}: one has no peak"
        grown = f"{'grew' if peak.grown_bytes >= 0 else 'shrank'} by {format_bytes(abs(peak.grown_bytes))}"
        return f"{peak.what} peak {grown} from {self.before} to {self.after}"

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per tier, cause and line: bytes grown, before and after."""
        kinds = (("tier", self.tiers), ("cause", self.causes), ("line", self.lines))
        return [
            {
                "what": one.what,
                "kind": kind,
                "grown_bytes": one.grown_bytes,
                "before_bytes": one.before_bytes,
                "after_bytes": one.after_bytes,
            }
            for kind, changes in kinds
            for one in changes
        ]

    def remarks(self) -> list[str]:
        """Return what makes the two hard to compare."""
        return list(self.warnings)


def profile_at(path: str | Path) -> ProfileRecord:
    """Return the last profile of a journal, or that of a run's folder, as ``profile --folder`` keeps it.

    Raises StoreError where there is none.
    """
    if Path(path, "run.json").is_file():
        from vramprobe.profile.analyse import analyse

        return analyse(Path(path))
    return last_profile(path)


def diff(before: ProfileRecord | str | Path, after: ProfileRecord | str | Path) -> Difference:
    """Return what grew between two profiles, each a record, a .jsonl file whose last profile counts, or a run's folder.

    Raises StoreError for a file without a profile.
    """
    one, other = (profile_at(given) if isinstance(given, str | Path) else given for given in (before, after))
    return compare(one, other)


def compare(before: ProfileRecord, after: ProfileRecord) -> Difference:
    """Compare two profiles: bytes and seconds that grew from ``before`` to ``after``; a decrease is negative."""
    one, other = before.highest_rank, after.highest_rank
    return Difference(
        before=before.name,
        after=after.name,
        before_phase=one and one.at_peak_of,
        after_phase=other and other.at_peak_of,
        tiers=tuple(_tiers(one, other)),
        causes=tuple(_causes(one, other)),
        lines=tuple(_lines(one, other)),
        settings=tuple(_settings(before.environment, after.environment)),
        time=time_difference(before, after),
        warnings=tuple(_warnings(before, after)),
    )


def parse_limit(text: str) -> Callable[[int], int]:
    """The most bytes that may be added to a baseline's, from ``2%``, ``0`` or ``200MiB``. Raises SpecError."""
    if re.fullmatch(r"\s*[0-9.]+\s*%?\s*", text):
        share = parse_share(text)
        return lambda before_bytes: int(before_bytes * share)
    limit_bytes = parse_bytes(text)
    return lambda before_bytes: limit_bytes


def too_much(difference: Difference, limit: Callable[[int], int]) -> list[str]:
    """A sentence for each peak, allocated and reserved, that grew by more than ``limit`` allows; and one where that
    cannot be told."""
    found = []
    known = [one for one in difference.tiers if one.what in _LIMITED and one.grown_bytes is not None]
    if len(known) < len(_LIMITED):
        found.append("one of the two profiles has no peak, so that its growth is not known")
    for one in known:
        assert one.before_bytes is not None
        assert one.grown_bytes is not None
        if one.grown_bytes > (allowed := limit(one.before_bytes)):
            share = f" ({one.grown_bytes / one.before_bytes:.1%})" if one.before_bytes else ""
            over = format_bytes(one.grown_bytes - allowed)
            found.append(f"{one.what} grew by {format_bytes(one.grown_bytes)}{share}, {over} too many")
    return found


def _tiers(one: RankProfile | None, other: RankProfile | None) -> Iterator[ProfileChange]:
    for tier in ("allocated", "reserved", "device"):
        found = [side.peak and getattr(side.peak, f"{tier}_bytes") if side else None for side in (one, other)]
        if found != [None, None]:
            yield ProfileChange(what=tier, before_bytes=found[0], after_bytes=found[1])


def _causes(one: RankProfile | None, other: RankProfile | None) -> Iterator[ProfileChange]:
    if one is None or other is None or one.at_peak is None or other.at_peak is None:
        return
    before, after = _parts(one.at_peak), _parts(other.at_peak)
    for cause in before:
        if before[cause] or after[cause]:
            yield ProfileChange(what=cause, before_bytes=before[cause], after_bytes=after[cause])


def _parts(at_peak: Composition) -> dict[str, int]:
    return {name.removesuffix("_bytes"): size for name, size in at_peak.parts().items()}


def _lines(one: RankProfile | None, other: RankProfile | None) -> list[ProfileChange]:
    if one is None or other is None or one.at_peak is None or other.at_peak is None:
        return []
    before, after = _by_place(one), _by_place(other)
    before = {_moved_to(place, before, after): size for place, size in before.items()}
    found = []
    for place in dict.fromkeys([*before, *after]):
        sizes = before.get(place, 0), after.get(place, 0)
        if sizes[0] != sizes[1]:
            what = f"{place[0]} ({place[1].replace('_', ' ')})"
            found.append(ProfileChange(what=what, before_bytes=sizes[0], after_bytes=sizes[1]))
    return sorted(found, key=lambda change: (-abs(change.grown_bytes or 0), change.what))


def _moved_to(place: Place, before: Mapping[Place, int], after: Mapping[Place, int]) -> Place:
    """Return a line's place in the other version: in a function, the lines that only one side has are the same in their
    order.
    """
    gone, new = (
        sorted((one for one in side if one not in others and _function(one) == _function(place)), key=_number)
        for side, others in ((before, after), (after, before))
    )
    return new[gone.index(place)] if place in gone and len(gone) == len(new) else place


def _by_place(rank: RankProfile) -> dict[Place, int]:
    return {(one.place, one.cause or ""): one.num_bytes for one in rank.by_line}


def _function(place: Place) -> Place:
    """The place without the number of its line."""
    return _LINE.sub(" ", place[0]), place[1]


def _number(place: Place) -> int:
    found = _LINE.search(place[0])
    return int(found[1]) if found else 0


def _settings(before: ProfileEnvironment, after: ProfileEnvironment) -> Iterator[SettingChange]:
    sides = [(before.versions, after.versions)]
    if before.settings and after.settings:
        sides.insert(0, (before.settings, after.settings))
    for one, other in sides:
        for what in dict.fromkeys([*one, *other]):
            if one.get(what) != other.get(what):
                yield SettingChange(what=what, before=one.get(what), after=other.get(what))


def _warnings(before: ProfileRecord, after: ProfileRecord) -> Iterator[str]:
    for what, one, other in (
        ("device", before.environment.device_said, after.environment.device_said),
        ("torch", before.environment.torch, after.environment.torch),
        ("number of ranks", len(before.ranks), len(after.ranks)),
    ):
        if one != other:
            yield f"{what} differs: {one} and {other}"
    for side, record in (("before", before), ("after", after)):
        if record.outcome.kind != "ok":
            yield f"{side} ended as {record.outcome.kind}: its peak is what was seen until then"
