"""Rates: how much of a data sheet's figures a training step reaches, as numbers that a fit left behind.

In: data/rates/. Out: frozen Rates with what they were fitted to and how far they are off, and tables of measured
kernels. Reads nothing at import; they are fitted by benchmarks/speed/rates_fit.py.
"""

from functools import cache
from typing import Literal, TypeVar

from pydantic import ValidationError

from vramprobe.catalog.shipped import data_file
from vramprobe.errors import FitError
from vramprobe.records.frozen import FiniteModel

#: What an interval depends on: whether the card has published rows, and whether the step is long enough to hide the
#: host's launches. ``measured``: records of the card replace it.
Condition = Literal["usual", "short steps", "card never seen", "measured"]
#: Below this many tokens of a micro-step, kernels are short and the host decides.
SHORT_TOKENS = 4096
#: GPUs of one machine; beyond, the network decides, whose rate is not known.
GPUS_PER_MACHINE = 8


_Read = TypeVar("_Read", bound=FiniteModel)


class Rates(FiniteModel):
    """Shares of what measured kernels reach by shape (products, attention, link), of the bandwidth (stream, dequantised
    weights); seconds of a kernel's launch and of what an optimizer step takes besides.
    """

    product: float
    attention: float
    stream: float
    dequantise: float
    link: float
    kernel_seconds: float
    step_seconds: float


class SpeedFit(FiniteModel):
    """Rates, and what they rest on. ``half_widths``: of 80 % of what was left out, |log(predicted / published)|."""

    rates: Rates
    half_widths: dict[Condition, float]
    cards: list[str]  # short names with published rows
    sources: dict[str, int]  # source → configurations
    num_configurations: int
    median_error: float  # on sources left out, of those in good conditions
    data: str  # the file, and the digest of its text


class KernelTables(FiniteModel):
    """Measured kernels. Shares are per mille of a card's 16-bit peak; speeds GB/s of a whole message."""

    source: str
    alike: dict[str, str]  # architecture, with its board's links where these decide → the card whose table is read
    m: list[int]
    n: list[int]
    k: list[int]
    products: dict[str, list[int]]  # by m, then n, then k
    narrow_m: list[int]
    faster: dict[str, dict[str, list[float]]]  # fp8 or nvfp4 → card → times as fast as in 16 bit, by m
    lengths: list[int]
    attention: dict[str, dict[str, list[int]]]  # card → head width → by length
    sizes: list[int]  # bytes
    collectives: dict[str, dict[str, dict[str, list[float]]]]  # card → kind → GPUs → by size
    best_source: str
    best_tflops: dict[str, float]


@cache
def kernel_tables() -> KernelTables:
    """The tables that ship. Raises FitError where their file is damaged."""
    return _read("rates/kernels.json", KernelTables)


@cache
def shipped_counted() -> SpeedFit:
    """The fit that ships, to counted steps. Raises FitError where its file is damaged."""
    return _read("rates/counted.json", SpeedFit)


def _read(name: str, kind: type[_Read]) -> _Read:
    path = data_file(name)
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise FitError(f"{path.name}, which ships with vramprobe, cannot be read: {error}; install it anew") from None
