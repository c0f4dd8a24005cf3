"""Card: the GPU whose memory a sweep is planned for, by name or as NVML sees it, and what an hour of it costs.

In: a name and a size, a price or a provider. Out: a frozen Card and a Rate. Never asks the machine (measure/nvml.py).
"""

from dataclasses import dataclass, replace

from vramprobe import catalog
from vramprobe.errors import SpecError, UnknownName
from vramprobe.records.record import Environment
from vramprobe.spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class Card:
    """The memory that cells are planned for; ``gpu`` is the catalog's entry, null for a card it does not know."""

    name: str
    total_bytes: int
    gpu: catalog.Gpu | None
    is_emulated: bool = False

    def of(self, spec: CellSpec) -> catalog.Gpu:
        """The GPU that a cell finds, of the memory that it is limited to; of an unknown one the size alone is known."""
        known = self.gpu or catalog.gpu_or_size("1GiB")
        return replace(known, name=self.name, total_bytes=card_bytes(spec, self))


@dataclass(frozen=True)
class Rate:
    """US dollars per hour of one GPU, and whose price it is."""

    usd_per_hour: float
    source: str

    def dollars(self, seconds: float) -> float:
        """US dollars for so many seconds."""
        return self.usd_per_hour * seconds / 3600


def hourly_rate(card: Card | None, usd_per_hour: float | None = None, provider: str | None = None) -> Rate | None:
    """Return the price of one GPU hour: as given, else the provider's on-demand price, else the catalog's cheapest;
    None on a CPU.

    Raises SpecError for a price that cannot be, UnknownName for a provider that has none for this GPU.
    """
    if usd_per_hour is not None:
        if not 0 < usd_per_hour < 1e4:
            raise SpecError(f"a price must be more than 0 dollars per hour of one GPU, {usd_per_hour} given")
        return Rate(usd_per_hour, "as given")
    if card is not None and card.is_emulated and provider is None:
        return None  # it is this machine that computes
    if card is None or card.gpu is None:
        if provider is not None:
            where = "the CPU has no price" if card is None else f"the catalog has no prices of {card.name}"
            raise SpecError(f"provider {provider} was named, but {where}; give --price in dollars per hour")
        return None
    offers = [price for price in catalog.list_prices(card.gpu.short_name) if price.terms == "on-demand"]
    if provider is not None:
        fitting = [price for price in offers if price.provider.lower() == provider.lower()]
        if not fitting:
            advice = f"On-demand prices of {card.gpu.name} are known from these alone; or give --price."
            raise UnknownName("provider", provider, {price.provider for price in offers}, advice)
        offers = fitting
    if not offers:
        return None
    cheapest = min(offers, key=lambda price: (price.num_gpus, price.usd_per_gpu_hour))  # of the smallest machines
    return Rate(cheapest.usd_per_gpu_hour, f"{cheapest.provider} on demand, {cheapest.date}")


def card_named(name: str) -> Card:
    """A card of the catalog. Raises UnknownName, or SpecError where its memory is not known."""
    gpu = catalog.find_gpu(name)
    if gpu.total_bytes is None:
        raise SpecError(f"the memory of {gpu.name} is not known, so no sweep can be planned for it")
    return Card(name=gpu.name, total_bytes=gpu.total_bytes, gpu=gpu)


def card_seen(name: str, total_bytes: int, *, is_emulated: bool = False) -> Card:
    """A card as NVML reports it."""
    return Card(name=name, total_bytes=total_bytes, gpu=catalog.gpu_seen(name), is_emulated=is_emulated)


def is_same_card(then: Environment, card: Card) -> bool:
    """By name, or as one entry of the catalog; what an emulated card did says nothing of a real one."""
    if (then.emulator is not None) != card.is_emulated:
        return False
    if then.device_name == card.name:
        return then.nvml_total_bytes in (None, card.total_bytes)
    return card.gpu is not None and card_seen(then.device_name, 0).gpu == card.gpu


def card_bytes(spec: CellSpec, card: Card | None) -> int | None:
    """The memory that ``spec`` will find: the card's, or what it is limited to."""
    known = [size for size in (card.total_bytes if card else None, spec.limit_vram_bytes) if size is not None]
    return min(known, default=None)
