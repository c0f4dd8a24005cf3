"""Explain why an engine could not start or go on, in one line in place of a long log: kernels, libraries, releases.

In: the last lines of a command that failed, or a library that was refused. Out: what to do, or None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

_FAILED = re.compile(r"ninja: build stopped|Ninja build failed")
_LIBRARY = re.compile(r"ImportError: (lib[\w.+-]+\.so[.\d]*): cannot open shared object file")
_SUPPORTED = re.compile(r"TRL currently supports vLLM versions from ([\d.]+) to ([\d.]+)\. You have version ([\w.+]+)")
_FLASH = re.compile(r"No module named '(?:flash_attn|ring_flash_attn)\b")
_FORMAT = re.compile(r"Unknown quantization method: (\w+)")


def why_not(lines: Iterable[str]) -> str | None:
    """The first reason that the lines show."""
    lines = list(lines)
    return next((said for reason in _REASONS if (said := reason(lines))), None)


def not_served(library: str) -> str:
    """A library that links CUDA's runtime statically, whose handshake an emulated driver does not have."""
    said = f"{library} has CUDA's runtime in it, which an emulated GPU cannot serve: its kernels do not run"
    if library.startswith("libcute_dsl"):
        said += " (CuTe DSL; vLLM's linear attention, as Qwen3.5's, is without it by --gdn-prefill-backend triton)"
    return said


def _not_compiled(lines: list[str]) -> str | None:
    """FlashInfer could not compile a kernel, and what that means for vLLM and SGLang."""
    if not any(_FAILED.search(line) for line in lines) or not any("flashinfer" in line for line in lines):
        return None
    return (
        "FlashInfer compiles this kernel with nvcc as it runs, and the CUDA toolkit is missing here: with vLLM, set "
        "VLLM_USE_FLASHINFER_SAMPLER=0 and no attention backend of FlashInfer's; SGLang (0.5.10 and 0.5.23 were tried) "
        "needs the toolkit's headers for its norms"
    )


def _no_library(lines: list[str]) -> str | None:
    """The engine's own kernels were made for another CUDA than torch."""
    found = _found(_LIBRARY, lines)
    if found is None or not any("vllm" in line or "sgl" in line for line in lines):
        return None
    return (
        f"the engine's kernels need {found[1]}, which is not there: its wheel was made for another CUDA release than "
        "this torch; install the torch that the engine's release names"
    )


def _no_flash_attention(lines: list[str]) -> str | None:
    """flash-attn is no dependency of what imports it."""
    if _found(_FLASH, lines) is None:
        return None
    return (
        "flash-attn is missing: PyPI has its source alone, which nvcc compiles; install a wheel made for this torch "
        "and Python, or choose SDPA where the program lets you (attn_implementation=sdpa)"
    )


def _no_format(lines: list[str]) -> str | None:
    """vLLM dropped bitsandbytes, which TRL asks it for beside a 4-bit trainer."""
    found = _found(_FORMAT, lines)
    if found is None:
        return None
    return (
        f"this vLLM has no {found[1]}: install a release that has it, or do not quantize the trainer's model in 4 bits "
        "(TRL gives the engine the same format)"
    )


def _not_supported(lines: list[str]) -> str | None:
    """TRL warns of a release that it was not written for, and goes on."""
    found = _found(_SUPPORTED, lines)
    if found is None:
        return None
    least, most, installed = found.groups()
    return f"vLLM {installed} is installed, and this TRL supports {least} to {most}: install one of these releases"


def _found(pattern: re.Pattern[str], lines: list[str]) -> re.Match[str] | None:
    return next((match for line in lines if (match := pattern.search(line))), None)


_REASONS: tuple[Callable[[list[str]], str | None], ...] = (
    _not_compiled,
    _no_library,
    _no_flash_attention,
    _no_format,
    _not_supported,
)
