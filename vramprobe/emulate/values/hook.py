"""Values on in any process that imports torch: for launchers whose children nobody else can reach.

In: a process with VRAMPROBE_EMULATED_MACHINE set, and this file's ``install()`` called at its start (a line in a .pth
file, ``site_folder`` on PYTHONPATH, or a call). Out: values on from torch's import on; at exit
``<machine folder>/values-<pid>.json`` with the reads and the allocator's peaks. It imports nothing of torch itself,
does nothing without the variable, and never fails a process: what went wrong is in the file.
"""

import atexit
import importlib.abc
import importlib.machinery
import json
import os
import sys

MACHINE, POLICY = "VRAMPROBE_EMULATED_MACHINE", "VRAMPROBE_VALUES_POLICY"
PACKAGE = "vramprobe_values"  # the name under which an environment without vramprobe has this package


def pth_line():
    """One line for a .pth file of an environment: loads this package by its path, under a name of its own, and
    installs the hook."""
    folder = os.path.dirname(os.path.abspath(__file__))
    start = f"exec({_load_and_install(folder)!r})"
    return f"import os; {start} if os.environ.get({MACHINE!r}) else None  # vramprobe: values\n"


def site_folder(machine):
    """A folder in ``machine`` (a machine's folder) to put first on PYTHONPATH: every Python process that has it there
    and imports torch is watched, whichever interpreter it is. A ``sitecustomize`` of the environment's own runs, too."""
    folder = os.path.join(machine, "site")
    os.makedirs(folder, exist_ok=True)
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(folder, "sitecustomize.py"), "w", encoding="utf-8") as out:
        out.write(_SITECUSTOMIZE.format(install=_load_and_install(here)))
    return folder


_SITECUSTOMIZE = '''"""Made by vramprobe for the processes of one emulated machine."""
import os
import sys
import traceback
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

try:
    exec({install!r})
except Exception:
    traceback.print_exc()  # somebody else's process goes on without
_rest = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]
_spec = PathFinder.find_spec("sitecustomize", _rest)
if _spec is not None and _spec.loader is not None:
    sys.modules["sitecustomize"] = _module = module_from_spec(_spec)
    _spec.loader.exec_module(_module)
'''


def _load_and_install(folder):
    return (  # once: a .pth file and a sitecustomize may both be there
        "import importlib.util, sys\n"
        f"if {PACKAGE!r} not in sys.modules:\n"
        f"    spec = importlib.util.spec_from_file_location({PACKAGE!r}, {os.path.join(folder, '__init__.py')!r}, "
        f"submodule_search_locations=[{folder!r}])\n"
        f"    sys.modules[{PACKAGE!r}] = module = importlib.util.module_from_spec(spec)\n"
        "    spec.loader.exec_module(module)\n"
        f"import {PACKAGE}.hook\n"
        f"{PACKAGE}.hook.install()\n"
    )


def install():
    """Values on as soon as torch has been imported (now, if it has been); twice is once."""
    if not os.environ.get(MACHINE) or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "torch" in sys.modules:
        _start()
    else:
        sys.meta_path.insert(0, _Finder())


def _start():
    from . import enable
    from .policy import Policy

    found = {}
    try:
        watch = enable(Policy(**json.loads(os.environ.get(POLICY, "{}"))))
    except Exception as error:  # someone else's process must not end for it; its report says what was missing
        print(f"vramprobe: values are not watched: {error}", file=sys.stderr)
        watch, found = None, {"error": f"{type(error).__name__}: {error}"}
    pid = os.getpid()

    def forked():
        nonlocal pid
        pid = os.getpid()
        if watch is not None:
            watch.clear()

    os.register_at_fork(after_in_child=forked)
    atexit.register(lambda: write(watch.report() if watch is not None else found, pid))


def write(report, pid=None):
    """Put a report into the machine's folder, whole or not at all; -> its path, or None where the folder is gone."""
    path = os.path.join(os.environ[MACHINE], f"values-{pid or os.getpid()}.json")
    whole = {"pid": pid or os.getpid(), "rank": os.environ.get("RANK"), "arguments": sys.argv[:1], "cards": cards()}
    try:
        with open(path + ".part", "w", encoding="utf-8") as out:
            json.dump(whole | report, out)
        os.replace(path + ".part", path)
    except OSError:
        return None
    return path


def cards():
    """What torch's allocator says of each card that this process used: [{index, peaks in bytes, retries, ooms}].

    The peaks are those since the program last reset them.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        seen = torch.cuda.memory_stats(index)
        if seen.get("reserved_bytes.all.peak"):
            found.append(
                {
                    "index": index,
                    "name": torch.cuda.get_device_name(index),
                    "allocated_peak_bytes": seen["allocated_bytes.all.peak"],
                    "reserved_peak_bytes": seen["reserved_bytes.all.peak"],
                    "num_retries": seen["num_alloc_retries"],
                    "num_ooms": seen["num_ooms"],
                }
            )
    return found


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for torch, then leaves."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                _start()

            spec.loader.exec_module = exec_module
        return spec
