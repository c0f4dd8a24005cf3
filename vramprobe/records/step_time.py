"""StepTime: how long one optimizer step of a profiled command takes on a card, and where the time goes: predicted.

In: what speed/counted.py finds, and a price. Out: frozen fields of a ProfileRecord. Seconds are of one
optimizer step with all its micro-steps, on one GPU; nothing here was measured.
"""

from vramprobe.records.frozen import FrozenModel


class LineSeconds(FrozenModel):
    """Seconds of one line of Python, its backward included; without launches' and the host's time."""

    line: str  # file:line, innermost outside torch
    function: str
    seconds: float


class UnclaimedLaunches(FrozenModel):
    """Launches between two operators, by no kernel that is known: ``forward, before aten::add``."""

    where: str
    num_launches: int


class StepTime(FrozenModel):
    """``low_seconds`` to ``high_seconds``: where 80 % of the truths should lie. ``by_class`` overlaps, and adds up to
    more than ``seconds``. ``tokens_per_second`` is of one GPU, null where no embedding says how many tokens there are.
    """

    gpu: str  # short name
    rank: int | None = None
    step: int  # 1-based: the one that was counted
    seconds: float
    low_seconds: float
    high_seconds: float
    condition: str  # of the speed model's interval
    tokens: int | None = None  # of one GPU: its share, where several work on the same ones
    samples: int | None = None
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    parallel: dict[str, int] = {}  # tensor, context, pipeline: ranks that share a model; virtual: chunks of a stage
    num_micro_steps: int = 1
    mfu: float  # without recomputation, over the card's 16-bit peak
    hfu: float  # with it
    by_class: dict[str, float]  # seconds
    by_line: list[LineSeconds] = []
    flops: int
    num_bytes: int  # read and written by kernels
    num_launches: int  # products by cuBLAS among them
    unclaimed_share: float  # of the launches that the driver counted
    unclaimed: list[UnclaimedLaunches] = []

    @property
    def bubble_share(self) -> float | None:
        """Share that waiting adds to the micro-batches' time where all stages are alike: 1F1B's bubble, which
        interleaved chunks divide; null without a pipeline. ``by_class`` has its seconds as ``waiting``.
        """
        stages = self.parallel.get("pipeline", 1)
        if stages < 2:
            return None
        return (stages - 1) / (self.num_micro_steps * self.parallel.get("virtual", 1))


class CardTime(FrozenModel):
    """Seconds of the same step on another card, and its cost there by one offer: predicted.

    ``tokens_per_second`` is of one GPU; dollars are of the whole machines that ``provider`` rents
    out with the run's number of ranks, null where none is known.
    """

    seconds: float
    low_seconds: float
    high_seconds: float
    condition: str  # of the speed model's interval
    tokens_per_second: float | None = None
    num_gpus: int
    usd_per_1000_steps: float | None = None
    low_usd_per_1000_steps: float | None = None
    high_usd_per_1000_steps: float | None = None
    usd_per_hour: float | None = None  # of the machines
    rented_gpus: int | None = None  # of the machines, which are rented whole: at least num_gpus
    provider: str | None = None
    price_date: str | None = None
    price_is_old: bool | None = None  # when the profile was made
