"""Keep an inference engine's log lines about its memory beside the profile; its output stays unchanged.

In: the run's folder. Out: lines of its file ``engine``, of every process, those without a GPU too. An engine's lines
at DEBUG are kept where its own handler would drop them.
"""

import functools
import logging
import multiprocessing
import os
import re

from vramprobe_values.imports import instead_of, when_imported

from .journal import append, complain

FILE = "engine"
#: The module that sets up an engine's logging: its logger, the loggers whose DEBUG lines tell of memory, and the
#: function that sets it up anew (vLLM 0.32, once its options are known).
LOGGERS = {"vllm.logger": ("vllm", ("vllm.v1.worker.gpu_worker",), "configure_logging")}
_OF_MEMORY = re.compile(r"\d ?Gi?[Bb]\b|blocks: |tokens per request|cache size")


def listen(folder):
    """Keep what each engine logs of its memory as soon as its logging is set up."""
    for module, (name, talkative, sets_up) in LOGGERS.items():
        when_imported(
            module, functools.partial(_listen_after, sets_up, functools.partial(_listen, folder, name, talkative))
        )


def _listen_after(sets_up, listen, module):
    if hasattr(module, sets_up):

        @instead_of(module, sets_up)
        def set_up(run, *args, **kwargs):
            run(*args, **kwargs)
            listen()

    listen()


def _listen(folder, name, talkative):
    engine = logging.getLogger(name)
    if any(isinstance(one, _Kept) for one in engine.handlers):
        return
    drops_debug = bool(engine.handlers) and all(one.level > logging.DEBUG for one in engine.handlers)
    engine.addHandler(_Kept(folder, name))
    for one in talkative if drops_debug else ():
        logging.getLogger(one).setLevel(logging.DEBUG)


class _Kept(logging.Handler):
    """A line of the file for each line of the log that tells of memory."""

    def __init__(self, folder, engine):
        super().__init__()
        self._folder, self._engine = folder, engine

    def emit(self, record):
        try:
            text = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:  # as of a cache that is too small
                text = f"{text} {record.exc_info[1]}"
            if _OF_MEMORY.search(text):
                name = multiprocessing.current_process().name  # vLLM's workers: VllmWorker-1
                said = {"engine": self._engine, "pid": os.getpid(), "process": name, "text": text}
                append(self._folder, FILE, said)
        except Exception as error:  # the engine goes on without
            complain(error)
