"""A set of byte addresses as disjoint half-open intervals: which values are only assumed.

In: ``add(start, stop)``, ``discard``; out: ``overlaps``, ``covers``. Adjacent intervals merge. Thread-safe by one
lock on writing.
"""

import threading
from bisect import bisect_left, bisect_right


class Intervals:
    """Disjoint, sorted, merged intervals of integers; O(log n) to ask."""

    def __init__(self):
        self._starts, self._stops = [], []
        self._lock = threading.Lock()

    def __len__(self):
        return len(self._starts)

    def __iter__(self):
        return iter(zip(self._starts, self._stops, strict=True))

    def add(self, start, stop):
        """Everything from ``start`` up to, not including, ``stop`` belongs."""
        if start >= stop:
            return
        with self._lock:
            first, last = bisect_left(self._stops, start), bisect_right(self._starts, stop)
            if first < last:
                start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
            self._starts[first:last], self._stops[first:last] = [start], [stop]

    def discard(self, start, stop):
        """Nothing from ``start`` up to ``stop`` belongs any more."""
        if start >= stop or not self._starts:
            return
        with self._lock:
            first, last = bisect_right(self._stops, start), bisect_left(self._starts, stop)
            if first >= last:
                return
            starts, stops = [], []
            if self._starts[first] < start:
                starts.append(self._starts[first])
                stops.append(start)
            if self._stops[last - 1] > stop:
                starts.append(stop)
                stops.append(self._stops[last - 1])
            self._starts[first:last], self._stops[first:last] = starts, stops

    def overlaps(self, start, stop):
        """Return True if any address of [start, stop) belongs."""
        at = bisect_right(self._stops, start)
        return at < len(self._starts) and self._starts[at] < stop

    def covers(self, start, stop):
        """Return True if every address of [start, stop) belongs."""
        at = bisect_right(self._stops, start)
        return start >= stop or (at < len(self._starts) and self._starts[at] <= start and self._stops[at] >= stop)
