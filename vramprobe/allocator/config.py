"""Parse PYTORCH_ALLOC_CONF, and round a request as it says.

In: the variable's text, as torch reads it. Out: an AllocatorConfig, with the two roundings of every allocation.
Follows torch 2.11 to 2.13: c10/core/AllocatorConfig.{h,cpp}, c10/cuda/CUDAAllocatorConfig.{h,cpp}. Knows no torch.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from vramprobe.errors import SpecError
from vramprobe.units import MIB

MIN_BLOCK = 512  # kMinBlockSize: every size is rounded up to a multiple
SMALL_SIZE = MIB  # kSmallSize: the largest request that the small pool serves
SMALL_BUFFER = 2 * MIB  # kSmallBuffer: a segment of the small pool
MIN_LARGE_ALLOC = 10 * MIB  # kMinLargeAlloc: from here on a request gets a segment of its own
ROUND_LARGE = 2 * MIB  # kRoundLarge: such a segment is rounded up to a multiple
LARGE_SEGMENT = 20 * MIB  # large_segment_size_: what requests between are cut from
_INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: sizes of 1 MiB to 64 GiB, one entry per power of two

# Keys that torch takes and that change nothing on the device's side of the allocator.
_WITHOUT_EFFECT = frozenset(
    {
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "graph_capture_record_stream_reuse",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "pinned_num_register_threads",
        "pinned_use_background_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_free_catch_all",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
    }
)


@dataclass(frozen=True, kw_only=True)
class AllocatorConfig:
    """The caching allocator's settings; the defaults are torch's."""

    expandable_segments: bool = False
    max_split_bytes: int | None = None  # blocks of this size or more are not split; None: all may be
    max_non_split_rounding_bytes: int = LARGE_SEGMENT  # how much larger than the request an unsplittable block may be
    large_segment_bytes: int = LARGE_SEGMENT
    garbage_collection_threshold: float = 0.0  # 0: never
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS  # per power of two from 1 MiB; 0 and 1: no rounding
    per_process_memory_fraction: float = 1.0

    @property
    def only_512(self) -> bool:
        """Return True if sizes are rounded to 512 B and to nothing else."""
        return max(self.roundup_power2_divisions) <= 1

    def round_size(self, size_bytes: int) -> int:
        """Bytes of the block for a request (``round_size``, ``roundup_power2_next_division``)."""
        if size_bytes < MIN_BLOCK:
            return MIN_BLOCK
        divisions = self.divisions(size_bytes)
        if divisions > 1 and size_bytes > MIN_BLOCK * divisions:
            if size_bytes & (size_bytes - 1) == 0:
                return size_bytes
            step = 1 << (size_bytes.bit_length() - 1) >> (divisions.bit_length() - 1)
            return -(-size_bytes // step) * step
        return -(-size_bytes // MIN_BLOCK) * MIN_BLOCK

    def divisions(self, size_bytes: int) -> int:
        """Number of steps between the powers of two around a size (``roundup_power2_divisions(size)``)."""
        return self.roundup_power2_divisions[min(max(size_bytes.bit_length() - 21, 0), _INTERVALS - 1)]

    def allocation_size(self, rounded_bytes: int) -> int:
        """Bytes of a new segment for a block of this size (``get_allocation_size``)."""
        if rounded_bytes <= SMALL_SIZE:
            return SMALL_BUFFER
        if rounded_bytes < MIN_LARGE_ALLOC:
            return self.large_segment_bytes
        return -(-rounded_bytes // ROUND_LARGE) * ROUND_LARGE


def parse_alloc_conf(text: str) -> AllocatorConfig:
    """Read ``PYTORCH_ALLOC_CONF``, for instance ``expandable_segments:True,max_split_size_mb:128``.

    Raises SpecError for an unknown key, a value that torch refuses, or what this replay does not model.
    """
    given: dict[str, list[str]] = {}
    for key, value in _pairs(text):
        given[key] = value
    settings: dict[str, object] = {}
    known = (*_READERS, "max_split_size_mb", "max_non_split_rounding_mb", "backend", "throw_on_cudamalloc_oom")
    for key, value in given.items():
        if key in _READERS:
            name, read = _READERS[key]
            settings[name] = read(key, value)
        elif key == "backend":
            if value != ["native"]:
                _refuse(key, value, "the replay models the native backend only; write backend:native")
        elif key == "throw_on_cudamalloc_oom":
            if _flag(key, value):
                _refuse(key, value, "an early refusal is not modelled; write throw_on_cudamalloc_oom:False")
        elif key not in known and key not in _WITHOUT_EFFECT:
            allowed = ", ".join(sorted((*known, *_WITHOUT_EFFECT)))
            raise SpecError(f"PYTORCH_ALLOC_CONF has the unknown key {key!r}; torch knows {allowed}")
    # large_segment_size_mb is read before the others: both limits are at least it, and one is it by default.
    segment_bytes = settings.setdefault("large_segment_bytes", LARGE_SEGMENT)
    assert isinstance(segment_bytes, int)
    settings["max_non_split_rounding_bytes"] = segment_bytes
    for key, name in (
        ("max_split_size_mb", "max_split_bytes"),
        ("max_non_split_rounding_mb", "max_non_split_rounding_bytes"),
    ):
        if key in given:
            settings[name] = _at_least(key, given[key], segment_bytes)
    return AllocatorConfig(**settings)  # type: ignore[arg-type]


def _pairs(text: str) -> list[tuple[str, list[str]]]:
    """The keys with the tokens of their values (``ConfigTokenizer``): one token, or those between square brackets."""
    tokens = re.findall(r"[,:\[\]]|[^,:\[\]]+", re.sub(r"\s", "", text))
    pairs, at = [], 0
    while at < len(tokens):
        key = tokens[at]
        if re.fullmatch(r"[,:\[\]]", key) or tokens[at + 1 : at + 2] != [":"] or at + 2 >= len(tokens):
            raise SpecError(f"PYTORCH_ALLOC_CONF {text!r} is not a list of key:value near {key!r}")
        end = at + 2
        if tokens[end] == "[":
            if "]" not in tokens[end:]:
                raise SpecError(f"PYTORCH_ALLOC_CONF {text!r} has a [ without its ]")
            end = tokens.index("]", end)
        pairs.append((key, tokens[at + 2 : end + 1]))
        if tokens[end + 1 : end + 2] not in ([], [","]):
            raise SpecError(f"PYTORCH_ALLOC_CONF {text!r} lacks a comma after the value of {key!r}")
        at = end + 2
    return pairs


def _refuse(key: str, value: list[str], why: str) -> NoReturn:
    raise SpecError(f"PYTORCH_ALLOC_CONF has {key}:{''.join(value)}; {why}")


def _flag(key: str, value: list[str]) -> bool:
    if value not in (["True"], ["False"]):
        _refuse(key, value, "write True or False")
    return value == ["True"]


def _whole(key: str, value: list[str], token: str) -> int:
    if not re.fullmatch(r"[0-9]+", token):
        _refuse(key, value, f"{token!r} is not a whole number")
    return int(token)


def _at_least(key: str, value: list[str], least_bytes: int) -> int:
    size_bytes = _whole(key, value, "".join(value)) * MIB
    if size_bytes < least_bytes:
        _refuse(key, value, f"it must be at least {least_bytes // MIB}, the size of a large segment")
    return size_bytes


def _segment(key: str, value: list[str]) -> int:
    size_bytes = _whole(key, value, "".join(value)) * MIB
    if size_bytes <= MIN_LARGE_ALLOC:
        _refuse(key, value, f"it must be above {MIN_LARGE_ALLOC // MIB}")
    return size_bytes


def _fraction(key: str, value: list[str]) -> float:
    try:
        fraction = float("".join(value))
    except ValueError:
        _refuse(key, value, "it must be a number")
    within = 0 <= fraction <= 1 if key == "per_process_memory_fraction" else 0 < fraction < 1
    if not within:
        _refuse(key, value, "it must be between 0 and 1")
    return fraction


def _divisions(key: str, value: list[str]) -> tuple[int, ...]:
    """``4``, or per size ``[256:1,512:2,1024:4,>:8]`` (MiB; the first fills what is below it, ``>`` what follows)."""
    if value[0] != "[":
        return (_power_of_2(key, value, value[0]),) * _INTERVALS
    divisions, last, first = [0] * _INTERVALS, 0, True
    inner = "".join(value[1:-1])
    for pair in inner.split(",") if inner else ():
        boundary, colon, count = pair.partition(":")
        if not colon:
            _refuse(key, value, f"{pair!r} is not a size:divisions pair")
        number = 0 if count == "0" else _power_of_2(key, value, count)
        if boundary == ">":
            divisions[last + 1 :] = [number] * (_INTERVALS - last - 1)
            continue
        last = min(_power_of_2(key, value, boundary).bit_length() - 1, _INTERVALS - 1)
        if first:
            divisions[:last] = [number] * last
            first = False
        divisions[last] = number
    return tuple(divisions)


def _power_of_2(key: str, value: list[str], token: str) -> int:
    number = _whole(key, value, token)
    if number == 0 or number & (number - 1):
        _refuse(key, value, f"{token} is not a power of 2")
    return number


_READERS: dict[str, tuple[str, Callable[[str, list[str]], object]]] = {
    "expandable_segments": ("expandable_segments", _flag),
    "large_segment_size_mb": ("large_segment_bytes", _segment),
    "garbage_collection_threshold": ("garbage_collection_threshold", _fraction),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "per_process_memory_fraction": ("per_process_memory_fraction", _fraction),
}
