"""What every test gets: no network and fixed seeds. Synthetic cells and records are in factories.py.

And what is said after all of them: how many tests of the page were skipped for want of a browser.
"""

from __future__ import annotations

import os
import random
import sys

# Before anything imports huggingface_hub or transformers: a test must never wait for the hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side, and what oneDNN packs is counted per thread

import numpy as np
import pytest
from page_browser import NO_CHROMIUM, NO_PLAYWRIGHT, browser, html, opened, with_tables

__all__ = ["browser", "html", "opened", "with_tables"]  # fixtures of the tests in a browser


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:  # most tests never load it
        sys.modules["torch"].manual_seed(0)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Say how many tests of the page were skipped and what installs what they miss: the last line, where any were."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return
    skipped = [report.longrepr[2] for report in reporter.stats.get("skipped", [])]  # (file, line, reason)
    for missing in (NO_PLAYWRIGHT, NO_CHROMIUM):
        if count := sum(missing in reason for reason in skipped):
            reporter.write_line(f"{count} test{'s' * (count > 1)} of the page skipped: {missing}")
