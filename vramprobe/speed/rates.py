"""Rates: how much of a data sheet's figures a training step reaches, as numbers that a fit left behind.

In: data/rates/speed.json. Out: frozen Rates with what they were fitted to and how far they are off. Reads nothing at
import; the fit itself is fit.py.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from vramprobe.catalog import Gpu
from vramprobe.catalog.shipped import data_file
from vramprobe.errors import FitError

#: What an interval depends on: whether the card has published rows, and whether the step is long enough to hide the
#: host's launches and stays within one machine. ``measured``: records of the card replace it.
Condition = Literal["usual", "short steps", "several machines", "card never seen", "measured"]
#: Below this many tokens of a micro-step, kernels are short and the host decides.
SHORT_TOKENS = 4096
#: GPUs of one machine; beyond, the network decides.
GPUS_PER_MACHINE = 8


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Rates(_Frozen):
    """Shares of a card's peak (products, attention), bandwidth (stream, dequantised weights) and link; seconds of a
    kernel's launch and of what an optimizer step takes besides. ``generations`` multiplies a generation's products,
    ``attention_of`` its attention.
    """

    product: float
    attention: float
    stream: float
    dequantise: float
    dequantise_gptq: float
    link: float
    kernel_seconds: float
    step_seconds: float
    generations: dict[str, float]
    attention_of: dict[str, float]


class SpeedFit(_Frozen):
    """Rates, and what they rest on. ``half_widths``: of 80 % of what was left out, |log(predicted / published)|."""

    rates: Rates
    half_widths: dict[Condition, float]
    cards: list[str]  # short names with published rows
    sources: dict[str, int]  # source → configurations
    num_configurations: int
    median_error: float  # on sources left out, of those in good conditions
    data: str  # the file, and the digest of its text


def generation_of(gpu: Gpu) -> str:
    """Which cards share an efficiency: NVIDIA's architecture, and GeForce's apart, whose tensor cores add in fp32 at
    half the rate.
    """
    return "GeForce" if gpu.name.startswith("GeForce") else gpu.arch


@cache
def shipped_speed() -> SpeedFit:
    """The fit that ships, to arithmetic's work. Raises FitError where its file is damaged."""
    return _read("rates/speed.json")


@cache
def shipped_counted() -> SpeedFit:
    """The fit that ships, to counted work: its shares are of the kernel tables' (shapes.py). Raises FitError."""
    return _read("rates/counted.json")


def _read(name: str) -> SpeedFit:
    path = data_file(name)
    try:
        return SpeedFit.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise FitError(f"{path.name}, which ships with vramprobe, cannot be read: {error}; install it anew") from None
