"""Kernels that an engine compiles as it runs, and cannot without a CUDA toolkit: one line in place of a long log.

In: the last lines of a command that failed. Out: what to do, or None.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_FAILED = re.compile(r"ninja: build stopped|Ninja build failed")


def not_compiled(lines: Iterable[str]) -> str | None:
    """That FlashInfer could not compile a kernel, and what that means for vLLM and SGLang."""
    lines = list(lines)
    if not any(_FAILED.search(line) for line in lines) or not any("flashinfer" in line for line in lines):
        return None
    return (
        "FlashInfer compiles this kernel with nvcc as it runs, and the CUDA toolkit is missing here: with vLLM, set "
        "VLLM_USE_FLASHINFER_SAMPLER=0; SGLang (0.5.10 and 0.5.23 were tried) needs the toolkit's headers for its norms"
    )
