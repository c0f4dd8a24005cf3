"""Money: hours of a run, and offers → dollars, by the cheapest of the machines that hold it.

In: a rate with its interval, offers, what the run needs beside its cards. Out: hours and dollars with the same
interval. Loads neither predictions nor searches: predict asks it, too.
"""

from collections.abc import Sequence

from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.bounds.states import state_bytes
from vramprobe.bounds.tensors import tensors
from vramprobe.recommend.prices import Offer
from vramprobe.records.frozen import FrozenModel
from vramprobe.spec import CellSpec
from vramprobe.speed.figure import Figure

#: Checkpoints that are kept while a run goes on, as a trainer's save_total_limit of 2 keeps.
_KEPT_CHECKPOINTS = 2
_HOURS_PER_MONTH = 730


class Host(FrozenModel):
    """Bytes that the run needs beside its cards, by arithmetic: the machine's memory while loading, and disk."""

    memory_bytes: int
    disk_bytes: int
    checkpoint_bytes: int


def offers_of(offers: Sequence[Offer], gpu: str, num_gpus: int) -> list[Offer]:
    """The offers of machines that hold so many of a GPU."""
    return [one for one in offers if one.gpu == gpu and one.holds(num_gpus)]


def hours_of(tokens: int, rate: Figure) -> Figure:
    """Hours that so many tokens take at this rate per second."""
    return Figure(value=tokens / rate.value / 3600, low=tokens / rate.high / 3600, high=tokens / rate.low / 3600)


def host_of(spec: CellSpec) -> Host | None:
    """Loading holds the 16-bit weights once on the first rank; disk holds them and the checkpoints that are kept. None
    for a model whose tensors are not known.
    """
    try:
        stored = tensors(spec, architecture(spec.architecture))
    except UnsupportedArchitecture:
        return None
    weights = 2 * sum(t.numel * t.num_copies for t in stored if t.role != "adapter")
    trained = [t for t in stored if t.trained]
    checkpoint = sum(t.num_bytes * t.num_copies for t in trained) + state_bytes(spec, trained)
    return Host(memory_bytes=weights, disk_bytes=weights + _KEPT_CHECKPOINTS * checkpoint, checkpoint_bytes=checkpoint)


def usd_of(hours: Figure, offer: Offer, num_gpus: int, host: Host | None) -> Figure:
    """The cards by the hour, and storage and the last checkpoint's egress where both are known and have a price."""
    disk_bytes, sent_bytes = (0, 0) if host is None else (host.disk_bytes, host.checkpoint_bytes)
    hourly = offer.hourly(num_gpus) + disk_bytes / 1e9 * (offer.usd_per_gb_month or 0.0) / _HOURS_PER_MONTH
    once = sent_bytes / 1e9 * (offer.usd_per_gb_egress or 0.0)
    return Figure(value=hours.value * hourly + once, low=hours.low * hourly + once, high=hours.high * hourly + once)


def cheapest(
    offers: Sequence[Offer], hours: Figure, gpu: str, num_gpus: int, host: Host | None
) -> tuple[Offer | None, Figure | None]:
    """Return the offer at which ``hours`` on so many of a GPU cost least, and the dollars; None twice without one."""
    its = offers_of(offers, gpu, num_gpus)
    offer = min(its, key=lambda one: usd_of(hours, one, num_gpus, host).value, default=None)
    return offer, None if offer is None else usd_of(hours, offer, num_gpus, host)
