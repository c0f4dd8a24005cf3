"""Reads by the host of values that nobody computed: how many, of what, and from which line of Python.

In: one call per read, on the thread that reads. Out: plain dicts, most important first. It never judges what the
program did with a value: it says what kind of value was handed over, and whether the reading line branches on it.
"""

import dis
import functools
import os
import sys
import threading

#: Where code of vramprobe's lies that runs within the program: this package, and each hook beside it (hook.py).
OWN_FOLDERS = [os.path.dirname(os.path.abspath(__file__)) + os.sep]
CONTROL, NUMBER, BULK = "control", "number", "bulk"
MAX_FRAMES = 200
BRANCHES = ("POP_JUMP", "TO_BOOL", "UNARY_NOT", "JUMP_IF", "JUMP_FORWARD_IF")


@functools.cache
def _torch_folder():
    torch = sys.modules.get("torch")
    return os.path.dirname(os.path.abspath(torch.__file__)) + os.sep if torch is not None else "\0"


def is_our_own(filename):
    """Return True if a frame of this file is vramprobe's, within the program."""
    return filename.startswith(tuple(OWN_FOLDERS))


def is_the_programs(filename):
    """Return True if a frame of this file is neither torch's nor vramprobe's."""
    return not (is_our_own(filename) or filename.startswith(("<frozen", "<string>", _torch_folder())))


@functools.lru_cache(maxsize=4096)
def place_of(filename):
    """A file as people write it: below site-packages if it is there, else its last two parts; no machine's paths."""
    for mark in (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep):
        if mark in filename:
            return filename.rsplit(mark, 1)[1]
    return os.sep.join(filename.split(os.sep)[-2:])


@functools.lru_cache(maxsize=4096)
def _branches_at(code, offset):
    """Return True if the bytecode instruction at ``offset`` of ``code`` takes a value's truth, ``if tensor``, ``not``,
    ``and``, ``while``, or the next one does of its result: ``if tensor.item()``.
    """
    at = list(dis.get_instructions(code))
    pairs = zip(at, [*at[1:], at[-1]], strict=True)
    return any(
        one.offset == offset and (one.opname.startswith(BRANCHES) or two.opname.startswith(BRANCHES))
        for one, two in pairs
    )


def here(depth=2):
    """Return the reader: {line, function, torch_line, script_line, branches}; ``line`` is the innermost frame outside
    torch.

    ``script_line`` is the innermost one outside every installed package, where that is another one. Frames of
    vramprobe's are left out. A thread of autograd's has no Python frames of its own: ``line`` is None there.
    """
    frame, torch_folder = sys._getframe(depth), _torch_folder()
    found, torch_frame, script, innermost = None, None, None, None
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        filename = frame.f_code.co_filename
        if not (is_our_own(filename) or filename.startswith(("<frozen", "<string>"))):
            innermost = innermost or frame
            if filename.startswith(torch_folder):
                torch_frame = torch_frame or (frame if found is None else None)
            else:
                found = found or frame
                if "-packages" + os.sep not in filename:
                    script = frame
                    break
        frame = frame.f_back

    def line_of(at):
        return f"{place_of(at.f_code.co_filename)}:{at.f_lineno}" if at is not None else None

    return {
        "line": line_of(found),
        "function": found.f_code.co_name if found is not None else None,
        "torch_line": line_of(torch_frame),
        "script_line": line_of(script) if script is not found else None,
        "branches": innermost is not None and _branches_at(innermost.f_code, innermost.f_lasti),
    }


def kind_of(dtype_is_float, num_elements, branches, decides_shape):
    """Return the possible effect of such a read: ``control`` (branched on at once, a whole number or truth value, or it
    decides a shape), ``number`` (one float: logged, or compared later; which, nobody can know), ``bulk`` (many at once:
    printed, saved, collected).
    """
    if branches or decides_shape:
        return CONTROL
    if num_elements > 16:
        return BULK
    return NUMBER if dtype_is_float else CONTROL


class Reads:
    """Counts of reads by line, operator, dtype and state (``assumed`` or ``uncomputed``)."""

    def __init__(self):
        self._found, self._lock = {}, threading.Lock()
        self.num_reads = 0

    def note(self, operator, state, dtype, num_elements, *, dtype_is_float=False, decides_shape=False, depth=2):
        """One read, on the reading thread."""
        place = here(depth + 1)
        kind = kind_of(dtype_is_float, num_elements, place.pop("branches"), decides_shape)
        key = (place["line"], place["torch_line"], place["script_line"], operator, state, dtype, kind)
        with self._lock:
            self.num_reads += 1
            entry = self._found.get(key)
            if entry is None:
                entry = {**place, "operator": operator, "state": state, "dtype": dtype, "kind": kind}
                self._found[key] = {**entry, "num_reads": 1, "max_elements": num_elements}
            else:
                entry["num_reads"] += 1
                entry["max_elements"] = max(entry["max_elements"], num_elements)

    def clear(self):
        with self._lock:
            self._found, self.num_reads = {}, 0

    def as_list(self):
        """Every line that read, those that could have steered first, then by count."""
        order = {CONTROL: 0, NUMBER: 1, BULK: 2}
        with self._lock:
            found = [{**entry, "could_have_steered": entry["kind"] == CONTROL} for entry in self._found.values()]
        return sorted(
            found, key=lambda entry: (order[entry["kind"]], entry["state"] != "uncomputed", -entry["num_reads"])
        )
