"""The ranks of one run agree on what they do next, without a collective of the program's: by files in the run's folder.

In: what one rank says, as JSON. Out: what all said, by rank, or None on all of them: a rank that waited in vain and one
that came late hear the same.
"""

import json
import os
import threading
import time

_LIMIT_SECONDS = 180.0  # from a rank's own word on; above the time limits of what the ranks do before
_PAUSE_SECONDS = 0.02


def heard(folder, name, rank, num_ranks, said, limit_seconds=_LIMIT_SECONDS):
    """Wait for each rank's word about ``name``, and return them by rank; None where not all of them spoke in time, or
    others before them.
    """
    verdict = _path(folder, name, "agreed")
    if os.path.exists(verdict) or not _publish(_path(folder, name, rank), said):
        return None  # this one is late, or an earlier run of the command has agreed
    paths, until = [_path(folder, name, one) for one in range(num_ranks)], time.monotonic() + limit_seconds
    while not all(map(os.path.exists, paths)) and time.monotonic() < until:
        time.sleep(_PAUSE_SECONDS)
    _publish(verdict, all(map(os.path.exists, paths)))  # of the first rank that comes here
    return [_read(path) for path in paths] if _read(verdict) else None


def say(folder, name, rank, said):
    """Publish the word of a rank that does not wait for the others' words; an earlier word stays."""
    _publish(_path(folder, name, rank), said)


def _path(folder, name, who):
    return os.path.join(folder, f"{name}.{who}")


def _publish(path, said):
    """The file as a whole, unless it is there already; -> whether it was not."""
    beside = f"{path}.{os.getpid()}-{threading.get_ident()}.part"
    with open(beside, "w", encoding="utf-8") as file:
        json.dump(said, file)
    try:
        os.link(beside, path)
        return True
    except FileExistsError:
        return False
    finally:
        os.unlink(beside)


def _read(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)
