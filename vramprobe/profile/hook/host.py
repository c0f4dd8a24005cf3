"""The host memory of one process, phase by phase, as the emulated driver counts it: CPU tensors and pinned memory.

In: the counts since the last phase, as each ends; files as they are mapped. Out: the journal's ``host`` lines, one for
each phase that has more than any of its name before, and ``mapped``, one for each file.
"""

import functools
import os

_files = {}  # what this process has mapped: bytes by path


def note_mapped_files(torch):
    """From now on: safetensors and ``torch.load(mmap=True)`` map a checkpoint's file so; its tensors are no copies."""
    from_file = torch.UntypedStorage.from_file

    @functools.wraps(from_file)
    def noted(filename, *args, **kwargs):
        made = from_file(filename, *args, **kwargs)
        _files.setdefault(os.path.realpath(filename), made.nbytes())
        return made

    torch.UntypedStorage.from_file = staticmethod(noted)


class HostPeaks:
    """``take()``: as Driver.take_host_peaks."""

    def __init__(self, journal, take):
        self._journal, self._take, self._highest, self._written = journal, take, {}, set()

    def closed(self, name, step):
        """The phase ``name`` has ended."""
        for path in _files.keys() - self._written:
            self._written.add(path)
            self._journal.write("mapped", path=path, num_bytes=_files[path])
        both, tensors, pinned = self._take()
        if both > self._highest.get(name, 0):
            self._highest[name] = both
            self._journal.write(
                "host", phase=name, step=step, both_bytes=both, tensors_bytes=tensors, pinned_bytes=pinned
            )
