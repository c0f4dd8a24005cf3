"""Would the run have fitted on another card? Its own sequence of allocations, replayed through the caching allocator.

In: a run and its record, the cards to judge. Out: a CardVerdict each, of the rank that needs the most. A card
whose kernels are chosen otherwise (compute capability below 8.0 against 8.0 and above) is not judged: what its run
would ask for is not what was seen.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from vramprobe.allocator.compiled import counting_allocator
from vramprobe.allocator.config import AllocatorConfig, parse_alloc_conf
from vramprobe.allocator.ledger import Device, OutOfMemory
from vramprobe.catalog import gpu_seen, list_gpus
from vramprobe.catalog.gpus import Gpu, gpu_or_size
from vramprobe.emulate.cards import card_properties, context_bytes
from vramprobe.errors import SpecError
from vramprobe.log.log import Log
from vramprobe.log.reserved import player
from vramprobe.predict.verdict import HOST_ALLOWANCE_BYTES
from vramprobe.profile.history_log import read_history_log
from vramprobe.profile.raw import RawRank, RawRun
from vramprobe.profile.served import served_on
from vramprobe.records.engine import ServedOn
from vramprobe.records.profile import CardVerdict, ProfileRecord
from vramprobe.units import MIB, format_bytes, requests_at_once

#: Ampere's and everything since: flash attention, bf16, the same choice of kernels by the libraries.
_SAME_KERNELS = (8, 0)
#: By so much cards that run the same kernels may differ: cuBLAS's workspace is 32 MiB on Hopper and 8 MiB on others
#: (getChosenWorkspaceSize, aten/src/ATen/cuda/CUDAContext.cpp), one for each of torch's handles and streams.
MARGIN_BYTES = 64 * MIB


def verdicts(run: RawRun, record: ProfileRecord, gpus: Sequence[str] | str) -> list[CardVerdict]:
    """A verdict for each of ``gpus``, or of the catalog for ``"all"``, in order. Raises UnknownName."""
    wanted = list_gpus() if gpus == "all" else [gpu_or_size(name) for name in gpus]
    requests = _requests_of_highest(run, record.outcome.kind == "oom")
    found = [_verdict(gpu, record, requests) for gpu in wanted]
    if not any(record.may_grow(rank) for rank in record.ranks):
        return found
    later = "; of the steps seen, a later one may need more"
    return [one.model_copy(update={"why": one.why + later}) if one.verdict == "fits" else one for one in found]


@dataclass(frozen=True)
class RankRequests:
    """One rank's requests and frees.

    ``log``: what could not be served is the last of it where the run ended by it. Null where the history does not begin
    with an empty allocator, or its settings are not modelled: then there are the counters alone. ``unlimited_bytes``:
    the reserved peak of its replay on a card without end. ``error_bytes``: by how much that misses torch's own.
    """

    needed_bytes: int  # allocated at most, and what the run ended by asking for
    reserved_bytes: int
    log: Log | None
    config: AllocatorConfig
    ended_by_oom: bool
    went_on_after_oom: bool
    unlimited_bytes: int | None = None
    error_bytes: int = 0


def _requests_of_highest(run: RawRun, ended_by_oom: bool) -> RankRequests | None:
    """Return the requests of the rank that ran out, else of the one with the highest reserved peak; None where no
    process used a card.
    """
    found = [raw for raw in run.ranks if raw.phases]
    if not found:
        return None

    def height(raw: RawRank) -> tuple[bool, int]:
        return ended_by_oom and bool(raw.ooms), max(phase.reserved_peak_bytes or 0 for phase in raw.phases)

    raw = max(found, key=height)
    requests = _requests(raw, ended_by_oom)
    if requests.log is None:
        return requests
    unlimited = _replayed(requests, Device()).reserved_bytes
    was_at_ease = raw.end is not None and raw.end.num_alloc_retries == 0 and not raw.ooms
    error = abs(unlimited - requests.reserved_bytes) if was_at_ease else 0
    return replace(requests, unlimited_bytes=unlimited, error_bytes=error)


def _requests(raw: RawRank, ended_by_oom: bool) -> RankRequests:
    history, log, config = raw.history, None, AllocatorConfig()
    if history is not None and history.traced == "all" and not history.alive_before:
        with suppress(SpecError):  # as of the cudaMallocAsync backend
            config = parse_alloc_conf(history.allocator.get("alloc_conf") or "")
            log = _log(raw, ended_by_oom)
    needed = max(phase.allocated_peak_bytes for phase in raw.phases)
    if ended_by_oom and raw.ooms:
        needed = max(needed, (raw.ooms[-1].allocated_bytes or 0) + (raw.ooms[-1].requested_bytes or 0))
    return RankRequests(
        needed_bytes=needed,
        reserved_bytes=max(phase.reserved_peak_bytes or 0 for phase in raw.phases),
        log=log,
        config=config,
        ended_by_oom=ended_by_oom,
        went_on_after_oom=bool(raw.ooms) and not ended_by_oom,
    )


def _log(raw: RawRank, ended_by_oom: bool) -> Log | None:
    history_log = read_history_log(raw)
    if history_log is None or not (ended_by_oom and history_log.failed):
        return history_log and history_log.log
    last = history_log.failed[-1]
    until = slice(last.num_events)
    return replace(
        history_log.log,
        size_bytes=np.append(history_log.log.size_bytes[until], last.size_bytes),
        blocks=np.append(history_log.log.blocks[until], len(history_log.addresses) + 1),
        streams=np.append(history_log.log.each_stream()[until], np.int8(last.stream)),
    )


@dataclass(frozen=True)
class _Replayed:
    fits: bool
    reserved_bytes: int  # peak
    num_retries: int


def _replayed(requests: RankRequests, device: Device) -> _Replayed:
    assert requests.log is not None
    allocator, fits = counting_allocator(requests.config, device), True
    try:
        player(requests.log, allocator)(slice(None))
    except OutOfMemory:
        fits = False
    return _Replayed(fits, allocator.ledger.reserved_peak, allocator.ledger.num_alloc_retries)


def context_on(record: ProfileRecord, gpu: Gpu, *, is_own: bool) -> int:
    """Bytes of the CUDA context on an NVIDIA card: as it was seen there, else the most that the catalog knows of it."""
    if is_own and record.context_bytes:
        return record.context_bytes
    return context_bytes(card_properties(gpu.short_name), most=True)


def _verdict(gpu: Gpu, record: ProfileRecord, requests: RankRequests | None) -> CardVerdict:
    def unknown(why: str) -> CardVerdict:
        return CardVerdict(gpu=gpu.short_name, verdict="unknown", why=why)

    if requests is None:
        return unknown("nothing was seen to use a GPU")
    if gpu.vendor != "NVIDIA":
        return unknown("its kernels differ, and what was seen is CUDA's")
    card, ran_on = card_properties(gpu.short_name), gpu_seen(record.environment.device_name or "")
    is_own = ran_on is not None and ran_on.short_name == gpu.short_name
    here = record.environment.capability
    if not is_own and (here is None or tuple(here) < _SAME_KERNELS or card.compute_capability < _SAME_KERNELS):
        return unknown("its kernels differ; run it with --emulate")
    if requests.went_on_after_oom and not is_own:
        return unknown("it ran out on the way and went on otherwise; run it with --emulate")
    if _has_engine(record) and not is_own:
        served = served_on(record, gpu.short_name)
        if served is None:
            return unknown("an engine sizes its KV cache by the GPU; run it with --emulate")
        return CardVerdict(gpu=gpu.short_name, verdict=served.verdict, why=_said_of_cache(served), served=served)
    if requests.ended_by_oom and is_own:
        return CardVerdict(gpu=gpu.short_name, verdict="does not fit", why="it ran out there")
    usable = card.total_bytes - context_on(record, gpu, is_own=is_own)
    usable -= HOST_ALLOWANCE_BYTES if gpu.shares_host_memory else 0
    if is_own and record.outcome.kind == "ok" and not (gpu.shares_host_memory and requests.reserved_bytes > usable):
        return CardVerdict(
            gpu=gpu.short_name,
            verdict="fits",
            usable_bytes=usable,
            reserved_bytes=requests.reserved_bytes,
            headroom_bytes=usable - requests.reserved_bytes,
            why=f"it ran there: {format_bytes(requests.reserved_bytes)} reserved of {format_bytes(usable)}",
        )
    return _judged(gpu, usable, requests, margin=requests.error_bytes + MARGIN_BYTES)


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


def _judged(gpu: Gpu, usable: int, requests: RankRequests, *, margin: int) -> CardVerdict:
    """By the counters where they decide, else by a replay with as much room as the card has."""
    least = requests.needed_bytes
    at_ease = requests.reserved_bytes if requests.unlimited_bytes is None else requests.unlimited_bytes
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
        if requests.log is None:
            return verdict("unknown", "between allocated and reserved, with no whole history to replay")
        tight = _replayed(requests, Device(total_bytes=usable - margin))
        if not tight.fits:
            if margin and _replayed(requests, Device(total_bytes=usable + margin)).fits:
                return verdict("unknown", f"within {format_bytes(margin)} of its end; run it with --emulate")
            return verdict("does not fit", f"the replay runs out with {format_bytes(usable)}")
        reserved, retries = tight.reserved_bytes, tight.num_retries
    if requests.ended_by_oom:
        return verdict("unknown", f"it ran out after {format_bytes(least)}, and what follows was not seen")
    again = f", after giving back its cache {retries} times" if retries else ""
    return verdict("fits", f"{format_bytes(reserved)} reserved of {format_bytes(usable)}{again}")
