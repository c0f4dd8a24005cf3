"""A run that is probed trains on its first batch until its steps are done, then on that batch in other shapes.

In: torch's DataLoader iterators, as the program uses them. Out: a ``probe`` line with the batch's own shape, and a
``batch`` line for each other one, with the step that trains on it. Rows are taken or repeated, tokens cut or repeated;
the values are nobody's, so this is for an emulated GPU alone.
"""

import copy
import functools
import time
import weakref

from .after_steps import add_callback
from .batch_shapes import tensors_in
from .journal import complain
from .own_batches import OwnBatches

_MOST_STEPS = 100  # of a Trainer that is probed
_LIMIT_SECONDS = 300.0  # then what was probed must do
_MANY_TOKENS = 4096  # of a batch: an embedding's backward sorts more than 3,072
_LONGEST = 1 << 17
_ALIGNED = 64  # tokens that kernels like a length to be a multiple of


class ProbeBatches(OwnBatches):
    """One process's."""

    def __init__(self, folder, watches):
        super().__init__(folder, watches)
        self._bases = {}  # the first batch of each data set, by its id
        self._base = None

    def _was_handed(self, iterator, batch):
        """The batch to hand on: the data set's first one, so that all steps are alike."""
        key = id(iterator._dataset)
        self._handed[key] = self._handed.get(key, 0) + 1
        self._last, self._last_at = weakref.ref(iterator), time.monotonic()
        if key not in self._bases:
            size = getattr(iterator._index_sampler, "batch_size", None)
            self._bases[key] = ProbedBatch(batch, size)
        return self._bases[key].reshaped(None)

    def _plan(self, watch, step):
        iterator = self._last() if self._last is not None else None
        if iterator is None:
            return watch.line("probe", why="its loop takes no batches from a torch DataLoader")
        key = id(iterator._dataset)
        size, stale = self._pace(watch, step, self._handed[key])
        if size < 1:
            return watch.line("probe", why="its loop does not train on one batch in each backward")
        self._base = self._bases[key]
        if self._base.shape is None:
            return watch.line("probe", why="its batches hold no tensors")
        most = _positions(watch.modules) if self._base.length else None
        shapes = probed_shapes(*self._base.shape, most) if self._base.length else probed_rows(*self._base.shape)
        watch.line(
            "probe", steps=step, rows=self._base.shape[0], width=self._base.shape[1], micro_steps=size,
            num_shapes=len(shapes),
        )  # fmt: skip
        self._fed_set = key
        self._until = time.monotonic() + _LIMIT_SECONDS
        self._begin_to_play([(self._base.shape, False), *shapes], size, stale, step)

    def _next_of_ours(self):
        (shape, held_out), step = self._queue.pop(0)
        if step is not None and len(self._queue) % self._size == self._size - 1:  # the first of its step
            if time.monotonic() > self._until:
                self._queue, self._last_step = self._queue[: self._size - 1], step
            self._watches[-1].line(
                "batch", step=step, batch=0, rows=shape[0], width=shape[1], held_out=held_out, indices=[]
            )
        return self._base.reshaped(shape)

    def go_on_training(self, module):
        """``module``: transformers.trainer. Its Trainer trains while shapes are left, and does nothing else."""

        def train_alone(trainer):
            trainer.args.max_steps = _MOST_STEPS
            for name in ("eval_strategy", "save_strategy", "logging_strategy"):
                setattr(trainer.args, name, type(getattr(trainer.args, name))("no"))

        try:
            add_callback(module.Trainer, self._callback(module.TrainerCallback), train_alone)
        except Exception as error:  # of a release that is made otherwise
            complain(error)

    def _callback(own, kind):
        class ProbeCallback(kind):
            def on_step_end(self, args, state, control, **kwargs):
                control.should_evaluate = control.should_save = False
                if own._queue or not own._is_done:
                    control.should_training_stop = control.should_epoch_stop = False

        return ProbeCallback()


