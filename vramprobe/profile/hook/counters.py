"""The allocator's peaks between two marks, while the program goes on seeing its own.

In: torch's counters of each card. Out: per card the ends and peaks of a phase. Peaks are reset at each mark; whoever
else asks for them (``torch.cuda.max_memory_allocated``, a Trainer's memory tracker) is given those since *he* did so.
"""

import torch

_TIERS = {"allocated": "allocated_bytes", "reserved": "reserved_bytes", "requested": "requested_bytes"}


class Counters:
    """Stands before ``torch._C``'s two functions of the counters."""

    def __init__(self):
        self._stats, self._reset = torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats
        self._kept = {}  # card → stat, pool → the highest peak that our own resets have hidden from the program
        self._own = {}  # card → stat, pool → the highest peak that the program's resets have hidden from us
        torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats = self._seen_by_others, self._reset_by_others

    def cards(self):
        """The indices of the cards on which this process has memory."""
        has_context = torch._C._cuda_hasPrimaryContext  # the others are not asked for their counters at every mark
        return [
            index
            for index in range(torch.cuda.device_count())
            if index in self._kept or (has_context(index) and self._stats(index)["reserved_bytes"]["all"]["peak"] > 0)
        ]

    def take(self, device):
        """Ends and peaks in bytes since the last take, and the counts of retries and OOMs; the peaks begin anew."""
        stats, own = self._stats(device), self._own.pop(device, {})
        found = {"num_alloc_retries": stats["num_alloc_retries"], "num_ooms": stats["num_ooms"]}
        for tier, key in _TIERS.items():
            if key in stats:
                found[f"{tier}_end_bytes"] = stats[key]["all"]["current"]
                found[f"{tier}_peak_bytes"] = max(stats[key]["all"]["peak"], own.get((key, "all"), 0))
        _keep_highest(stats, self._kept.setdefault(device, {}))
        self._reset(device)
        return found

    def peak_bytes(self):
        """The highest allocated bytes on the current card since the last take."""
        device = torch.cuda.current_device()
        hidden = self._own.get(device, {}).get(("allocated_bytes", "all"), 0)
        return max(self._stats(device)["allocated_bytes"]["all"]["peak"], hidden)

    def allocated_now(self):
        """The most that a card has allocated at this moment, bytes; asked by another thread than the program's."""
        return max((self._stats(one)["allocated_bytes"]["all"]["current"] for one in self.cards()), default=0)

    def _seen_by_others(self, device):
        stats, kept = self._stats(device), self._kept.get(device, {})
        for (stat, pool), peak in kept.items():
            stats[stat][pool]["peak"] = max(peak, stats[stat][pool]["peak"])
        return stats

    def _reset_by_others(self, device):
        _keep_highest(self._stats(device), self._own.setdefault(device, {}))
        self._kept.pop(device, None)
        self._reset(device)


def _keep_highest(stats, highest):
    for stat, pools in stats.items():
        for pool, values in pools.items() if isinstance(pools, dict) else ():
            if isinstance(values, dict) and "peak" in values:
                highest[stat, pool] = max(values["peak"], highest.get((stat, pool), 0))
