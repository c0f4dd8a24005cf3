"""Triton's autotuner on an emulated GPU: the first configuration that compiles, since none takes time there.

In: triton.runtime.autotuner, once it is imported. Out: one configuration is compiled and run where it would be dozens,
each seconds of compilation; which one a real GPU would choose is not known either way. What a trial allocates (a buffer
to flush the cache, copies of arguments) is the same in each, so that peaks stay.
"""

import functools
import math

from .imports import when_imported


def watch():
    """From the autotuner's import on."""
    when_imported("triton.runtime.autotuner", lambda module: try_one(module.Autotuner))


def try_one(autotuner):
    """Let this class of autotuner try configurations until one runs, and call all others infinitely slow."""
    run, bench = autotuner.run, autotuner._bench

    @functools.wraps(run)
    def running(self, *args, **kwargs):
        self._vramprobe_slow = None
        return run(self, *args, **kwargs)

    @functools.wraps(bench)
    def benching(self, *args, **kwargs):
        if getattr(self, "_vramprobe_slow", None) is not None:
            return self._vramprobe_slow
        timings = bench(self, *args, **kwargs)  # its quantiles, or one number
        is_one = not isinstance(timings, list | tuple)
        if (timings if is_one else timings[0]) != math.inf:
            self._vramprobe_slow = math.inf if is_one else [math.inf] * len(timings)
        return timings

    autotuner.run, autotuner._bench = running, benching
