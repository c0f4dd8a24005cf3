"""Values on the emulated card: small tensors hold true ones, and of all others it is known that nobody computed them.

In: a process that runs on the emulated driver. Out: a report (policy, reads by line of Python). This package is
loaded into other people's environments: it imports the standard library and, when asked to work, torch; nothing of
the rest of vramprobe.
"""

from .driver import NoEmulatedDriver
from .policy import Policy, verification_policies

__all__ = ["NoEmulatedDriver", "Policy", "enable", "enabled", "verification_policies"]


def enable(policy=None):
    """Turn values on, in this process, from now on; -> ``ValuesWatch`` with ``report()`` and ``disable()``. Needs the
    emulated driver.

    Raises NoEmulatedDriver (a RuntimeError, one line) where this process has no emulated GPU, ValueError for a wrong
    policy, and RuntimeError where values are on already under another policy.
    """
    from .watch import start

    return start(policy)


def enabled():
    """The ``ValuesWatch`` that is on in this process, or None."""
    from .watch import current

    return current()
