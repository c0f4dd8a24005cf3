"""The control functions of the emulated driver that this process has loaded, as Python calls.

In: nothing but the loaded ``libvramprobe_driver.so``. Out: a ``Driver``, or an error that says that this is no
emulated GPU. It never loads a driver by itself: a real GPU's process must not get one.
"""

import ctypes
import os

LIBRARY = "libvramprobe_driver.so"
FILL_KINDS = {"zeros": 0, "ones": 1, "random": 2}


class _Moved(ctypes.Structure):
    """One line of what nccl_traffic.c counts."""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("num_ranks", ctypes.c_int32),
        ("calls", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
    ]


class NoEmulatedDriver(RuntimeError):
    """Values were asked for where no emulated GPU is."""


def library_path():
    """The path of the emulated driver that is mapped into this process, or None."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                path = line.rstrip("\n").split(maxsplit=5)[-1]
                if os.path.basename(path) == LIBRARY:
                    return path
    except OSError:
        return None
    return None


class Driver:
    """Interface to the driver's marks of device bytes: ``mark_computed``, ``mark_uncomputed``, ``is_computed`` (all of
    them) and ``any_computed`` take an address and bytes.

    The marking calls hold the GIL (``PyDLL``): they are shorter than giving it away would be.
    """

    def __init__(self, path):
        library = ctypes.PyDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)

        def function(name, result, *arguments):
            try:
                found = library[f"emu_control_{name}"]
            except AttributeError:
                raise NoEmulatedDriver(
                    f"{path} has no emu_control_{name}: the driver is older than vramprobe"
                ) from None
            found.restype, found.argtypes = result, arguments
            return found

        address, size = ctypes.c_size_t, ctypes.c_size_t  # a pointer as a number: no conversion of None, no object
        self.mark_computed = function("mark_computed", None, address, size)
        self.mark_uncomputed = function("mark_uncomputed", None, address, size)
        self.is_computed = function("is_computed", ctypes.c_int, address, size)
        self.any_computed = function("any_computed", ctypes.c_int, address, size)
        self.inject_count = function("inject_count", None, ctypes.c_int64)
        self.clear_counts = function("clear_counts", None)
        self.launches = function("launches", ctypes.c_uint64)
        self.graph_bytes = function("graph_bytes", ctypes.c_uint64)  # the most that instances of graphs held
        self.take_device_peak_bytes = function("take_device_peak_bytes", ctypes.c_uint64, ctypes.c_int)
        self._take_host_peaks = function("take_host_peaks", None, ctypes.POINTER(ctypes.c_uint64))
        self.trains = function("trains", None)
        self._moved = function("moved", ctypes.c_int, ctypes.POINTER(_Moved), ctypes.c_int)
        self._on_read = function("on_uncomputed_read", None, ctypes.c_void_p)
        self._set_fill = function("set_fill", None, ctypes.c_int, ctypes.c_uint64)
        # Have torch's C++ not count so many modes per thread when it asks whether any is on (dispatch_mode.c).
        self.own_modes = function("own_modes", None, ctypes.c_int)
        # Without the GIL, which the threads that are waited for may be waiting for.
        self._settle = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY).emu_control_settle
        self._callback = None  # kept alive for as long as the driver may call it

    def on_uncomputed_read(self, callback):
        """Have ``callback(address, num_bytes)`` called whenever the host copies bytes that nobody computed."""
        made = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_size_t)(callback)
        self._on_read(ctypes.cast(made, ctypes.c_void_p))
        self._callback = made

    def moved(self):
        """Return the traffic requested of this process's collectives so far: {(kind, ranks): (calls, bytes)}, the kind
        by the driver's number (nccl.h).
        """
        room = self._moved(None, 0)
        lines = (_Moved * room)()
        self._moved(lines, room)
        return {(one.kind, one.num_ranks): (one.calls, one.bytes) for one in lines}

    def take_host_peaks(self):
        """The most bytes of host memory that this process held since the last call: (both, CPU tensors, pinned)."""
        peaks = (ctypes.c_uint64 * 3)()
        self._take_host_peaks(peaks)
        return tuple(peaks)

    def settle(self):
        """Wait until every other thread of this process is asleep, or busy for a second: at exit (threads.c)."""
        return bool(self._settle(1000))

    def set_fill(self, contents, seed):
        """Set the contents of bytes that nobody computed, where the driver itself hands them out."""
        self._set_fill(FILL_KINDS[contents], seed)


def loaded_driver():
    """The ``Driver`` of this process; NoEmulatedDriver where none is loaded."""
    path = library_path()
    if path is None:
        raise NoEmulatedDriver(
            f"no emulated GPU in this process ({LIBRARY} is not loaded): values are only watched under --emulate"
        )
    return Driver(path)
