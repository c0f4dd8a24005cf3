"""Reported properties of each card, and the names and counts that are taken."""

import pytest

from vramprobe.catalog.gpus import find_gpu, list_gpus
from vramprobe.catalog.shipped import csv_rows
from vramprobe.emulate.cards import MAX_CARDS, card_properties, parse_cards
from vramprobe.errors import SpecError, UnknownName
from vramprobe.units import MIB

NVIDIA = [gpu for gpu in list_gpus() if gpu.vendor == "NVIDIA"]
CARDS = [card_properties(gpu.short_name) for gpu in NVIDIA]


def test_every_nvidia_card_of_the_catalog_can_be_emulated():
    assert [card.gpu for card in CARDS] == NVIDIA
    assert {row["gpu"] for row in csv_rows("gpu_properties.csv")} == {card.gpu.name for card in CARDS}


def test_a_card_is_found_again_by_the_name_that_torch_reports():
    for card in CARDS:
        assert find_gpu(card.name) == card.gpu


def test_an_h100_is_what_torch_printed_of_one():
    """_CudaDeviceProperties(name='NVIDIA H100 80GB HBM3', major=9, minor=0, total_memory=81089MB,
    multi_processor_count=132, L2_cache_size=50MB), torch 2.7.0."""
    card = card_properties("H100-SXM")
    assert (card.name, card.compute_capability) == ("NVIDIA H100 80GB HBM3", (9, 0))
    assert (card.total_bytes, card.nvml_total_bytes) == (81089 * MIB, 81559 * MIB)
    assert (card.sm_count, card.l2_bytes) == (132, 50 * MIB)
    assert (card.threads_per_sm, card.blocks_per_sm) == (2048, 32)
    assert (card.shared_memory_per_sm_bytes, card.shared_memory_per_block_optin_bytes) == (233472, 232448)


def test_the_driver_keeps_little_for_itself():
    """torch's total is below nvidia-smi's by up to 1.1 GB, by less than 3 % of a card from 20 GB on; never above it."""
    for card in CARDS:
        kept = card.nvml_total_bytes - card.total_bytes
        assert 0 <= kept <= 1200 * MIB, card.name
        assert kept / card.nvml_total_bytes < (0.03 if card.gpu.nominal_gb >= 20 else 0.07), card.name


def test_two_transfers_a_clock_give_the_bandwidth():
    for card in CARDS:
        bytes_per_s = 2 * card.memory_clock_khz * 1000 * card.memory_bus_bits / 8
        assert bytes_per_s == pytest.approx(card.gpu.bandwidth_gb_s * 1e9, rel=1e-5)
    assert card_properties("A100-40GB-SXM").memory_clock_khz == pytest.approx(1215000, rel=1e-3)  # what its driver says


def test_each_has_its_source_and_what_is_estimated_says_so():
    for card in CARDS:
        assert card.source.startswith("total: ")
        assert len(card.source) > 30
    estimated = {card.gpu.short_name for card in CARDS if "estimate" in card.source}
    assert {"B300", "GB200", "GB300", "GH200", "GH200-144GB", "RTX-5060", "RTX-5070", "RTX-A2000"} <= estimated
    assert not estimated & {
        "RTX-3060",
        "RTX-3080",
        "RTX-4060-Ti-8GB",
        "RTX-4080-Super",
        "RTX-5080",
        "RTX-A5000",
        "P100",
    }


def test_a_memory_that_the_cpu_shares_is_cuda_s_alone():
    """deviceQuery of a GB10: 122,570 MBytes, 48 SMs, 24 MB of L2; nvidia-smi prints [N/A] for its memory."""
    card = card_properties("DGX Spark")
    assert (card.gpu.short_name, card.name, card.compute_capability) == ("GB10", "NVIDIA GB10", (12, 1))
    assert (card.total_bytes, card.nvml_total_bytes, card.integrated) == (122570 * MIB, 122570 * MIB, 1)
    assert (card.sm_count, card.l2_bytes) == (48, 24 * MIB)
    assert [other.gpu.short_name for other in CARDS if other.integrated] == ["GB10"]


@pytest.mark.parametrize(
    ("text", "short_name", "num_cards"),
    [
        ("RTX-4090", "RTX-4090", 1),
        ("H100-SXM x4", "H100-SXM", 4),
        (" h100-sxm  X 16 ", "H100-SXM", 16),
        ("A100-80GB ×2", "A100-80GB-SXM", 2),
        ("RTX PRO 6000 Blackwell Server Edition x2", "RTX-PRO-6000-Server", 2),
    ],
)
def test_a_card_and_a_number_of_them(text, short_name, num_cards):
    card, count = parse_cards(text)
    assert (card.gpu.short_name, count) == (short_name, num_cards)


@pytest.mark.parametrize("text", ["H100-SXM:4", "H100-SXM,4", "H100-SXM *4", "4 x H100-SXM", "4x H100-SXM"])
def test_another_way_to_write_the_number_is_put_right(text):
    with pytest.raises(SpecError, match="write the number of GPUs as 'H100-SXM x4'"):
        parse_cards(text)


@pytest.mark.parametrize("text", ["H100-SXM x0", f"H100-SXM x{MAX_CARDS + 1}"])
def test_a_number_that_cannot_be(text):
    with pytest.raises(SpecError, match="an emulated machine has 1 to 16 GPUs"):
        parse_cards(text)


def test_an_unknown_card_is_met_with_the_nearest():
    with pytest.raises(UnknownName, match=r"unknown GPU 'RTX-4099'\. Nearest: RTX-4090"):
        parse_cards("RTX-4099 x2")
    with pytest.raises(SpecError, match="names no GPU"):
        parse_cards("  ")


def test_amds_cards_are_refused():
    with pytest.raises(SpecError, match="MI300X is made by AMD, and what is emulated is CUDA: give an NVIDIA GPU"):
        parse_cards("MI300X")
