"""The hooks of a loop's phases, as libraries meet them."""

import pickle

from vramprobe.profile.hook.marks import Marks


def test_pickled_guards_take_no_hooks_along() -> None:
    """torch's ahead-of-time compile pickles all global module hooks with a module's guards."""
    marks = object.__new__(Marks)
    marks._phases = lambda: None  # as a lock, it cannot be pickled
    assert vars(pickle.loads(pickle.dumps(marks))) == {}
