"""Values on in any process that imports torch: for launchers whose children nobody else can reach.

In: a process with VRAMPROBE_EMULATED_MACHINE set, and this file's ``install()`` called at its start (``site_folder`` on
PYTHONPATH, PTH_LINE in an environment, or a call). Out: values on from torch's import on; at exit
``<machine folder>/values-<pid>.json``: reads, and the allocator's peaks by card. It imports nothing of torch itself,
does nothing without the variable, and never fails a process: what went wrong is in the file.
"""

import atexit
import json
import os
import sys

from . import autotune
from .imports import when_imported

MACHINE, POLICY = "VRAMPROBE_EMULATED_MACHINE", "VRAMPROBE_VALUES_POLICY"
PACKAGE = "vramprobe_values"  # the name under which an environment without vramprobe has this package


#: One line for a .pth file of an environment: what ``site_folder`` made for the machine that a process sees, run at its
#: start, and nothing where it sees none. It names no place, so that it is never out of date.
PTH_LINE = (
    f"import os; _at = os.environ.get({MACHINE!r}, '') + '/site/vramprobe_watch.py'; "
    "os.path.isfile(_at) and exec(open(_at).read())  # vramprobe: values\n"
)

_NAME = "vramprobe_watch.py"
_WATCH = """# Made by vramprobe for the processes of one machine or one run.
import importlib, importlib.util, sys
for _package, _folder, _module in {packages!r}:
    try:
        if _package not in sys.modules:  # once: a .pth file and sitecustomize may both be there
            _spec = importlib.util.spec_from_file_location(
                _package, _folder + "/__init__.py", submodule_search_locations=[_folder])
            sys.modules[_package] = importlib.util.module_from_spec(_spec)
            _spec.loader.exec_module(sys.modules[_package])
            if _package != {own!r}:
                importlib.import_module({own!r} + ".reads").OWN_FOLDERS.append(_folder + "/")
        importlib.import_module(_package + "." + _module).install()
    except Exception as error:  # somebody else's process goes on without
        print(f"vramprobe: this process is not watched: {{type(error).__name__}}: {{error}}", file=sys.stderr)
"""

_SITECUSTOMIZE = """# Made by vramprobe: its own start, then the sitecustomize that this one stands before, if any.
import os, sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
_here = os.path.dirname(os.path.abspath(__file__))
exec(open(os.path.join(_here, "vramprobe_watch.py")).read())
_spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != _here])
if _spec is not None and _spec.loader is not None:
    sys.modules["sitecustomize"] = _module = module_from_spec(_spec)
    _spec.loader.exec_module(_module)
"""


def site_folder(home, also=()):
    """A folder in ``home`` (a machine's, or a run's) to put first on PYTHONPATH; -> its path.

    Every Python that has it there and imports torch is watched, whichever interpreter it is and whoever started it.
    ``also``: other hooks, each as (name of a package, its folder, the module whose ``install()`` is called).
    """
    folder, here = os.path.join(home, "site"), os.path.dirname(os.path.abspath(__file__))
    os.makedirs(folder, exist_ok=True)
    watch = _WATCH.format(own=PACKAGE, packages=[(PACKAGE, here, "hook"), *also])
    for name, text in ((_NAME, watch), ("sitecustomize.py", _SITECUSTOMIZE)):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as out:
            out.write(text)
    return folder


#: The run's folder of a profile (profile/hook/journal.py): a process that has it takes itself for watched.
WATCHED_VARIABLE = "VRAMPROBE_PROFILE"


def unwatched(environment):
    """``environment`` for a process that vramprobe starts for itself, which is nobody's to watch: a second watch on its
    values would change what it allocates. PYTHONPATH is there, less the folders that :func:`site_folder` made."""
    searched = [
        one
        for one in environment.get("PYTHONPATH", "").split(os.pathsep)
        if one and not os.path.isfile(os.path.join(one, _NAME))
    ]
    kept = {name: value for name, value in environment.items() if name != WATCHED_VARIABLE}
    return kept | {"PYTHONPATH": os.pathsep.join(searched)}


_machine = None  # its folder, once installed: a program may empty its environment


def install():
    """Values on as soon as torch has been imported (now, if it has been); twice is once."""
    global _machine
    if os.environ.get(MACHINE) and _machine is None:
        _machine, policy = os.environ[MACHINE], os.environ.get(POLICY, "{}")
        when_imported("torch", lambda torch: _start(policy))
        autotune.watch()


def _start(policy):
    from multiprocessing import util

    from . import enable
    from .policy import Policy

    found = {}
    _keep_peaks()
    try:
        watch = enable(Policy(**json.loads(policy)))
    except Exception as error:  # someone else's process must not end for it; its report says what was missing
        print(f"vramprobe: values are not watched: {error}", file=sys.stderr)
        watch, found = None, {"error": f"{type(error).__name__}: {error}"}
    pid = os.getpid()

    def leave():
        write(watch.report() if watch is not None else found, pid)

    def forked():
        nonlocal pid
        pid = os.getpid()
        if watch is not None:
            watch.clear()

    def begun_by_multiprocessing(_):  # such a process, where it was forked, ends without atexit
        util.Finalize(None, lambda: cards() and leave(), exitpriority=0)

    os.register_at_fork(after_in_child=forked)
    util.register_after_fork(sys.modules[__name__], begun_by_multiprocessing)
    atexit.register(leave)


def write(report, pid=None):
    """Put a report into the machine's folder, whole or not at all; -> its path, or None where the folder is gone."""
    path = os.path.join(_machine, f"values-{pid or os.getpid()}.json")
    whole = {"pid": pid or os.getpid(), "rank": os.environ.get("RANK"), "arguments": sys.argv[:1], "cards": cards()}
    try:
        with open(path + ".part", "w", encoding="utf-8") as out:
            json.dump(whole | report, out)
        os.replace(path + ".part", path)
    except OSError:
        return None
    return path


_before_resets = {}  # card → tier → the highest peak that a reset of the program's has ended


def _keep_peaks():
    """The program's resets of the allocator's peaks are its own affair: what they end is kept for :func:`cards`."""
    import torch

    reset = getattr(torch._C, "_cuda_resetPeakMemoryStats", None)
    if reset is None:
        return

    def keeping(device):
        seen, kept = torch._C._cuda_memoryStats(device), _before_resets.setdefault(device, {})
        for tier in ("allocated", "reserved"):
            kept[tier] = max(kept.get(tier, 0), seen[f"{tier}_bytes"]["all"]["peak"])
        reset(device)

    torch._C._cuda_resetPeakMemoryStats = keeping


def cards():
    """Return the allocator's statistics of each card that this process used: [{index, peaks in bytes, retries, ooms}].

    ``…_peak_bytes`` are those since the program last reset them, ``…_highest_bytes`` those of the whole process.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        seen, kept = torch.cuda.memory_stats(index), _before_resets.get(index, {})
        if seen.get("reserved_bytes.all.peak"):
            found.append(
                {
                    "index": index,
                    "name": torch.cuda.get_device_name(index),
                    "allocated_peak_bytes": seen["allocated_bytes.all.peak"],
                    "reserved_peak_bytes": seen["reserved_bytes.all.peak"],
                    "allocated_highest_bytes": max(seen["allocated_bytes.all.peak"], kept.get("allocated", 0)),
                    "reserved_highest_bytes": max(seen["reserved_bytes.all.peak"], kept.get("reserved", 0)),
                    "num_retries": seen["num_alloc_retries"],
                    "num_ooms": seen["num_ooms"],
                }
            )
    return found
