"""Into a process at its start: wait for torch, then for CUDA, then watch; at its end, what was seen is on disk.

In: :func:`install`, called by the sitecustomize that launch.py puts before all else. Out: the files of journal.py and
history.py. ``run.json`` says what is asked for: ``trace`` (all, step or none), ``trace_step``, ``steps``,
``verify``, ``phases``.
"""

import atexit
import functools
import json
import os

from vramprobe_values import compiled, one_rank
from vramprobe_values.imports import when_imported

from . import engine_log, generation, loading_threads, settle
from .doing import note_doing
from .journal import FOLDER_VARIABLE, ProcessJournal, complain
from .uncaught import note_uncaught

_is_installed, _after_steps, _own_batches = False, None, None
_watches = []  # this process's own, once it has used CUDA


def install():
    """Watch as soon as torch has been imported (now, if it has been); twice is once."""
    global _is_installed
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and not _is_installed:
        _is_installed = True
        note_uncaught(folder)
        world = one_rank.settle()
        if world is not None:
            when_imported("torch", lambda torch: one_rank.install(torch, *world))
        compiled.skip_our_frames()
        when_imported("torch", lambda torch: _start(folder, torch))
        when_imported("ray._private.worker", functools.partial(settle.before_ray_ends, folder))
        engine_log.listen(folder)


def _start(folder, torch):
    try:
        with open(os.path.join(folder, "run.json"), encoding="utf-8") as file:
            told = json.load(file)
        asked = told["options"]
        if told.get("emulate"):
            from .host import note_mapped_files

            note_mapped_files(torch)
            when_imported("transformers.generation.stopping_criteria", functools.partial(generation.serve, _watches))
            loading_threads.install()
            if asked.get("speed"):
                from vramprobe_values.count import kernels

                kernels.watch()
        note_doing(folder, _watches)
        _name_phases(folder, asked)
        torch.cuda._lazy_call(lambda: _watch(folder, asked))
    except Exception as error:  # somebody else's process goes on without
        complain(error)


def _name_phases(folder, asked):
    global _after_steps, _own_batches
    from . import engine, scopes

    if asked.get("probe"):
        from .probe_batches import ProbeBatches

        _own_batches = ProbeBatches(folder, _watches)
        when_imported("torch.utils.data.dataloader", _own_batches.install)
        when_imported("transformers.trainer", _own_batches.go_on_training)
    elif asked.get("phases") and asked.get("steps"):
        from .after_steps import AfterSteps
        from .own_batches import OwnBatches

        _after_steps, _own_batches = AfterSteps(folder, _watches), OwnBatches(folder, _watches)
        when_imported("torch.utils.data.dataloader", _own_batches.install)
    scopes.install(_watches)  # around what it wraps
    engine.install(_watches, functools.partial(settle.listen, folder))


def _watch(folder, asked):
    try:
        from .watch import Watch

        journal = ProcessJournal(folder)
        watch = Watch(journal, asked, _after_steps, _own_batches)
        one_rank.on_leave.append(journal.discard)
    except Exception as error:
        complain(error)
        return
    _watches.append(watch)
    atexit.register(watch.end)
    if asked.get("requests") or settle.is_of_ray():
        settle.listen(folder, watch)
    watch.on_end = functools.partial(_settle_engines, folder, watch)
    if _own_batches is not None:
        atexit.register(_own_batches.leave, watch)
    from multiprocessing import util

    os.register_at_fork(after_in_child=watch.forked)
    util.Finalize(None, watch.end, exitpriority=0)  # what multiprocessing forked ends without atexit


def _settle_engines(folder, watch):
    """A trainer is at its end: an engine that served it from processes of its own is ended with it."""
    if watch.phases.steps and not watch.is_listening:
        settle.ask(folder)


def write_so_far():
    """Write this process's observations so far, as if it ended here; it goes on."""
    for watch in _watches:
        watch.write_so_far()
