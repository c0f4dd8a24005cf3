"""Prediction: the memory of a cell that nobody ran, with an interval, its terms and its phase.

Types alone: predict.py makes them, verdict.py holds them against a GPU.
"""

from typing import Literal

from vramprobe.choices import PhaseName
from vramprobe.model.card_fit import Ratio
from vramprobe.records.frozen import FrozenModel

#: A recorded step (recorded.py), of any model that runs; shares of one GPU's recorded step (shares.py), of a rank, in
#: searches.
Engine = Literal["recipe", "near"]


class Interval(FrozenModel):
    """Bytes: the best value, and where the truth should lie."""

    value: int
    low: int
    high: int


class Within(FrozenModel):
    """Retries of a run whose reserved memory would exceed its card: cached blocks are freed, which takes time."""

    limit_bytes: int  # what segments may take together
    num_alloc_retries: int  # over the load and the steps


class FitProvenance(FrozenModel):
    """Provenance of the fit on which a prediction rests."""

    data_fingerprint: str
    num_records: int
    models: list[str]
    card: str
    allocated_over_predicted: Ratio  # measured memory over what is predicted without the fit
    vramprobe_version: str


class Prediction(FrozenModel):
    """The peak of one cell; ``terms`` (bytes at the peak moment) and ``constant_bytes`` add up to the value.

    ``constant_bytes``: what the fit, or the replay, has beside the terms; negative where it has less.
    """

    cell_id: str
    engine: Engine = "recipe"
    peak_allocated_bytes: Interval
    peak_phase: PhaseName
    peak_label: str
    terms: dict[str, int]
    constant_bytes: int
    reserved_bytes: Interval | None = None  # null where the fit has not seen the caching allocator
    device_bytes: Interval | None = None  # null where the fit has not seen NVML
    within: Within | None = None  # null where memory suffices, or does not even so, or nobody asked (replay.py)
    fit: FitProvenance | None = None  # null: no measured runs were fitted
    warnings: list[str] = []
    libraries: dict[str, str] = {}  # package → version: what it holds for
    num_gpus: int = 1  # more: of one rank
    sharding: str | None = None
    host_bytes: int | None = None  # tensors of one rank in host memory, where something is offloaded

    @property
    def shown_terms(self) -> dict[str, int]:
        """Terms and, where there is more beside them, the constant, in bytes."""
        return self.terms | ({"constant": self.constant_bytes} if self.constant_bytes > 0 else {})
