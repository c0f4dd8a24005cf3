"""A run that died of memory: what was full, when, why, and what would make it fit, from what the run left behind.

In: a log, a memory snapshot or an ``nvidia-smi`` log. Out: an Explanation. Loads no torch, sends nothing anywhere, and
repeats neither paths nor command lines of the input.
"""

from __future__ import annotations
