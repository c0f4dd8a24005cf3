"""Prices: what an hour of so many GPUs costs where, when and on which terms.

In: the prices that ship, a CSV file of one's own, or SkyPilot's catalog where that is installed. Out: frozen Offers,
or an error that names the file, the line and what is allowed there.
"""

import csv
import re
from collections.abc import Iterable, Sequence
from datetime import date as date_type
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator

from vramprobe import catalog
from vramprobe.catalog.shipped import csv_rows, number
from vramprobe.errors import MissingDependency, SpecError, UnknownName
from vramprobe.records.frozen import FiniteModel
from vramprobe.speed.rates import GPUS_PER_MACHINE

Terms = Literal["on-demand", "spot", "reserved"]
_Rate = Annotated[float, Field(ge=0)]
#: After so many days a price is called old.
OLD_DAYS = 90
#: How price lists write the terms. CoreWeave's pods are rented whole, by the hour.
_TERMS: dict[str, Terms] = {
    **dict.fromkeys(("on-demand", "on demand", "pod"), "on-demand"),
    **dict.fromkeys(("spot", "interruptible", "preemptible", "community"), "spot"),
    **dict.fromkeys(("reserved", "reserved annual", "committed"), "reserved"),
}
_REQUIRED = ("provider", "date", "terms", "gpu", "n_gpus", "usd_per_hour")
#: What disk costs while a run goes on, and what is sent out of the provider's network.
_STORAGE = ("usd_per_gb_month", "usd_per_gb_egress")
_OPTIONAL = ("region", "currency", "source", *_STORAGE)
#: What SkyPilot counts among clouds and nobody rents.
_OWN_CLUSTERS = ("kubernetes", "slurm", "ssh", "vsphere")
#: What --prices takes in place of a file.
SKYPILOT = "skypilot"


