"""Prices: what ships, a file of one's own, SkyPilot's catalog; each wrong cell is named with its line."""

import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vramprobe import catalog
from vramprobe.catalog.shipped import csv_rows
from vramprobe.errors import MissingDependency, SpecError
from vramprobe.recommend.money import offers_of
from vramprobe.recommend.options import Question, counts_of
from vramprobe.recommend.prices import Offer, chosen, offers_from_skypilot, read_offers, shipped_offers

HEAD = "provider,date,terms,gpu,n_gpus,usd_per_hour"
GOOD = "Mine,2026-11-01,spot,H100-SXM,8,16.0"


def offer(**values: object) -> Offer:
    usual = {"provider": "A", "date": "2026-03", "terms": "on-demand", "source": "s"}
    return Offer.model_validate(usual | {"gpu": "H100-SXM", "num_gpus": 8, "usd_per_hour": 16.0} | values)


def test_every_price_that_ships_is_an_offer() -> None:
    assert len(shipped_offers()) == len(catalog.list_prices())
    assert {one.terms for one in shipped_offers()} == {"on-demand", "reserved", "spot"}


def test_storage_that_ships_says_its_source_and_is_a_known_providers() -> None:
    rows = csv_rows("storage_prices.csv")
    known = {one.provider for one in shipped_offers()}
    assert {row["provider"] for row in rows} <= known
    assert all(row["source"] and row["date"] for row in rows)
    charged = {one.provider: one.usd_per_gb_month for one in shipped_offers()}
    assert charged == {"RunPod": 0.1, "Lambda": 0.0, "CoreWeave": 0.07, "Spheron": None}


def test_several_are_rented_as_they_are_offered() -> None:
    assert [offer().hourly(count) for count in (1, 8, 9, 16)] == [16, 16, 32, 32]
    assert [offer().holds(count) for count in (1, 8, 9, 64)] == [True] * 4
    assert [offer(num_gpus=4).holds(count) for count in (1, 4, 5, 8, 16)] == [True, True, False, False, False]


