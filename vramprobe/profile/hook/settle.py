"""A server's processes write what they have been seen to do once the requests are answered: a server that ends may kill
its engine before that has ended by itself.

In: the run's folder, a Watch; the client (requests.py) asks by a file. Out: the journal's line ``end`` and the history,
from a thread of this process.
"""

import os
import threading
import time

from .journal import complain

#: The file by which the client asks; a process has answered once its journal has a line ``end``.
FILE = "settle"
_POLL_SECONDS = 0.2


def listen(folder, watch):
    """Write so far as soon as it is asked for."""
    threading.Thread(target=_wait, args=(os.path.join(folder, FILE), watch), daemon=True).start()


def _wait(path, watch):
    while not os.path.exists(path):
        if watch.is_ending or watch.is_of_another_process:
            return
        time.sleep(_POLL_SECONDS)
    import torch  # which has been imported

    try:
        own = max(watch.counters.cards(), key=torch.cuda.memory_allocated, default=None)  # a thread's is the first
        with torch.cuda.device(own):
            watch.write_so_far()
    except Exception as error:
        complain(error)
