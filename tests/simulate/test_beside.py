"""One call in a child beside this process: both results, whatever becomes of the child."""

from __future__ import annotations

import os
import signal

import pytest

from vramprobe.simulate.beside import both


def test_both_are_done_and_one_of_them_elsewhere() -> None:
    there, here = both(os.getpid, os.getpid)
    assert here == os.getpid()
    assert there != here


def fails() -> None:
    raise ValueError("of the child's own")


def test_an_error_is_raised_here_whoever_met_it() -> None:
    with pytest.raises(ValueError, match="of the child's own"):
        both(fails, os.getpid)
    with pytest.raises(ValueError, match="of the child's own"):
        both(os.getpid, fails)


def test_a_child_that_is_killed_costs_time_alone() -> None:
    parent = os.getpid()

    def dies() -> str:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return "done here"

    assert both(dies, os.getpid) == ("done here", parent)


def test_with_one_core_there_is_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert both(os.getpid, os.getpid) == (os.getpid(), os.getpid())
