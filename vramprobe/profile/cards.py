"""Would the run have fitted on another card? Its own sequence of allocations, replayed through the caching allocator.

In: a run and its record, the cards to judge. Out: a CardVerdict each, of the rank that needs the most. A card
whose kernels are chosen otherwise (compute capability below 8.0 against 8.0 and above) is not judged: what its run
would ask for is not what was seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from vramprobe.allocator.compiled import counting_allocator
from vramprobe.allocator.config import AllocatorConfig, parse_alloc_conf
from vramprobe.allocator.ledger import Device, OutOfMemory
from vramprobe.catalog import gpu_seen, list_gpus
from vramprobe.catalog.gpus import Gpu, gpu_or_size
from vramprobe.emulate.cards import card_properties, context_bytes
from vramprobe.errors import SpecError
from vramprobe.predict.verdict import HOST_ALLOWANCE_BYTES
from vramprobe.profile.hook.history import ACTIONS
from vramprobe.profile.raw import RawHistory, RawRank, RawRun
from vramprobe.profile.served import served_on
from vramprobe.records.engine import ServedOn
from vramprobe.records.profile import CardVerdict, ProfileRecord
from vramprobe.units import MIB, format_bytes, requests_at_once

#: Ampere's and everything since: flash attention, bf16, the same choice of kernels by the libraries.
_SAME_KERNELS = (8, 0)
#: By so much cards that run the same kernels may differ: cuBLAS's workspace is 32 MiB on Hopper and 8 MiB on others
#: (getChosenWorkspaceSize, aten/src/ATen/cuda/CUDAContext.cpp), one for each of torch's handles and streams.
MARGIN_BYTES = 64 * MIB
_ALLOC, _REQUESTED, _COMPLETED, _OOM = (ACTIONS[word] for word in ("alloc", "free_requested", "free_completed", "oom"))
_GIVEN = (ACTIONS["segment_free"], ACTIONS["segment_unmap"])
#: A segment that would have come to less than this share of the card found room.
_FULL_SHARE = 0.85
_EMPTY_CACHE = -1
_LAST = -1  # the name of what could not be served; others count from 1


def verdicts(run: RawRun, record: ProfileRecord, gpus: Sequence[str] | str) -> list[CardVerdict]:
    """A verdict for each of ``gpus``, or of the catalog for ``"all"``, in order. Raises UnknownName."""
    wanted = list_gpus() if gpus == "all" else [gpu_or_size(name) for name in gpus]
    sequence = _sequence_of_highest(run, record.outcome.kind == "oom")
    found = [_verdict(gpu, record, sequence) for gpu in wanted]
    if not any(record.may_grow(rank) for rank in record.ranks):
        return found
    return [_of_steps_seen(one) if one.verdict == "fits" else one for one in found]


def _of_steps_seen(one: CardVerdict) -> CardVerdict:
    return one.model_copy(update={"why": f"{one.why}; of the steps seen, a later one may need more"})


@dataclass(frozen=True)
class RankRequests:
    """One rank's requests and frees.

    ``events``: (action, name, bytes, stream); what could not be served is the last of them where the run ended by it.
    Null where the history does not begin with an empty allocator, or its settings are not modelled: then there are the
    counters alone.
    """

    needed_bytes: int  # allocated at most, and what the run ended by asking for
    reserved_bytes: int
    events: list[tuple[int, int, int, int]] | None
    config: AllocatorConfig
    ended_by_oom: bool
    went_on_after_oom: bool


@dataclass(frozen=True)
class Replayable:
    """``unlimited_bytes``: the reserved peak on a card without end, null without events.

    ``error_bytes``: by how much the replay of the run itself misses torch's own reserved peak.
    """

    requests: RankRequests
    unlimited_bytes: int | None
    error_bytes: int


def _sequence_of_highest(run: RawRun, ended_by_oom: bool) -> Replayable | None:
    """Return the sequence of the rank that ran out, else of the one with the highest reserved peak; None where no
    process used a card.
    """
    found = [raw for raw in run.ranks if raw.phases]
    if not found:
        return None

    def height(raw: RawRank) -> tuple[bool, int]:
        return ended_by_oom and bool(raw.ooms), max(phase.reserved_peak_bytes or 0 for phase in raw.phases)

    raw = max(found, key=height)
    requests = _requests(raw, ended_by_oom)
    if requests.events is None:
        return Replayable(requests, None, 0)
    unlimited = _replayed(requests, Device()).reserved_bytes
    was_at_ease = raw.end is not None and raw.end.num_alloc_retries == 0 and not raw.ooms
    return Replayable(requests, unlimited, abs(unlimited - requests.reserved_bytes) if was_at_ease else 0)


def _requests(raw: RawRank, ended_by_oom: bool) -> RankRequests:
    history, events, config = raw.history, None, AllocatorConfig()
    if history is not None and history.traced == "all" and not history.alive_before:
        with suppress(SpecError):  # as of the cudaMallocAsync backend
            config = parse_alloc_conf(history.allocator.get("alloc_conf") or "")
            events = _events(raw, history, ended_by_oom)
    needed = max(phase.allocated_peak_bytes for phase in raw.phases)
    if ended_by_oom and raw.ooms:
        needed = max(needed, (raw.ooms[-1].allocated_bytes or 0) + (raw.ooms[-1].requested_bytes or 0))
    return RankRequests(
        needed_bytes=needed,
        reserved_bytes=max(phase.reserved_peak_bytes or 0 for phase in raw.phases),
        events=events,
        config=config,
        ended_by_oom=ended_by_oom,
        went_on_after_oom=bool(raw.ooms) and not ended_by_oom,
    )


def _events(raw: RawRank, history: RawHistory, ended_by_oom: bool) -> list[tuple[int, int, int, int]]:
    """The program's own part of the history: segments are the allocator's.

    Segments that were given back for want of room are left for the replay to find; the others were given back on
    request (``empty_cache``).
    """
    events, count, last = [], 0, None
    alive: dict[int, int] = {}
    awaiting: dict[int, int] = {}
    segments = _Segments(raw)
    columns = (history.actions, history.addresses, history.sizes, history.streams)
    for action, address, size, stream in zip(*columns, strict=True):
        if action not in (_ALLOC, _REQUESTED, _COMPLETED, _OOM):
            segments.note(action, size)
            continue
        if segments.were_emptied(is_request=action in (_ALLOC, _OOM), failed=action == _OOM):
            events.append((_EMPTY_CACHE, 0, 0, 0))
        if action == _ALLOC:
            count += 1
            alive[address] = count
            events.append((action, count, size, stream))
        elif action == _OOM:
            if ended_by_oom:
                last = [*events, (_ALLOC, _LAST, size, stream)]
        elif (name := (alive if action == _REQUESTED else awaiting).pop(address, None)) is not None:
            events.append((action, name, 0, 0))
            if action == _REQUESTED:
                awaiting[address] = name
    return events if last is None else last


class _Segments:
    """Bytes of segments that the allocator took and freed since the last request or free, and the likely reason."""

    def __init__(self, raw: RawRank) -> None:
        self._never_full = raw.end is not None and raw.end.num_alloc_retries == 0
        self._full_bytes = _FULL_SHARE * (raw.process.device_total_bytes or 0)
        self._reserved = self._given = self._taken = 0

    def note(self, action: int, size: int) -> None:
        """A segment taken or given back."""
        if action in _GIVEN:
            self._given += size
        else:
            self._taken += size

    def were_emptied(self, *, is_request: bool, failed: bool) -> bool:
        """Return True if the program emptied the cache just before; a card that was full then may be the reason
        instead.
        """
        given, taken, before = self._given, self._taken, self._reserved
        self._reserved, self._given, self._taken = before + taken - given, 0, 0
        if not given or failed:
            return False
        return self._never_full or not is_request or not taken or before + taken < self._full_bytes


@dataclass(frozen=True)
class _Replayed:
    fits: bool
    reserved_bytes: int  # peak
    num_retries: int


def _replayed(requests: RankRequests, device: Device) -> _Replayed:
    assert requests.events is not None
    allocator, fits = counting_allocator(requests.config, device), True
    allocate, request, complete = allocator.allocate, allocator.request_free, allocator.complete_free
    try:
        for action, name, size, stream in requests.events:
            if action == _ALLOC:
                allocate(name, size, stream)
            elif action == _REQUESTED:
                request(name)
            elif action == _COMPLETED:
                complete(name)
            else:
                allocator.empty_cache()
    except OutOfMemory:
        fits = False
    return _Replayed(fits, allocator.ledger.reserved_peak, allocator.ledger.num_alloc_retries)


def context_on(record: ProfileRecord, gpu: Gpu, *, is_own: bool) -> int:
    """Bytes of the CUDA context on an NVIDIA card: as it was seen there, else the most that the catalog knows of it."""
    if is_own and record.context_bytes:
        return record.context_bytes
    return context_bytes(card_properties(gpu.short_name), most=True)


def _verdict(gpu: Gpu, record: ProfileRecord, found: Replayable | None) -> CardVerdict:
    def unknown(why: str) -> CardVerdict:
        return CardVerdict(gpu=gpu.short_name, verdict="unknown", why=why)

    if found is None:
        return unknown("nothing was seen to use a GPU")
    sequence = found.requests
    if gpu.vendor != "NVIDIA":
        return unknown("its kernels differ, and what was seen is CUDA's")
    card, ran_on = card_properties(gpu.short_name), gpu_seen(record.environment.device_name or "")
    is_own = ran_on is not None and ran_on.short_name == gpu.short_name
    here = record.environment.capability
    if not is_own and (here is None or tuple(here) < _SAME_KERNELS or card.compute_capability < _SAME_KERNELS):
        return unknown("its kernels differ; run it with --emulate")
    if sequence.went_on_after_oom and not is_own:
        return unknown("it ran out on the way and went on otherwise; run it with --emulate")
    if _has_engine(record) and not is_own:
        served = served_on(record, gpu.short_name)
        if served is None:
            return unknown("an engine sizes its KV cache by the GPU; run it with --emulate")
        return CardVerdict(gpu=gpu.short_name, verdict=served.verdict, why=_said_of_cache(served), served=served)
    if sequence.ended_by_oom and is_own:
        return CardVerdict(gpu=gpu.short_name, verdict="does not fit", why="it ran out there")
    usable = card.total_bytes - context_on(record, gpu, is_own=is_own)
    usable -= HOST_ALLOWANCE_BYTES if gpu.shares_host_memory else 0
    if is_own and record.outcome.kind == "ok" and not (gpu.shares_host_memory and sequence.reserved_bytes > usable):
        return CardVerdict(
            gpu=gpu.short_name,
            verdict="fits",
            usable_bytes=usable,
            reserved_bytes=sequence.reserved_bytes,
            headroom_bytes=usable - sequence.reserved_bytes,
            why=f"it ran there: {format_bytes(sequence.reserved_bytes)} reserved of {format_bytes(usable)}",
        )
    return _judged(gpu, usable, found, margin=found.error_bytes + MARGIN_BYTES)


def _said_of_cache(one: ServedOn) -> str:
    requests = requests_at_once(one.max_concurrency, one.length_tokens)
    if one.kv_cache_gib <= 0:
        return "weights and activations alone take more than the engine may"
    if one.verdict == "fits":
        return f"KV cache {one.kv_cache_gib:.2f} GiB: {requests}"
    return (
        f"KV cache {one.kv_cache_gib:.2f} GiB: {requests}; {' or '.join(one.settings) or 'no one option'} makes one fit"
    )


def _has_engine(record: ProfileRecord) -> bool:
    held = [rank.at_peak for rank in record.ranks if rank.at_peak is not None]
    return record.engine is not None or any(one.kv_cache_bytes for one in held)


def _judged(gpu: Gpu, usable: int, found: Replayable, *, margin: int) -> CardVerdict:
    """By the counters where they decide, else by a replay with as much room as the card has."""
    sequence = found.requests
    least = sequence.needed_bytes
    at_ease = sequence.reserved_bytes if found.unlimited_bytes is None else found.unlimited_bytes
    reserved, retries = at_ease, 0

    def verdict(answer, why: str) -> CardVerdict:
        known = answer == "fits"
        return CardVerdict(
            gpu=gpu.short_name,
            verdict=answer,
            why=why,
            usable_bytes=usable,
            reserved_bytes=reserved if known else None,
            headroom_bytes=usable - reserved if known else None,
        )

    if least > usable + margin:
        return verdict("does not fit", f"{format_bytes(least)} of tensors in {format_bytes(usable)}")
    if at_ease > usable - margin:
        if sequence.events is None:
            return verdict("unknown", "between allocated and reserved, with no whole history to replay")
        tight = _replayed(sequence, Device(total_bytes=usable - margin))
        if not tight.fits:
            if margin and _replayed(sequence, Device(total_bytes=usable + margin)).fits:
                return verdict("unknown", f"within {format_bytes(margin)} of its end; run it with --emulate")
            return verdict("does not fit", f"the replay runs out with {format_bytes(usable)}")
        reserved, retries = tight.reserved_bytes, tight.num_retries
    if sequence.ended_by_oom:
        return verdict("unknown", f"it ran out after {format_bytes(least)}, and what follows was not seen")
    again = f", after giving back its cache {retries} times" if retries else ""
    return verdict("fits", f"{format_bytes(reserved)} reserved of {format_bytes(usable)}{again}")
