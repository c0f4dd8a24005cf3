"""Compiled: the caching allocator in C (plain/), ten times as fast, where a compiler was there when this was installed.

In: settings, a device. Out: an allocator for whoever looks at counters alone. The one in C knows torch's default
settings; for others, and where it was not built, allocator.py's takes its place, with the same numbers.
"""

from dataclasses import replace

from vramprobe.allocator.allocator import CachingAllocator
from vramprobe.allocator.config import AllocatorConfig
from vramprobe.allocator.ledger import Device

try:
    from vramprobe.allocator._plain import PlainAllocator, paired
except ImportError:
    PlainAllocator = paired = None  # the package was installed without a C compiler

_DEFAULT = AllocatorConfig()


def counting_allocator(config: AllocatorConfig | None = None, device: Device | None = None) -> CachingAllocator:
    """Empty. Who asks it can neither see its blocks nor be told of segments."""
    config, device = config or _DEFAULT, device or Device()
    if PlainAllocator is None or not _is_plain(config):
        return CachingAllocator(config, device)
    return PlainAllocator(device.limit_bytes, config.large_segment_bytes)


def _is_plain(config: AllocatorConfig) -> bool:
    """Return True if only the size of segments differs from torch's default, and the size of unsplit larger blocks,
    which do not occur.
    """
    segments = {"large_segment_bytes", "max_non_split_rounding_bytes"}
    return replace(_DEFAULT, **{name: getattr(config, name) for name in segments}) == config