class ProbedBatch:
    """A batch, and the same in other shapes. ``shape``: samples, tokens of a row (elements where it has no tokens);
    None without tensors. ``length``: tokens of a row, None where they cannot be cut."""

    def __init__(self, batch, num_samples):
        self._batch = batch
        tensors = [one for one in tensors_in(batch) if one.dim() > 0 and len(one)]
        tokens = [one for one in tensors if one.dim() == 2 and not one.dtype.is_floating_point]
        largest = max(tokens or tensors, key=lambda one: one.numel(), default=None)
        self.shape = self.length = None
        if largest is None:
            return
        rows = len(largest)
        is_even = num_samples and rows > num_samples and rows % num_samples == 0  # as DPO's: chosen, then rejected
        self._num_samples = num_samples if is_even else rows
        self._rows = rows
        if tokens:
            self.length = max(one.shape[1] for one in tokens if len(one) == rows)
            self._lengths = {one.shape[1] for one in tokens if one.shape[1] > 1}
        self.shape = (self._num_samples, self.length or largest.numel() // rows)

    def reshaped(self, shape):
        """The batch with so many samples and tokens; None: as it is, in containers of its own."""
        if self.shape is None:
            return self._batch
        return _mapped(self._batch, functools.partial(self._resized, shape or self.shape))

    def _resized(self, shape, tensor):
        import torch

        if shape == self.shape or tensor.dim() == 0:
            return tensor
        found = tensor
        if len(tensor) in (self._rows, self._num_samples):
            sets = len(tensor) // self._num_samples
            index = [of * self._num_samples + at % self._num_samples for of in range(sets) for at in range(shape[0])]
            found = found.index_select(0, torch.tensor(index))
        for dim in range(1, tensor.dim()):
            if self.length and shape[1] != self.length and tensor.shape[dim] in self._lengths:
                wanted = max(round(tensor.shape[dim] * shape[1] / self.length), 1)
                found = found.index_select(dim, torch.arange(wanted) % tensor.shape[dim])
        return found


def probed_shapes(rows, length, most=None):
    """((rows, length), held out) each: several rows and one, lengths around the own one and beyond, up to ``most``.

    Most lengths are as even as the own one, since kernels may treat others otherwise; a few are less and more so.
    """
    even = min(length & -length, _ALIGNED)
    while even > 1 and length < 8 * even:
        even //= 2
    most = max(most or _LONGEST, length)

    def times(factor):
        return max(min(round(length * factor), most) // even * even, even)

    several = max(rows, 2)
    other = min(times(0.75) + 1 if even > 1 else -(-times(0.75) // _ALIGNED) * _ALIGNED, most)
    found = [(several, length), (several + 1, length), (2 * several, length), (several, times(0.5))]
    found += [(2, times(1.5)), (several + 1, times(2)), (2 * several, times(0.75)), (several, other)]
    found += [(several, times(0.875) // 8 * 8)]
    for number, factor in ((several, 1), (several + 1, 1.25), (several, 1.75), (1, 1), (1, 1.25), (1, 1.75)):
        long = times(factor * max(_MANY_TOKENS / number / length, 2))
        found += [(number if number == 1 else max(number, round(factor * _MANY_TOKENS / long)), long)]
    found += [(1, length), (1, times(0.5)), (1, times(2)), (1, other)]
    held_out = {(several + 1, times(1.25)), (1, times(1.25))}
    return [
        (one, one in held_out) for one in dict.fromkeys([*found, *held_out]) if one != (rows, length) and one[1] > 0
    ]


def probed_rows(rows, length):
    """((rows, length), held out) each, of batches whose rows cannot be cut."""
    several = max(rows, 2)
    found = [several, several + 1, several + 3, 2 * several, 3 * several, 1]
    return [((one, length), one == several + 3) for one in dict.fromkeys(found) if one != rows]


def _positions(modules):
    """The longest row that a model says it takes; None where none says so."""
    said = [getattr(getattr(one, "config", None), "max_position_embeddings", None) for one in modules]
    return min((one for one in said if isinstance(one, int) and one > 0), default=None)


def _mapped(value, change):
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if hasattr(value, "keys"):
        made = copy.copy(value)
        for name in list(value.keys()):
            made[name] = _mapped(value[name], change)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(one, change) for one in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(one, change) for one in value)
    return value
