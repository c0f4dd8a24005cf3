"""An engine that was seen to start (or to refuse to), on other GPUs: its KV cache there, and a setting that fits.

In: a profile's record with an engine's account, a GPU. Out: a ServedOn. The same command with the same settings: what
the engine holds besides the cache stays, the memory it may take is the GPU's own. An emulated driver charges nothing
for kernels that are loaded; on another GPU what published logs have is added.
"""

import math

from vramprobe.catalog import gpu_seen
from vramprobe.emulate.cards import CardProperties, card_properties, context_bytes
from vramprobe.predict.serve import non_torch_charge
from vramprobe.records.engine import EngineMemory, ServedOn
from vramprobe.records.profile import ProfileRecord
from vramprobe.units import GIB

_BLOCK_TOKENS = 16
_ALIKE = 0.02  # a cache of full attention alone holds as many tokens as requests times their length, but for a block


def served_here(record: ProfileRecord) -> ServedOn | None:
    """On the GPU that it ran on, as the engine logged it; None where its log does not say enough."""
    own = gpu_seen(record.environment.device_name or "")
    return None if own is None or own.vendor != "NVIDIA" else served_on(record, own.short_name)


def served_on(record: ProfileRecord, gpu: str) -> ServedOn | None:
    """On ``gpu``; None where the engine's log does not say enough, or several GPUs divide it."""
    engine, own = record.engine, gpu_seen(record.environment.device_name or "")
    if engine is None or own is None or engine.kv_cache_gib is None or len(_ranks_with_memory(record)) > 1:
        return None
    request_gib, length = _request_gib(engine), engine.length_tokens
    if request_gib is None or length is None:
        return None
    cache_gib, card = engine.kv_cache_gib, card_properties(gpu)
    if gpu != own.short_name:
        if engine.requested_gib is None or engine.utilization is None:
            return None
        charge = non_torch_charge() if record.instrument == "emulated" else 0
        besides = engine.requested_gib - cache_gib + charge / GIB
        cache_gib = card.total_bytes * engine.utilization / GIB - besides
    requests = max(cache_gib, 0.0) / request_gib
    longest = None
    if _is_full_attention(engine):
        tokens = engine.kv_cache_tokens * max(cache_gib, 0.0) / engine.kv_cache_gib
        longest = math.floor(tokens) // _BLOCK_TOKENS * _BLOCK_TOKENS
    fits = requests >= 1
    return ServedOn(
        gpu=gpu,
        verdict="fits" if fits else "does not fit",
        kv_cache_gib=round(cache_gib, 2),
        length_tokens=length,
        max_concurrency=round(requests, 2),
        longest_request_tokens=longest,
        settings=() if fits else tuple(_settings(engine, card, cache_gib, request_gib, longest)),
    )


def _ranks_with_memory(record: ProfileRecord) -> list[int]:
    return [rank.pid for rank in record.ranks if rank.peak is not None and rank.peak.allocated_bytes > GIB // 16]


def _request_gib(engine: EngineMemory) -> float | None:
    """Cache of one request of the length that the engine allows."""
    if engine.needed_gib is not None:
        return engine.needed_gib
    return engine.kv_cache_gib / engine.max_concurrency if engine.kv_cache_gib and engine.max_concurrency else None


def _is_full_attention(engine: EngineMemory) -> bool:
    """Return True if a request's cache grows in proportion to its length: not with sliding windows or state spaces."""
    if not (engine.kv_cache_tokens and engine.max_concurrency and engine.length_tokens):
        return False
    return abs(engine.kv_cache_tokens / (engine.max_concurrency * engine.length_tokens) - 1) < _ALIKE


def _settings(engine: EngineMemory, card: CardProperties, cache_gib: float, request_gib: float, longest: int | None):
    """The options of which each alone would make one request fit, in vLLM's words."""
    if longest is None and engine.longest_tokens and cache_gib == engine.kv_cache_gib:
        longest = engine.longest_tokens  # as the engine itself estimates
    if longest:
        yield f"--max-model-len {longest}"
    if engine.utilization is not None:
        total = card.total_bytes / GIB
        wanted = math.ceil((engine.utilization + (request_gib - cache_gib) / total) * 100) / 100
        if wanted * total <= total - context_bytes(card, most=True) / GIB:
            yield f"--gpu-memory-utilization {wanted:.2f}"
    if 0 < request_gib <= 2 * cache_gib:
        yield "--kv-cache-dtype fp8"
