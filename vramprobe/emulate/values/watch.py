"""Values on in a process: the mode on its threads, the driver's callback, Dynamo's hook, a report.

In: a policy. Out: a ``ValuesWatch``, to the process's end. One per process; it needs the emulated driver and never
loads one.
"""

import atexit
import threading
from contextlib import contextmanager

from .driver import loaded_driver
from .policy import Policy

_current = None


class ValuesWatch:
    """Values are on. ``report()`` at any time, ``clear()`` forgets the reads so far (a warm-up's)."""

    def __init__(self, policy):
        driver = loaded_driver()  # before torch is touched: the refusal costs nothing
        from . import compiled
        from .mode import TrueValues

        self.mode = TrueValues(driver, policy)
        driver.on_uncomputed_read(self.mode.driver_read)
        driver.set_fill(policy.contents, policy.seed)
        driver.own_modes(1)
        self.mode.__enter__()
        compiled.keep_out(self.mode)
        _print_with(self.mode)
        _on_new_threads(self.mode)
        atexit.register(driver.settle)

    @property
    def policy(self):
        return self.mode.known.policy

    def report(self):
        """Policy, counts, reads by line: plain dicts, ready for JSON."""
        return self.mode.report()

    @contextmanager
    def under(self, policy):
        """Within: another policy, for a step under other contents."""
        before = self.policy
        self._take(policy)
        yield
        self._take(before)

    def _take(self, policy):
        self.mode.known.policy = policy
        self.mode.driver.set_fill(policy.contents, policy.seed)

    def clear(self):
        """Forget the reads so far."""
        self.mode.reads.clear()


def _print_with(mode):
    """``print(tensor)`` takes all modes off: it would format by stale bytes, and count them."""
    from torch import _tensor_str

    original = _tensor_str._str_intern

    def str_intern(tensor, *args, **kwargs):
        if type(tensor).__module__.startswith("torch._subclasses") or not tensor.is_cuda:
            return original(tensor, *args, **kwargs)
        with mode.on_this_thread():
            return original(tensor, *args, **kwargs)

    _tensor_str._str_intern = str_intern


def _on_new_threads(mode):
    """A thread begins with an empty stack of modes; autograd's own threads inherit theirs."""
    run = threading.Thread._bootstrap_inner

    def bootstrap(self):
        mode.__enter__()
        run(self)

    threading.Thread._bootstrap_inner = bootstrap


def start(policy=None):
    """See ``values.enable``."""
    global _current
    policy = policy or Policy()
    if _current is not None:
        if _current.policy != policy:
            raise RuntimeError(f"values are on already, under {_current.policy}")
        return _current
    _current = ValuesWatch(policy)
    return _current


def current():
    """The ``ValuesWatch`` that is on, or None."""
    return _current
