"""A piece of work in a forked process of its own, so that neither an abort nor what it loads reaches the next piece.

Imports nothing of vramprobe's, nor of torch's: scripts that run under an emulated or a lent GPU use it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable


def in_a_child(
    work: Callable[[], dict[str, object]], failed: Callable[[BaseException], dict[str, object]], seconds: int
) -> tuple[dict[str, object] | None, int]:
    """(What ``work`` returned, or ``failed`` of its exception; None where the child wrote nothing, its wait status).

    A child that takes longer than ``seconds`` is ended by SIGALRM.
    """
    sys.stdout.flush()
    read, written = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        signal.alarm(seconds)
        try:
            row = work()
        except BaseException as error:
            row = failed(error)
        os.write(written, json.dumps(row).encode())
        os._exit(0)
    os.close(written)
    with open(read, "rb") as pipe:
        row = pipe.read()
    _, status = os.waitpid(child, 0)
    return (json.loads(row) if row else None), status