class Offer(FiniteModel):
    """A machine that is rented: ``usd_per_hour`` is for all its ``num_gpus`` together; ``source`` says who says so."""

    provider: Annotated[str, Field(min_length=1)]
    date: str  # a day, a month or a year, as 2026-11
    terms: Terms
    gpu: str  # the catalog's short name
    num_gpus: Annotated[int, Field(ge=1, le=100_000)]
    usd_per_hour: Annotated[float, Field(gt=0, lt=1e7)]
    source: str
    region: str | None = None
    usd_per_gb_month: _Rate | None = None  # of storage
    usd_per_gb_egress: _Rate | None = None

    def holds(self, num_gpus: int) -> bool:
        """Return True if it has ``num_gpus``; of more than eight, the eight of a machine in the speed estimate."""
        return self.num_gpus >= min(num_gpus, GPUS_PER_MACHINE)

    def hourly(self, num_gpus: int) -> float:
        """US dollars per hour of the machines that hold ``num_gpus``, each rented whole."""
        return -(-num_gpus // self.num_gpus) * self.usd_per_hour

    @field_validator("date")
    @classmethod
    def _a_date(cls, value: str) -> str:
        try:
            date_type.fromisoformat(_last_day(value))
        except ValueError:
            raise ValueError("must be a date such as 2026-11 or 2026-11-22") from None
        return value

    def is_old(self, today: date_type) -> bool:
        """Return True if the month or year of its date ended more than :data:`OLD_DAYS` ago."""
        return (today - date_type.fromisoformat(_last_day(self.date))).days > OLD_DAYS


def _last_day(written: str) -> str:
    """Return a day at the end of a month or year that each has."""
    return written + {4: "-12-28", 7: "-28"}.get(len(written), "")


@cache
def shipped_offers() -> tuple[Offer, ...]:
    """The catalog's prices, with those of storage and egress of the providers that were found to say theirs."""
    storage = {row["provider"]: row for row in csv_rows("storage_prices.csv")}
    return tuple(
        Offer(
            provider=price.provider,
            date=price.date,
            terms=_TERMS[price.terms],
            gpu=price.gpu.short_name,
            num_gpus=price.num_gpus,
            usd_per_hour=price.usd_per_hour,
            source="vramprobe/data/prices.csv",
            usd_per_gb_month=number(storage.get(price.provider, {}).get("usd_per_gb_month", ""), float),
            usd_per_gb_egress=number(storage.get(price.provider, {}).get("usd_per_gb_egress", ""), float),
        )
        for price in catalog.list_prices()
    )


def read_offers(path: Path) -> list[Offer]:
    """The offers of a CSV file with the columns of data/prices.csv and, as you like, region and others.

    Raises SpecError for a file that cannot be read, lacks a column or has a value that cannot be, with its line.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            columns = [name.strip() for name in reader.fieldnames or ()]
            rows = [dict(zip(columns, row.values(), strict=False)) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"{path} cannot be read as a CSV file of prices: {error}; {_columns()}") from None
    if missing := [name for name in _REQUIRED if name not in columns]:
        raise SpecError(f"{path} has no column {', '.join(missing)}, but {', '.join(columns)}; {_columns()}")
    if unknown := [name for name in columns if name not in (*_REQUIRED, *_OPTIONAL)]:
        raise SpecError(f"{path}: unknown column {', '.join(map(repr, unknown))}; {_columns()}")
    offers = [_offer(path, line, row) for line, row in enumerate(rows, start=2)]
    if not offers:
        raise SpecError(f"{path} has no offers; {_columns()}")
    return offers


def _columns() -> str:
    return f"a file of prices has the columns {', '.join(_REQUIRED)}, and if you like {', '.join(_OPTIONAL)}"


def _offer(path: Path, line: int, row: dict[str, Any]) -> Offer:
    values = {name: (text or "").strip() for name, text in row.items() if isinstance(text, str | None)}
    where = f"{path}, line {line}"
    if (currency := values.pop("currency", "") or "USD").upper() != "USD":
        raise SpecError(f"{where}: currency {currency!r} given; prices are in US dollars (USD), so convert it")
    terms = values["terms"].lower()
    if terms not in _TERMS:
        raise SpecError(f"{where}: terms {values['terms']!r} given; allowed: {', '.join(_TERMS)}")
    try:
        gpu = catalog.find_gpu(values["gpu"]).short_name
    except (UnknownName, SpecError) as error:
        raise SpecError(f"{where}: {error}") from None
    named = {name: value for name, value in values.items() if value}
    named |= {"terms": _TERMS[terms], "gpu": gpu, "num_gpus": named.pop("n_gpus", "")}
    named.setdefault("source", str(path))
    try:
        return Offer.model_validate(named)
    except ValidationError as error:
        first = error.errors()[0]
        name = {"num_gpus": "n_gpus"}.get(str(first["loc"][0]), str(first["loc"][0]))
        raise SpecError(
            f"{where}: {name} {first['input']!r} given; {first['msg'].removeprefix('Value error, ')}"
        ) from None


def offers_from_skypilot() -> list[Offer]:
    """Every GPU offer of SkyPilot's catalogs, on demand and spot, as it has them today; a cloud whose catalog it cannot
    fetch is passed over.

    Raises MissingDependency where SkyPilot is not installed, SpecError where it can read no catalog.
    """
    try:
        from sky import catalog as clouds
        from sky.skylet.constants import ALL_CLOUDS
    except ImportError:
        raise MissingDependency(
            "--prices skypilot reads SkyPilot's catalogs, and SkyPilot is not installed; install it "
            "(pip install 'vramprobe[cloud]'), or give --prices FILE.csv"
        ) from None
    offers, failed = [], {}
    for cloud in ALL_CLOUDS:
        if cloud in _OWN_CLUSTERS:
            continue
        try:
            listed = clouds.list_accelerators(gpus_only=True, all_regions=True, clouds=cloud)
        except Exception as error:  # each cloud's module and each way of fetching has its own
            failed[cloud] = str(error)
        else:
            offers += _from_skypilot(listed, date_type.today())
    if not offers:
        said = "; ".join(f"{cloud}: {error.split(chr(10))[0]}" for cloud, error in failed.items())
        raise SpecError(f"SkyPilot read no GPU's price ({said}); give --prices FILE.csv")
    return offers


def _from_skypilot(listed: dict[str, Sequence[Any]], today: date_type) -> Iterable[Offer]:
    """Offers of what ``list_accelerators`` gives; accelerators that are no card of the catalog are passed over."""
    for name, instances in listed.items():
        for one in instances:
            gpu = skypilot_gpu(name)
            count = one.accelerator_count
            if gpu is None or count != int(count) or count < 1:
                continue
            for terms, price in (("on-demand", one.price), ("spot", one.spot_price)):
                if price is not None and price == price and price > 0:
                    yield Offer(
                        provider=one.cloud,
                        date=today.isoformat(),
                        terms=_TERMS[terms],
                        gpu=gpu,
                        num_gpus=int(count),
                        usd_per_hour=float(price),
                        source="SkyPilot's catalog",
                        region=one.region,
                    )


def skypilot_gpu(name: str) -> str | None:
    """The catalog's card for SkyPilot's name (``A100`` is the one of 40 GB, ``V100-32GB`` says its own)."""
    plain = re.sub(r"-?(SXM\d?)$", "-SXM", name)
    known = {
        "A100": "A100-40GB-SXM",
        "A100-80GB": "A100-80GB-SXM",
        "V100": "V100-16GB-SXM",
        "RTXA6000": "RTX-A6000",
        "RTX6000-Ada": "RTX-6000-Ada",
    }
    try:
        return catalog.find_gpu(known.get(name, plain)).short_name
    except UnknownName:
        return None


def chosen(
    offers: Iterable[Offer], *, terms: str = "on-demand", provider: str | None = None, region: str | None = None
) -> list[Offer]:
    """The offers on these terms, of this provider, in a region whose name has ``region`` in it.

    Raises SpecError for unknown terms and where no offer is left, UnknownName for a provider that has none.
    """
    known = list(offers)
    if terms not in get_args(Terms):
        raise SpecError(f"terms: {terms!r} given; allowed: {', '.join(get_args(Terms))}")
    if provider is not None:
        names = {one.provider for one in known}
        known = [one for one in known if one.provider.lower() == provider.lower()]
        if not known:
            raise UnknownName("provider", provider, names, f"Prices are known of {', '.join(sorted(names))}.")
    on_terms = [one for one in known if one.terms == terms]
    if not on_terms:
        there = sorted({one.terms for one in known})
        raise SpecError(f"no {terms} price is known{_of(provider)}; there are prices {', '.join(there)}")
    if region is None:
        return on_terms
    near = [one for one in on_terms if one.region and region.lower() in one.region.lower()]
    if not near:
        regions = sorted({one.region for one in on_terms if one.region})
        said = f"regions with prices: {', '.join(regions[:12])}" if regions else "no price at hand names its region"
        raise SpecError(
            f"region {region!r}: no {terms} price{_of(provider)} is in it ({said}); give --prices FILE.csv with a "
            "column region, or --prices skypilot"
        )
    return near


def _of(provider: str | None) -> str:
    return f" of {provider}" if provider else ""


def price_notes(used: Sequence[Offer], today: date_type) -> list[str]:
    """Return a note of the prices' dates and sources, which names old ones; nothing without prices."""
    if not used:
        return []
    dates = sorted({offer.date for offer in used})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    text = f"prices {used[0].terms}, of {when}, from {', '.join(sorted({offer.source for offer in used}))}"
    if old := old_dates(used, today):
        text += f"; those of {', '.join(old)} are more than 3 months old: "
        text += "give --prices FILE.csv or --prices skypilot"
    return [text]


def old_dates(offers: Sequence[Offer], today: date_type) -> list[str]:
    """The dates of the offers that are old."""
    return sorted({offer.date for offer in offers if offer.is_old(today)})