def test_only_machines_that_a_provider_lists_are_recommended() -> None:
    """Lambda rents out one GH200, not two; its A100s stand in machines of eight, of which one GPU costs all."""
    question = Question(words={}, methods=("lora",), tokens=1)
    assert counts_of(question, shipped_offers(), "GH200") == [1]
    assert counts_of(question, shipped_offers(), "H100-SXM") == [1, 2, 4, 8]
    eight = offers_of(chosen(shipped_offers(), provider="Lambda"), "A100-80GB-SXM", 1)
    assert [(one.num_gpus, one.hourly(1)) for one in eight] == [(8, 22.32)]
    named = question.model_copy(update={"gpus": ("GH200",)})
    assert counts_of(named, shipped_offers(), "GH200") == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("written", "day", "is_old"),
    [
        ("2026-03", date(2026, 5, 30), False),
        ("2026-03", date(2026, 7, 1), True),
        ("2026", date(2027, 3, 1), False),
        ("2026", date(2027, 5, 1), True),
        ("2026-03-02", date(2026, 7, 1), True),
    ],
)
def test_a_price_is_old_after_three_months(written: str, day: date, is_old: bool) -> None:
    assert offer(date=written).is_old(day) is is_old


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(f"{HEAD},region,usd_per_gb_month\n{GOOD},eu-west-1,0.1\n")
    (one,) = read_offers(file)
    assert (one.provider, one.terms, one.num_gpus) == ("Mine", "spot", 8)
    assert (one.region, one.usd_per_gb_month, one.source) == ("eu-west-1", 0.1, str(file))
    assert chosen([one], terms="spot", region="EU") == [one]
    with pytest.raises(SpecError, match="regions with prices: eu-west-1"):
        chosen([one], terms="spot", region="us")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no column provider, date, terms, gpu, n_gpus, usd_per_hour"),
        (HEAD, "has no offers"),
        ("provider,gpu\nA,H100", "has no column date"),
        (f"{HEAD},colour\n{GOOD},red", "unknown column 'colour'"),
        (f"{HEAD}\n{GOOD.replace('spot', 'gift')}", "line 2: terms 'gift' given; allowed: on-demand"),
        (f"{HEAD}\n{GOOD.replace('H100-SXM', 'H900')}", "line 2: unknown GPU 'H900'"),
        (f"{HEAD}\n{GOOD}\n{GOOD.replace('16.0', '-1')}", "line 3: usd_per_hour '-1' given"),
        (f"{HEAD}\n{GOOD.replace('16.0', 'nan')}", "line 2: usd_per_hour 'nan' given"),
        (f"{HEAD}\n{GOOD.replace(',8,', ',0,')}", "line 2: n_gpus '0' given"),
        (f"{HEAD}\n{GOOD.replace(',8,', ',,')}", "line 2: n_gpus '' given"),
        (f"{HEAD}\n{GOOD.replace('2026-11-01', '2026-13')}", "line 2: date '2026-13' given; must be a date such as"),
        (f"{HEAD},currency\n{GOOD},EUR", "line 2: currency 'EUR' given; prices are in US dollars"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(text)
    with pytest.raises(SpecError, match=said) as told:
        read_offers(file)
    assert str(file) in str(told.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read as a CSV file of prices"):
        read_offers(tmp_path / "none.csv")


def test_skypilot_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sky", None)
    with pytest.raises(MissingDependency, match=r"pip install 'vramprobe\[cloud\]'"):
        offers_from_skypilot()


def install_sky(monkeypatch: pytest.MonkeyPatch, listed: Callable[..., Any], clouds: tuple[str, ...]) -> None:
    """Install the modules of SkyPilot 0.14.1 that offers_from_skypilot imports."""
    sky, constants = ModuleType("sky"), ModuleType("sky.skylet.constants")
    sky.catalog = SimpleNamespace(list_accelerators=listed)
    constants.ALL_CLOUDS = clouds
    for name, module in (("sky", sky), ("sky.skylet", ModuleType("sky.skylet")), ("sky.skylet.constants", constants)):
        monkeypatch.setitem(sys.modules, name, module)


def test_no_catalog_that_can_be_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(**asked: object) -> None:
        raise ConnectionError("Failed to fetch")

    install_sky(monkeypatch, listed, ("aws",))
    with pytest.raises(SpecError, match=r"read no GPU's price \(aws: Failed to fetch\); give --prices FILE"):
        offers_from_skypilot()


def test_skypilots_catalog_becomes_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    """InstanceTypeInfo's fields, as sky/catalog/common.py has them."""

    def listed(**asked: object) -> dict[str, list[SimpleNamespace]]:
        assert asked.pop("clouds") in ("aws", "gcp")
        assert asked == {"gpus_only": True, "all_regions": True}
        if not listed.reached:
            listed.reached = True
            raise ConnectionError("Failed to fetch the catalog")
        usual = {"cloud": "AWS", "instance_type": "p5", "region": "eu-north-1", "device_memory": 80.0}
        return {
            "H100": [SimpleNamespace(**usual, accelerator_count=8, price=98.3, spot_price=float("nan"))],
            "A100": [SimpleNamespace(**usual, accelerator_count=8, price=32.8, spot_price=9.8)],
            "Gaudi": [SimpleNamespace(**usual, accelerator_count=8, price=13.1, spot_price=None)],
            "T4": [SimpleNamespace(**usual, accelerator_count=0.5, price=0.3, spot_price=None)],
        }

    listed.reached = False
    install_sky(monkeypatch, listed, ("gcp", "kubernetes", "aws"))
    made = offers_from_skypilot()
    assert [(one.gpu, one.num_gpus, one.terms, one.usd_per_hour) for one in made] == [
        ("H100-SXM", 8, "on-demand", 98.3),
        ("A100-40GB-SXM", 8, "on-demand", 32.8),
        ("A100-40GB-SXM", 8, "spot", 9.8),
    ]
    assert all(one.region == "eu-north-1" and one.date == date.today().isoformat() for one in made)
