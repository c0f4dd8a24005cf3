"""What every test gets: no network and fixed seeds. Synthetic cells and records are in factories.py."""

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
from page_browser import browser, html, opened, with_tables

__all__ = ["browser", "html", "opened", "with_tables"]  # fixtures of the tests in a browser


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:  # most tests never load it
        sys.modules["torch"].manual_seed(0)
