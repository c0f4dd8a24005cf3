"""Fixtures of every test: no network, fixed seeds, and no process that it started outlives it.

Synthetic cells and records are in factories.py. The summary says how many tests of the page were skipped for want of
a browser. Where VRAMPROBE_TESTS_UNTIL names a time (seconds since 1970), tests that would begin later are skipped.
"""

import gc
import os
import random
import sys
import time
from collections.abc import Iterator

# Before anything imports huggingface_hub or transformers: a test must never wait for the hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side, and what oneDNN packs is counted per thread
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # AMX takes scratch that other processors do not

import numpy as np
import processes
import pytest
from page_browser import NO_CHROMIUM, NO_PLAYWRIGHT, browser, html, opened, shared_tabs, with_tables

__all__ = ["browser", "html", "opened", "shared_tabs", "with_tables"]  # fixtures of the tests in a browser

_FAILED = pytest.StashKey[bool]()
#: So many modules more, and what they made is left out of later collections.
_NUM_MODULES = 200
_num_frozen = 0


@pytest.fixture(scope="session", autouse=True)
def _nothing_stays() -> Iterator[None]:
    """A test that passes leaves no process running."""
    processes.mark()
    yield
    gc.unfreeze()  # or libraries report what they left at the interpreter's end
    left = processes.end_left_behind()
    assert not left, "tests left processes running, which were killed:\n" + "\n".join(left)


@pytest.fixture(scope="module", autouse=True)
def _no_recorder_stays() -> Iterator[None]:
    """The processes that record for a module's tests end with it: a later test may kill the one worker it sees."""
    yield
    if (recorder := sys.modules.get("vramprobe.recipe.recorder")) is not None:  # most tests never record
        recorder.close_recorders()


@pytest.fixture
def shipped_alone() -> Iterator[None]:
    """Answer by the recipes that ship: this machine, or another test meanwhile, may have recorded others."""
    from vramprobe.predict import at_hand

    with at_hand.shipped_alone():
        yield


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:  # most tests never load it
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _libraries_are_no_garbage() -> None:
    """Freeze what torch and transformers made as they were loaded: each collection of a cell would look through it."""
    global _num_frozen
    if len(sys.modules) >= _num_frozen + _NUM_MODULES:
        _num_frozen = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """While tests are collected nothing is garbage, and to look for it takes a quarter of the time, in each worker."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin no test when the time is up; the summary says of which file how many were not run."""
    if time.time() > float(os.environ.get("VRAMPROBE_TESTS_UNTIL", "inf")):
        pytest.skip(f"no time left for {item.location[0]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """End what a test has started when it has failed, before the next one begins."""
    report = yield
    item.stash[_FAILED] = report.failed or item.stash.get(_FAILED, False)
    if report.when == "teardown" and item.stash[_FAILED]:
        processes.end_left_behind(item.nodeid)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests of the page were skipped and what installs what they miss, where any were."""
    skipped = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]  # (file, line, reason)
    for missing in (NO_PLAYWRIGHT, NO_CHROMIUM):
        if count := sum(missing in reason for reason in skipped):
            terminalreporter.write_line(f"{count} test{'s' * (count > 1)} of the page skipped: {missing}")
