"""Run what a program does after its steps, once each and shortened: evaluation, save, and the rest of its script.

In: transformers' Trainer (and so TRL, Axolotl, LLaMA-Factory, ms-swift), by a callback of its own kind; the DataLoader
that feeds any other loop (loaders.py). Out: once the steps are done the Trainer is told, by its own control flags, to
evaluate and to save where its arguments say that it would, and to end its training; another loop's data end. The script
goes on to its end. Evaluation takes the longest rows, a few batches of them.
"""

import functools
import os
import sys
import threading

from vramprobe_values.imports import instead_of, when_imported

from .batch_shapes import row_lengths
from .discard import Discard
from .journal import complain, warn
from .loaders import Loaders
from .process import rank
from .settings import of_arguments

_BATCHES = 4  # the last two show what each batch adds
_ROWS_LOOKED_AT = 100_000
_ROWS_OPENED = 1_000  # of a data set without columns, row by row
_LIMIT_SECONDS, _GRACE_SECONDS = 300.0, 60.0


class AfterSteps:
    """One process's. ``watches`` as in scopes.install."""

    def __init__(self, folder, watches):
        self.is_under_way, self._is_training, self._watches = False, False, watches
        self._remark = functools.partial(warn, watches)
        self._discard = Discard(folder, self._remark, self._would_damage)
        self._is_late, self._peaks, self._num_batches = False, [], 0
        self._is_length_told = False
        self._loaders = Loaders(_BATCHES, self._shortened_loader, self._loop_ends, self._endless)
        self._loaders.install(when_imported)
        self._discard.install(when_imported)
        when_imported("transformers.trainer", self._install)

    def begin(self):
        """The steps are done; -> whether the loop can be ended after this one more step: a Trainer's, or one whose data
        come from a DataLoader."""
        if not self.is_under_way and (self._is_training or self._loaders.end()):
            self.is_under_way = True
            self._discard.begin()
            limit = threading.Timer(_LIMIT_SECONDS, self._late)
            limit.daemon = True
            limit.start()
        return self.is_under_way

    def step_ended(self, step):
        """Called as each whole step ends, after all that may call ``begin``."""
        self._loaders.step_ended()

    def check(self):
        """Leave where this takes too long; called as phases begin."""
        if self._is_late:
            self._is_late = False
            self._remark(
                f"what follows the steps took more than {_LIMIT_SECONDS:.0f} s and was ended: --whole runs all"
            )
            self._watches[-1].leave()

    def _late(self):
        self._is_late = True
        end = threading.Timer(_GRACE_SECONDS, self._end_at_once)
        end.daemon = True
        end.start()

    def _end_at_once(self):
        if self._is_late:
            self._remark(f"what follows the steps was ended after {_LIMIT_SECONDS + _GRACE_SECONDS:.0f} s")
            self._watches[-1].stop()
            os._exit(0)

    def _would_damage(self, path):
        self._remark(f"ended before {path} was overwritten or deleted: the values of an emulated run are not computed")
        self._watches[-1].leave()

    def _loop_ends(self):
        for watch in self._watches[-1:]:
            watch.phases.training_ended()
        sys.excepthook = functools.partial(self._raised, sys.excepthook)

    def _raised(self, excepthook, kind, error, traceback):
        """A loop that takes its batches by ``next`` alone, as Megatron's, does not catch the end of its data."""
        if issubclass(kind, StopIteration):
            self._remark("its loop takes batches by next() and was ended with its data; what follows it is unseen")
            self._watches[-1].leave()
        excepthook(kind, error, traceback)

    def _endless(self, times):
        self._remark(
            f"ended after the loop had asked for its training data {times} times more: it counts steps, and would not "
            "have ended without data; what follows it is unseen, which --whole shows"
        )
        self._watches[-1].leave()

    def _install(self, module):
        try:
            add_callback(module.Trainer, self._callback(module.TrainerCallback))
            instead_of(module.Trainer, "get_eval_dataloader")(self._eval_dataloader)
        except Exception as error:  # of a release that is made otherwise
            complain(error)

    def _callback(after, kind):
        class AfterStepsCallback(kind):
            def on_step_begin(self, args, state, control, **kwargs):
                after._is_training = True

            def on_step_end(self, args, state, control, **kwargs):
                after._say_how_long(args, state, kwargs.get("train_dataloader"))
                if after.is_under_way:
                    after._ends_training(args, state, control)

            def on_train_end(self, args, state, control, **kwargs):
                after._is_training = False
                if after.is_under_way:
                    after._loaders.shorten()
                for watch in after._watches[-1:]:
                    watch.phases.training_ended()

            def on_prediction_step(self, args, state, control, **kwargs):
                if after.is_under_way and after._watches:
                    after._evaluated_a_batch(after._watches[-1])

        return AfterStepsCallback()

    def _say_how_long(self, args, state, loader):
        """By the Trainer's own arithmetic: the steps of its whole training, before anything shortens it."""
        if not self._is_length_told and self._watches:  # a resumed training's first step is not step 1
            self._is_length_told = True
            self._watches[-1].line(
                "trainer",
                num_steps=state.max_steps,
                are_given=args.max_steps > 0,
                num_epochs=args.num_train_epochs,
                num_batches=_length(loader),
                grad_accum=args.gradient_accumulation_steps,
                world_size=args.world_size,
            )
            self._watches[-1].line("settings", settings=of_arguments(args))

    def _ends_training(self, args, state, control):
        args.output_dir = os.fspath(self._discard.path(args.output_dir))
        args.push_to_hub = False
        self._watches[-1].phases.training_ended()
        # a rank that does not find the checkpoint's folder when it looks leaves out load_best; the others wait for it
        os.makedirs(os.path.join(args.output_dir, f"checkpoint-{state.global_step}"), exist_ok=True)
        control.should_training_stop = True
        # "epoch" does both at the epoch's end, which follows; "best" saves where the evaluation was the best
        control.should_evaluate |= _is(args, ("eval_strategy", "evaluation_strategy"), "steps")
        control.should_save |= _is(args, ("save_strategy",), "steps")

    def _eval_dataloader(self, loader_of, trainer, eval_dataset=None):
        if not self.is_under_way:
            return loader_of(trainer, eval_dataset)
        rows = trainer.eval_dataset if eval_dataset is None else eval_dataset
        rows = trainer.eval_dataset[rows] if isinstance(rows, str) else rows
        self._peaks.clear()
        size = trainer.args.eval_batch_size * max(trainer.args.world_size, 1)
        return loader_of(trainer, self._longest(rows, size) or rows)

    def _shortened_loader(self, loader):
        """A loader like this one over its longest rows; None where it must stay as it is, and is cut short."""
        import torch

        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        if type(loader) is not torch.utils.data.DataLoader or size is None:
            return None
        rows = self._longest(loader.dataset, size * (rank()["world_size"] or 1))
        if rows is None:
            return None
        return torch.utils.data.DataLoader(rows, size, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory)

    def _longest(self, rows, size):
        """The longest rows of a data set, as many as some batches of ``size`` take; None: all of them, as they are."""
        wanted = _BATCHES * size
        self._num_batches = 0
        try:
            count = len(rows)
        except TypeError:
            return rows.take(wanted) if hasattr(rows, "take") else None
        if count <= wanted:
            return None
        lengths = _lengths(rows)
        chosen = sorted(range(len(lengths)), key=lambda at: -lengths[at])[:wanted]
        which = "those of the longest rows" if len(chosen) == wanted else "the first ones: lengths are unknown"
        chosen = chosen if len(chosen) == wanted else list(range(wanted))
        self._num_batches = -(-count // size)
        self._remark(f"evaluation was shortened to {_BATCHES} of {self._num_batches} batches, {which}")
        if hasattr(rows, "select"):
            return rows.select(chosen)
        import torch

        return torch.utils.data.Subset(rows, chosen)

    def _evaluated_a_batch(self, watch):
        """Record how much each batch adds to the peak, as kept logits do; the other batches would add as much."""
        self._peaks.append(watch.counters.peak_bytes())
        num, of = len(self._peaks), self._num_batches
        if num == _BATCHES and of > num and (grown := self._peaks[-1] - self._peaks[-2]) > 0:
            watch.line("evaluation", num_batches=num, num_batches_of=of, grown_bytes=grown, peak_bytes=self._peaks[-1])


def add_callback(kind, callback, then=lambda trainer: None):
    """Give each Trainer of this class a callback as soon as it is made, and ``then(trainer)``."""

    @instead_of(kind, "__init__")
    def __init__(run, trainer, *args, **kwargs):
        run(trainer, *args, **kwargs)
        trainer.add_callback(callback)
        then(trainer)


def _is(args, names, value):
    found = next((getattr(args, name) for name in names if hasattr(args, name)), "no")
    return getattr(found, "value", found) == value


def _length(loader):
    try:
        return len(loader)
    except TypeError:  # a stream, or none
        return None


def _lengths(rows):
    """Tokens of each row, by the first columns that tell; of few rows where each must be opened."""
    if hasattr(rows, "column_names") and hasattr(rows, "with_format"):
        return row_lengths(rows, _ROWS_LOOKED_AT) or []
    found = []
    for at in range(min(len(rows), _ROWS_OPENED)):
        row = rows[at]
        try:
            found.append(len(row["input_ids"]))
        except (KeyError, TypeError, IndexError):
            return []
    return found
