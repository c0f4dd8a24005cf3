"""One process's watch, from its first CUDA call on: phases, history, what is held, the end.

In: a Journal, what is asked for (``run.json``). Out: its lines, and the history's file. A forked child that makes a
context of its own starts anew.
"""

import os
import sys
import threading
import time

import torch
from vramprobe_values import one_rank

from . import held, process, settle
from .counters import Counters
from .host import HostPeaks
from .journal import complain, hook_folders
from .kept_lists import kept_lists
from .marks import Marks
from .parallel import missing_kernels, parallel_sizes
from .phases import Phases, used_bytes
from .process import rank
from .settings import left_out_of_checkpointing, left_unquantized, of_models
from .stop import Stop
from .trace import Trace
from .verify import StepVerification

_GROWTH_IS_SOUGHT_AT = (5, 9)  # steps
_COPIES_ARE_SOUGHT_AT = 2  # the step at whose end; an EMA copy is made before the first


class Watch:
    """See the module. ``end`` may be called more than once."""

    def __init__(self, journal, asked, after_steps=None, own_batches=None):
        self._journal, self._pid, self._ended = journal, os.getpid(), False
        self._modules, self._why, self._report = {}, "exit", None
        self._writing = threading.RLock()  # of what was seen so far (settle.py), while the process ends
        self.counters = Counters()
        self._values = _values_watch()
        driver = self._values.mode.driver if self._values is not None else None
        counted = (driver.moved, driver.take_device_peak_bytes) if driver is not None else ()
        self.phases = Phases(journal, self.counters, used_bytes, *counted)
        if driver is not None:
            self.phases.on_close.append(HostPeaks(journal, driver.take_host_peaks).closed)
        self._trace = Trace(asked["trace"], asked["trace_step"], lambda said: self.line("warning", message=said))
        journal.write("process", **process.described(self._values is not None))
        torch._C._cuda_attach_out_of_memory_observer(self.note_oom)
        self._stepped = set()  # optimizers whose masters are known, by id
        self._marks = Marks(
            self.phases, self._forward, self._backward_ended, self._optimizer_steps, self._optimizer_stepped
        )
        self.phases.on_step.append(self._trace.step_ended)
        self.phases.on_step.append(self._look_for_copies)
        self.phases.on_step.append(self._look_for_growth)
        self.phases.on_step.append(self._say_how_ranks_share)
        self.phases.on_step.append(self._say_settings)
        self.phases.on_left.append(self._scope_left)
        if self._values is not None and asked.get("speed"):
            from vramprobe_values.count.step import StepCount

            StepCount(self._values, self.phases, self.line)
        verifies = asked["verify"] and self._values is not None
        self._verification = StepVerification(self, self._values) if verifies else None
        self._stop = Stop(self, asked["steps"], self._verification, after_steps, own_batches)
        self._goes_on = False  # after its steps, to its own end
        self.is_listening, self.on_end = False, None  # settle.py; called once this process has written its end
        if after_steps is not None:
            self.phases.on_mark.append(after_steps.check)

    def profiled(self):
        """End the profile: later steps are not the run's, but steps under other values."""
        self._trace.close()
        self.phases.write_no_more()
        self._report = self._values.report()
        self._why = "stopped"

    @property
    def is_ending(self):
        """Return True if the process is at its end, by itself or by a stop."""
        return self._ended

    def stop(self):
        """The end, as it is asked for: the run knows enough."""
        self._why = "stopped"
        self.end()

    def leave(self):
        """End the process by SystemExit, as after its steps."""
        self._stop.leave()

    def goes_on(self):
        """The steps are done, and the run goes on to its end."""
        self._goes_on = True
        self.phases.count_no_more()

    @property
    def place_among_ranks(self):
        """(this rank, how many run): the first of one where the others are only made up."""
        here = rank()
        if (here["world_size"] or 1) <= 1 or one_rank.VARIABLE in os.environ:
            return 0, 1
        return here["rank"], here["world_size"]

    @property
    def is_of_another_process(self):
        """Return True if this process was forked from the one that is watched."""
        return os.getpid() != self._pid

    @property
    def modules(self):
        """The outermost modules whose forward has run."""
        return list(self._modules.values())

    def line(self, kind, **fields):
        """One more line in the journal."""
        self._journal.write(kind, **fields)

    def _scope_left(self, name):
        """A worker of Ray's is killed without a word once nobody refers to it: it writes after each cycle, too."""
        if settle.is_of_ray() and (name == "sleep" or (name == "weight_sync" and self.phases.steps)):
            self.write_so_far()

    def write_so_far(self):
        """As at the end, of a process that goes on."""
        if self._ended or self.is_of_another_process:
            return
        with self._writing:
            self.phases.close_so_far()
            self._trace.write_so_far(self._journal.path(".history"))
            self._write_end("so far")

    def end(self):
        """The process ends: the last phase, the history, who read values, the counts. Interrupted, the history, whose
        millions of events take their time, comes last: who does not wait for it (launch.py) has all else."""
        if self._ended or self.is_of_another_process:
            return
        self._ended = True
        with self._writing:
            try:
                self._hold_what_was_loaded()
                if self._why != "stopped" or self._goes_on:
                    self.phases.close()
                if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
                    self._write_end(self._why)
                self._trace.write(self._journal.path(".history"))
                if self._verification is not None:
                    self._verification.end()
            except Exception as error:
                complain(error)
            self._write_end(self._why)
            self._close()  # what a program that was asked to stop goes on to do
        if self.on_end is not None:
            self.on_end()

    def _write_end(self, why):
        for remark in one_rank.remarks:
            self.line("warning", message=remark)
        if self._values is not None:
            self._journal.write("values", **(self._report or self._values.report()))
        error = getattr(sys, "last_value", None)
        if why == "exit" and error is not None:  # an exception that nobody caught
            why = "error"
            if self._goes_on and not isinstance(error, torch.cuda.OutOfMemoryError):
                why = "exit"
                self.line(
                    "warning", message=f"after its steps the program ended by {_said(error)}; what follows is unseen"
                )
        retries, ooms = (sum(counts) for counts in zip(*self.phases.retries.values(), (0, 0), strict=True))
        self._journal.write(
            "end", why=why, num_alloc_retries=retries, num_ooms=ooms, ended_ns=time.time_ns(), after_steps=self._goes_on
        )

    def forked(self):
        """In a child: it has none of this process's memory, and writes nothing of it."""
        self._ended = True
        self._close()

    def _close(self):
        self.phases.write_no_more()
        self._journal.close()

    def _forward(self, module):
        self._modules[id(module)] = module
        if self._trace.is_on():
            self._trace.hold(held.weights(module))

    def _backward_ended(self):
        if self._trace.is_on():
            self._trace.hold(held.gradients(self._modules.values(), self._marks.optimizers.values()))

    def _optimizer_steps(self, optimizer):
        """A framework's gradients may stand in an optimizer's parameters from now on alone."""
        if self._trace.is_on():
            self._trace.hold(held.gradients((), [optimizer]))
            if id(optimizer) not in self._stepped:
                self._stepped.add(id(optimizer))
                self._trace.hold(held.masters([optimizer]))

    def _optimizer_stepped(self, optimizer):
        if self._trace.is_on():
            self._trace.hold(held.optimizer_state([optimizer]))

    def hold_engine(self, cause, tensors):
        """An inference engine's (name, tensor) pairs, standing now."""
        if self._trace.is_on():
            self._trace.hold(held.named(cause, tensors))

    def _look_for_copies(self, step):
        if step == _COPIES_ARE_SOUGHT_AT and self._trace.is_on():
            try:
                self._trace.hold(held.other_models(self._modules.values()))
            except Exception as error:  # of somebody's module
                complain(error)

    def _look_for_growth(self, step):
        if step in _GROWTH_IS_SOUGHT_AT and self.phases.grows() and (lists := kept_lists(step - 2)):
            self.line("kept", step=step, lists=lists)

    def _say_how_ranks_share(self, step):
        if step != 1:
            return
        if not self.place_among_ranks[0] and (missing := missing_kernels()) is not None:  # said by one rank
            self.line("warning", message=missing)
        if (rank()["world_size"] or 1) > 1:
            try:
                if sizes := parallel_sizes(self._modules.values()):
                    self.line("parallel", sizes=sizes)
            except Exception as error:  # of a release whose groups are kept otherwise
                complain(error)

    def _say_settings(self, step):
        if step == 1:
            try:
                self.line("settings", settings=of_models(self._modules.values()))
            except Exception as error:  # of a module that is made otherwise
                complain(error)
            self._say_what_is_left_out()

    def _say_what_is_left_out(self):
        for of in (left_out_of_checkpointing, left_unquantized):
            try:
                if said := of(list(self._modules.values())):
                    self.line("warning", message=said)
            except Exception as error:  # of a module that is made otherwise
                complain(error)

    def _hold_what_was_loaded(self):
        """In loading no forward has shown a module: the weights are those of every module there is."""
        if self._trace.is_on() and not self.phases.started:
            self._trace.hold(held.weights_of_all())

    def note_oom(self, device, requested, total, free):
        """The card has run out: torch's allocator says so, or an engine's own."""
        if self._verification is not None and self._verification.is_under_way():
            return
        self._hold_what_was_loaded()
        if self._trace.is_on():  # of a step that did not come to its end, too
            self._trace.hold(held.optimizer_state(self._marks.optimizers.values()))
        if not self.phases.steps:  # else said after the first step
            self._say_what_is_left_out()
        stats = torch.cuda.memory_stats(device)
        self._journal.write(
            "oom",
            device=device,
            requested_bytes=requested,
            total_bytes=total,
            free_bytes=free,
            allocated_bytes=stats["allocated_bytes.all.current"],
            reserved_bytes=stats["reserved_bytes.all.current"],
            phase=self.phases.name,
            step=self.phases.step if self._modules else None,  # an engine's process takes none
            stack=_stack(),
            time_ns=time.time_ns(),
        )
        if settle.is_of_ray():
            self.write_so_far()

    @property
    def is_emulated(self):
        return self._values is not None


def _values_watch():
    """The emulated card's watch over values, where this process has one (emulate/values)."""
    package = sys.modules.get("vramprobe_values")
    return package.enabled() if package is not None else None


def _said(error):
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")


def _stack():
    """Return the caller's stack, innermost first, without vramprobe's own hooks."""
    frame, hooks, found = sys._getframe(2), hook_folders(), []
    while frame is not None and len(found) < 100:
        if not frame.f_code.co_filename.startswith(hooks):
            found.append([frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name])
        frame = frame.f_back
    return found
