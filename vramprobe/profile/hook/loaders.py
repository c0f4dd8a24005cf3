"""A training loop's own DataLoader ends after the steps, so that a script without a Trainer goes on to its end.

In: torch's DataLoaders and torchdata's, as they are iterated. Out: :meth:`Loaders.end` ends the one that feeds the
loop, for good; each of the others is then shortened to a few batches, those of the longest rows where lengths can be
told. A loop that is not fed by a DataLoader cannot be ended so.
"""

import weakref

from vramprobe_values.imports import instead_of

from .journal import complain

#: A loop that begins its data anew so many times goes by steps, which do not come any more.
_MAX_EPOCHS = 100
_MODULES = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")


class _Given:
    """Facts about a loader, which its iterators may outlive."""


class Loaders:
    """One process's. ``shortened(loader)``: its rows to iterate instead, or None to take its first ``num_batches``.
    ``on_end()``: the loop has had its last batch; ``on_endless(times)``: it asks for more, again and again."""

    def __init__(self, num_batches, shortened, on_end, on_endless):
        self._num_batches, self._shortened = num_batches, shortened
        self._on_end, self._on_endless = on_end, on_endless
        self._of_loaders, self._of_iterators = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()  # to a _Given
        self._fed = self._ended = None  # a _Given
        self._is_within = self._is_shortening = False
        self._num_epochs = 0

    def install(self, when_imported):
        """Watch the iterators of each kind as soon as its module is there."""
        for name in _MODULES:
            when_imported(name, self._watch)

    def step_ended(self):
        """A loader that gives nothing until the next step's end does not feed the loop."""
        self._fed = None

    def end(self):
        """End the loader that fed the step under way; -> whether there is one."""
        self._ended = self._fed
        self._is_shortening = self._ended is not None
        return self._is_shortening

    def shorten(self):
        """From now on no loader gives more than a few batches."""
        self._is_shortening = True

    def _watch(self, module):
        for name in ("DataLoader", "StatefulDataLoader"):
            kind = vars(module).get(name)
            if kind is not None and kind.__module__ == module.__name__ and hasattr(kind, "_get_iterator"):
                instead_of(kind, "_get_iterator")(self._get_iterator)
        for kind in [one for name, one in vars(module).items() if name.endswith("Iter") and isinstance(one, type)]:
            if kind.__module__ == module.__name__ and "__next__" in vars(kind):
                instead_of(kind, "__next__")(self._next)

    def _get_iterator(self, get_iterator, loader):
        of = self._of_loaders.setdefault(loader, _Given())
        if of is self._ended:
            return iter(self._no_more, None)
        made = loader
        if self._is_shortening:
            try:
                made = self._shortened(loader) or loader
            except Exception as error:  # rows of a kind that is not known
                complain(error)
        iterator = get_iterator(made)
        self._of_iterators[iterator] = (of, [0])
        return iterator

    def _next(self, run, iterator):
        of, count = self._of_iterators.get(iterator) or (None, [0])
        if self._is_within:
            return run(iterator)
        if of is not None and of is self._ended:
            return self._no_more()
        count[0] += 1
        if self._is_shortening and count[0] > self._num_batches:
            raise StopIteration
        self._is_within = True
        try:
            batch = run(iterator)
        finally:
            self._is_within = False
        self._fed = of
        return batch

    def _no_more(self):
        if self._num_epochs == 0:
            self._on_end()
        self._num_epochs += 1
        if self._num_epochs > _MAX_EPOCHS:
            self._on_endless(_MAX_EPOCHS)
        raise StopIteration
